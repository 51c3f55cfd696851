"""A tiny random model and catalogs for it, as the engine and as the oracle see them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from oracle import NaiveModel, Sid, Weights, beam_search, random_weights
from safetensors.torch import save_file

from xgr_engine.catalog.trie import ItemTrie, build_trie
from xgr_engine.models.loading import load_model
from xgr_engine.models.spec import ModelSpec, RopeSpec
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xbeam.ranking import BatchResult

CODES, LEVELS, TEXT_TOKENS = 6, 4, 5
TINY = ModelSpec(
    family="qwen3",
    vocab_size=TEXT_TOKENS + CODES * LEVELS + 3,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,  # the least that a GPU's tensor cores multiply
    intermediate_size=24,
    rms_eps=1e-6,
    rope=RopeSpec(theta=10000.0),
    max_context=64,
    tied=False,
    qk_norm=True,
    dtype="float32",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = [{code: TEXT_TOKENS + level * CODES + code for code in range(CODES)} for level in range(LEVELS)]


def token_table(levels: list[dict[int, int]] = TOKENS) -> SidTokenTable:
    return SidTokenTable(
        codes=tuple(np.array(sorted(level), np.int32) for level in levels),
        token_ids=tuple(np.array([level[code] for code in sorted(level)], np.int32) for level in levels),
        texts=tuple(tuple(f"<{'abcd'[at]}_{code}>" for code in sorted(level)) for at, level in enumerate(levels)),
    )


@dataclass(frozen=True)
class TinyCatalog:
    """``catalog`` lists (item, SID) with an item's number as its identity; ``trie`` is built from the same rows."""

    catalog: list[tuple[int, Sid]]
    trie: ItemTrie
    rows: dict[int, int]  # item -> row of items.parquet

    @classmethod
    def of(cls, sids: list[Sid]) -> TinyCatalog:
        width = max(len(sid) for sid in sids)
        codes = np.array([list(sid) + [-1] * (width - len(sid)) for sid in sids], np.int32)
        trie, order = build_trie(codes)
        return cls(list(enumerate(sids)), trie, {int(item): row for row, item in enumerate(order)})

    def items(self, rows: np.ndarray) -> list[int]:
        by_row = {row: item for item, row in self.rows.items()}
        return [by_row[int(row)] for row in rows]


def save_weights(weights: Weights, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    return path


class TinyWorld:
    """One random model, ready for the engine (on the GPU where there is one) and the oracle (on the CPU)."""

    def __init__(self, folder: Path, spec: ModelSpec = TINY, seed: int = 0, scale: float = 0.3) -> None:
        weights = random_weights(spec, seed, scale)
        self.naive = NaiveModel(spec, weights)
        self.spec = spec
        self.model, self.head = load_model(spec, save_weights(weights, folder / f"weights{seed}.safetensors"), DEVICE)

    def recommender(self, catalog: TinyCatalog, options: SearchOptions, **more: object) -> Recommender:
        return Recommender(self.model, self.head, catalog.trie, token_table(), options, **more)  # type: ignore[arg-type]

    def expected(self, prompt: list[int], catalog: TinyCatalog, **how: object):
        """:func:`oracle.beam_search` for a prompt."""
        return beam_search(self.naive, tuple(prompt), catalog.catalog, TOKENS, **how)  # type: ignore[arg-type]


def lists(catalog: TinyCatalog, result: BatchResult) -> list[list[tuple[int, float]]]:
    """Per user (item, score), best first."""
    items, answers, at = catalog.items(result.item_rows), [], 0
    for count in result.counts.tolist():
        answers.append(list(zip(items[at : at + count], result.scores[at : at + count].tolist(), strict=True)))
        at += count
    return answers


def random_prompts(seed: int, lengths: list[int], vocab: int = TINY.vocab_size) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length).astype(np.int32) for length in lengths]


def same_ranking(
    got: list[tuple[int, float]], expected: list[tuple[object, Sid, float]], tolerance: float = 2e-5
) -> None:
    """Equal as the design defines it: same items, order free only where scores are closer than the tolerance."""
    assert len(got) == len(expected)
    torch.testing.assert_close(
        torch.tensor([score for _, score in got], dtype=torch.float64),
        torch.tensor([score for _, _, score in expected], dtype=torch.float64),
        rtol=0,
        atol=tolerance,
    )
    wanted = {item: score for item, _, score in expected}
    for position, (item, score) in enumerate(got):
        if item != expected[position][0]:
            # another item at this place: allowed only for one whose score ties with the expected one
            near = wanted.get(item, expected[-1][2])
            assert abs(near - expected[position][2]) < tolerance, (got, expected)
            assert abs(score - expected[position][2]) < tolerance

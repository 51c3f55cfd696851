"""A catalog, a tiny random model and a stand-in engine for the tests of the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.catalog.build import BuildOptions, build_vocabulary
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.job.engine import LoadedEngine
from xgr_engine.job.options import HistoryOptions, RecommendOptions
from xgr_engine.job.record import JobReport
from xgr_engine.job.run import Caller, run_job
from xgr_engine.options import SearchOptions
from xgr_engine.xbeam.ranking import BatchResult

CODES = 8
OFFSETS = (2, 2 + CODES, 2 + 2 * CODES)
VOCAB_SIZE = 2 + 3 * CODES

# 40 items on 36 SIDs: items 0..3 share a SID with items 36..39.
SIDS = [[i % 6, (i // 6) % 6, i % 5] for i in range(36)]
SIDS += SIDS[:4]


def make_vocabulary(
    out: Path, ids: Sequence[Any] | pa.Array | None = None, titles: Sequence[str] | None = None
) -> Path:
    """40 items; ``ids`` default to 100..139 as int64."""
    item_ids = pa.array(range(100, 140), pa.int64()) if ids is None else pa.array(ids)
    catalog = out.with_name(f"{out.name}.catalog.parquet")
    columns = {
        "item_id": item_ids,
        "sid": pa.array(SIDS, pa.list_(pa.int32())),
        "title": pa.array(titles or [f"title {i}" for i in range(40)]),
    }
    pq.write_table(pa.table(columns), catalog)
    build_vocabulary([catalog], out, ReadOptions(), BuildOptions())
    return out


def make_model(out: Path, max_context: int = 64, seed: int = 0) -> Path:
    """A random one-layer Qwen3 whose tokens are offset + code."""
    import torch
    from safetensors.torch import save_file

    source = out.with_name(f"{out.name}.source")
    source.mkdir()
    hidden, heads, kv_heads, head_dim, inner = 16, 2, 1, 8, 24
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    (source / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (heads * head_dim, hidden),
        "model.layers.0.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "model.layers.0.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "model.layers.0.self_attn.q_norm.weight": (head_dim,),
        "model.layers.0.self_attn.k_norm.weight": (head_dim,),
        "model.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "model.layers.0.mlp.up_proj.weight": (inner, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    save_file({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
              source / "model.safetensors")  # fmt: skip
    convert(ConvertOptions(source=source, out=out, token_offsets=OFFSETS, prompt="sids-only"))
    return out


@dataclass
class FakeEngine:
    """Deterministic stand-in: every allowed item, scored by a hash of prompt and row; ties kept in SID order.

    Attributes:
        fails: told the prompts of a batch; True makes the batch raise.
        calls: users of each batch that was asked for.
    """

    vocabulary: Vocabulary
    search: SearchOptions
    fails: Callable[[list[np.ndarray]], bool] = lambda prompts: False
    calls: list[int] = field(default_factory=list)

    def reserve(self, tokens: int, users: int) -> None:
        """Nothing to allocate."""

    def run(self, prompts: list[Any], excluded: list[Any]) -> BatchResult:
        self.calls.append(len(prompts))
        if self.fails(prompts):
            raise RuntimeError("a row that makes the engine raise")
        rows, scores, counts, short = [], [], [], []
        for prompt, banned in zip(prompts, excluded, strict=True):
            allowed = np.setdiff1d(np.arange(self.vocabulary.num_items), banned)
            score = -(((allowed * 7 + int(prompt.sum())) % 11) / 4).astype(np.float32)
            order = np.lexsort((allowed, -score))[: self.search.top_k]
            rows.append(allowed[order])
            scores.append(score[order])
            counts.append(len(order))
            short.append(len(allowed) < self.search.top_k)
        flat = np.concatenate(rows).astype(np.int32)
        leaves = self.vocabulary.leaf_of_row[flat]
        return BatchResult(
            np.array(counts, np.int32), flat, leaves, np.concatenate(scores).astype(np.float32), np.array(short)
        )


@dataclass
class Place:
    """Paths of one test's job."""

    root: Path
    vocab: Path
    model: Path

    @property
    def out(self) -> Path:
        return self.root / "recs"

    def users(self, histories: Any, name: str = "users.parquet", **columns: Any) -> Path:
        """A Parquet file with ``user_id`` u0, u1, ... unless given."""
        history = histories if isinstance(histories, pa.Array) else pa.array(histories, pa.list_(pa.int64()))
        table = {"user_id": [f"u{i}" for i in range(len(history))], "history": history, **columns}
        path = self.root / name
        pq.write_table(pa.table(table), path)
        return path

    def options(self, *paths: Path | str, search: SearchOptions | None = None, **given: Any) -> RecommendOptions:
        """Options with keywords sorted into their dataclasses."""
        names = HistoryOptions.__dataclass_fields__
        histories = HistoryOptions(
            tuple(str(path) for path in paths), **{name: given.pop(name) for name in list(given) if name in names}
        )
        defaults = {"model": str(self.model), "vocab": str(self.vocab), "out": str(self.out), "device": "cpu"}
        return RecommendOptions(histories, search or SearchOptions(beam=40, top_k=5), **{**defaults, **given})

    def run(self, options: RecommendOptions, fails: Any = None) -> tuple[JobReport, FakeEngine | None]:
        """The job with the stand-in engine; None where nothing was computed."""
        made: list[FakeEngine] = []

        def loader(model: Any, vocabulary: Any, search: Any, device: Any, plan: Any, threads: Any) -> LoadedEngine:
            made.append(FakeEngine(vocabulary, search, fails or (lambda prompts: False)))
            description = {"device": "cpu", "device_name": "stand-in", "dtype": "-", "implementation": "fake"}
            return LoadedEngine(made[-1], plan.limits, description)

        report = run_job(options, Caller(engine_loader=loader))
        return report, made[0] if made else None

    def written(self) -> pa.Table:
        """All part files, in order."""
        parts = sorted(self.out.glob("part-*.parquet"))
        return pa.concat_tables([pq.ParquetFile(part).read().replace_schema_metadata(None) for part in parts])

    def rejects(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.ParquetFile(self.out / "_xgr" / "rejects.parquet").read().to_pylist()
        return rows

    def manifest(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.out / "_xgr" / "manifest.json").read_text())
        return record

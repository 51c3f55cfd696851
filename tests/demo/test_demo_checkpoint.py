"""The committed demo: small, complete, readable by transformers, and searched by xgr as by a plain beam search."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import train_demo

from xgr_cli.main import run

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "datasets" / "movielens"
CHECKPOINT = DEMO / "checkpoint"
PREPARED = ROOT / "work" / "movielens"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def recipe() -> train_demo.Recipe:
    fields = json.loads((DEMO / "training.json").read_text())["recipe"]
    return train_demo.Recipe(**{**fields, "codebook": tuple(fields["codebook"])})


@pytest.fixture(scope="module")
def codes() -> np.ndarray:
    with (DEMO / "item_codes.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [int(row[0]) for row in rows] == list(range(1, 1683))
    return np.array([[int(code) for code in row[1:]] for row in rows], np.int32)


def test_demo_is_small_and_holds_no_interactions() -> None:
    """Nothing of MovieLens is stored: the data may be used, not passed on."""
    caches = (".mypy_cache", ".ruff_cache", "__pycache__")
    files = [path for path in DEMO.rglob("*") if path.is_file() and not set(path.parts) & set(caches)]
    assert sum(path.stat().st_size for path in files) <= 4 * MEGABYTE
    assert not [path.name for path in files if path.suffix in (".inter", ".parquet", ".item", ".whl", ".data")]


def test_every_item_has_its_own_codes_within_the_codebook(codes: np.ndarray, recipe: train_demo.Recipe) -> None:
    assert len(np.unique(codes, axis=0)) == len(codes)
    assert (codes >= 0).all()
    assert (codes < recipe.codebook).all()


def test_tokenizer_knows_each_code_as_the_token_it_was_trained_as(recipe: train_demo.Recipe) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    every = np.array(
        [[min(code, size - 1) for size in recipe.codebook] for code in range(max(recipe.codebook))], np.int32
    )
    for row, ids in zip(every, train_demo.token_ids(every, recipe.codebook), strict=True):
        text = "".join(f"<{name}_{code}>" for name, code in zip("abc", row, strict=True))
        assert tokenizer(text)["input_ids"] == [train_demo.BOS, *ids.tolist()]


def test_committed_model_loads_in_transformers(recipe: train_demo.Recipe) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    assert model.config.vocab_size == 3 + sum(recipe.codebook)
    assert model.config.hidden_size == recipe.hidden


def test_xgr_returns_what_a_plain_beam_search_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: np.ndarray, recipe: train_demo.Recipe
) -> None:
    """Random histories, through the command line, against the search of the training script on transformers."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(11)
    history = [generator.permutation(len(codes))[:size].astype(np.int32) for size in (1, 2, 7, 49, 50, 51, 130)]
    model = transformers.Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    expected = train_demo.recommend(model, history, codes, recipe, beam=20)

    sids = ["".join(f"<{name}_{code}>" for name, code in zip("abc", row, strict=True)) for row in codes.tolist()]
    pq.write_table(pa.table({"item_id": np.arange(len(codes)), "sid": sids}), "catalog.parquet")
    users = {"user_id": list(range(len(history))), "history": [items.tolist() for items in history]}
    pq.write_table(pa.table(users), "users.parquet")
    assert run(["build-vocab", "catalog.parquet"]) == 0
    assert run(["convert", str(CHECKPOINT), "--vocab", "vocab", "--prompt", "sids-only"]) == 0
    search = ["--beam", "20", "--top-k", "20", "--max-history", str(recipe.window), "--exclude-seen", "--device", "cpu"]
    assert run(["recommend", "--in", "users.parquet", *search]) == 0
    rows = pq.read_table("recs")["items"].to_pylist()
    for row, wanted in zip(rows, expected.tolist(), strict=True):
        found = [entry["item_id"] for entry in row]
        scores = [entry["score"] for entry in row]
        assert set(found) == set(wanted)
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert one == other or scores[place] == pytest.approx(scores[found.index(other)], abs=1e-5)


def test_recorded_figures_are_better_than_popularity() -> None:
    recall: dict[str, Any] = json.loads((DEMO / "training.json").read_text())["test_recall"]
    assert all(figure["model"] > figure["popularity"] for figure in recall.values())


@pytest.mark.skipif(not (PREPARED / "recs" / "_SUCCESS").is_file(), reason="scripts/quickstart.sh has not run here")
def test_quickstart_beats_popularity_with_the_interval_above_zero() -> None:
    """On MovieLens itself, which is not in the repository: over what the quickstart left."""
    import show

    users = pq.read_table(PREPARED / "users.parquet")
    model = show.recommended(PREPARED / "recs")
    baseline = show.recommended(PREPARED / "popularity.parquet")
    recall, ndcg = show.figures(users, model, baseline)
    assert recall.model_is_better
    assert ndcg.model_is_better
    recorded = json.loads((DEMO / "training.json").read_text())["test_recall"]["10"]
    assert recall.model == pytest.approx(recorded["model"], abs=0.005)
    assert recall.popularity == pytest.approx(recorded["popularity"], abs=1e-9)

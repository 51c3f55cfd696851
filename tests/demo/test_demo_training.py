"""The demo's training: nothing that is learned, counted or tuned sees a test target; the same seed, the same files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml100k
import numpy as np
import pytest
import semantic_ids
import train_demo
from demo_support import POISON, USERS, write_files
from hypothesis import given, settings
from hypothesis import strategies as st

RECIPE = train_demo.Recipe(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16, window=6, batch=5, max_epochs=2)


@pytest.fixture()
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = write_files(tmp_path)
    monkeypatch.setattr(ml100k, "fetch", lambda cache, wheel=None: files)
    return tmp_path


def test_training_never_sees_a_test_target(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test target is an item that occurs nowhere else, so any trace of one in what is handed on is a leak."""
    seen: dict[str, list[Any]] = {"vectors": [], "history": [], "validation": []}
    vectors, train = semantic_ids.item_vectors, train_demo.train

    def watched_vectors(history: Any, movies: Any) -> Any:
        seen["vectors"] += [items.tolist() for items in history]
        return vectors(history, movies)

    def watched_train(history: Any, tokens: Any, recipe: Any, epochs: int, following: Any) -> Any:
        seen["history"].append([(items + 1).tolist() for items in history])
        seen["validation"].append(None if following is None else (following + 1).tolist())
        return train(history, tokens, recipe, epochs, following)

    monkeypatch.setattr(semantic_ids, "item_vectors", watched_vectors)
    monkeypatch.setattr(train_demo, "train", watched_train)
    train_demo.make_demo(RECIPE, made_up, made_up / "out")

    poison = set(POISON.tolist())
    sequences = [sequence.tolist() for sequence in ml100k.read_sequences(made_up / "ml-100k.inter")[1]]
    assert seen["vectors"] == [sequence[:-2] for sequence in sequences]
    assert seen["history"] == [[sequence[:-2] for sequence in sequences], [sequence[:-1] for sequence in sequences]]
    assert seen["validation"] == [[sequence[-2] for sequence in sequences], None]
    assert not poison & {item for rows in [*seen["history"], seen["vectors"]] for row in rows for item in row}
    assert not poison & set(seen["validation"][0])
    assert len(poison) == USERS


def test_same_seed_same_files(made_up: Path) -> None:
    digests = []
    for name in ("one", "two"):
        train_demo.make_demo(RECIPE, made_up, made_up / name)
        files = sorted(path for path in (made_up / name).rglob("*") if path.is_file())
        digests.append([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
    assert digests[0] == digests[1]
    names = [name for name, _ in digests[0]]
    assert {"config.json", "model.safetensors", "tokenizer.json", "item_codes.csv", "training.json"} <= set(names)
    record = json.loads((made_up / "one" / "training.json").read_text())
    assert 1 <= record["epochs"] <= RECIPE.max_epochs == len(record["validation_loss"])


def test_windows_hold_every_item_once_in_order() -> None:
    recipe = train_demo.Recipe(window=5, item_dropout=0.0)
    history = [np.arange(23, dtype=np.int32), np.arange(4, dtype=np.int32)]
    for seed in range(5):
        pieces = train_demo.windows(history, recipe, np.random.default_rng(seed))
        assert max(map(len, pieces)) <= 5
        assert pieces[-1].tolist() == [0, 1, 2, 3]
        # A piece of one item is dropped: nothing precedes it. So compare what is left.
        kept = np.concatenate(pieces[:-1])
        assert np.all(np.diff(kept) >= 1)
        assert len(kept) >= 23 - 2


def test_batch_targets_are_the_next_tokens() -> None:
    tokens = np.array([[3, 5], [4, 6]], np.int32)
    inputs, targets = train_demo.to_batch([np.array([1, 0]), np.array([0])], tokens)
    assert inputs.tolist() == [[1, 4, 6, 3], [1, 3, 5, 0]]
    assert targets.tolist() == [[4, 6, 3, 5], [3, 5, -100, -100]]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**31))
def test_semantic_ids_are_distinct_and_in_range(number: int, seed: int) -> None:
    """Also where many items are alike: equal vectors share a prefix and are told apart by the last code."""
    generator = np.random.default_rng(seed)
    vectors = np.repeat(generator.normal(size=(-(-number // 3), 4)), 3, axis=0)[:number]
    codes = semantic_ids.residual_kmeans(vectors, (3, 4, 60), seed)
    assert len(np.unique(codes, axis=0)) == number
    assert (codes >= 0).all()
    assert (codes < (3, 4, 60)).all()


def test_first_codes_follow_well_separated_groups() -> None:
    generator = np.random.default_rng(0)
    centres = np.array([[10.0, 0.0], [0.0, 10.0], [-10.0, -10.0]])
    group = np.repeat([0, 1, 2], 20)
    codes = semantic_ids.residual_kmeans(centres[group] + generator.normal(size=(60, 2)), (3, 32), 1)
    assert len({(int(a), int(b)) for a, b in zip(group, codes[:, 0], strict=True)}) == 3


def test_prefix_with_too_many_items_is_an_error() -> None:
    with pytest.raises(ValueError, match="share a prefix"):
        semantic_ids.residual_kmeans(np.zeros((9, 2)), (2, 4), 0)

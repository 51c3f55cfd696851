"""The tiny catalog and model of the job's tests serve here too."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_support import Place, make_model, make_vocabulary
from nightly_support import SHARD_ROWS, SHARDS, Stage, write_users


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A vocabulary and a model, made once."""
    root = tmp_path_factory.mktemp("assets")
    return make_vocabulary(root / "vocab"), make_model(root / "model")


@pytest.fixture
def place(tmp_path: Path, assets: tuple[Path, Path]) -> Place:
    """An empty place for one job."""
    return Place(tmp_path, *assets)


@pytest.fixture
def stage(place: Place) -> Stage:
    """Runs jobs in ``place`` with a stand-in engine."""
    return Stage(place)


@pytest.fixture
def users(place: Place) -> Path:
    return write_users(place.root / "users.parquet", SHARDS * SHARD_ROWS, 80)


@pytest.fixture
def whole(place: Place, stage: Stage, users: Path) -> Path:
    """The output of an uninterrupted run."""
    out = place.root / "whole"
    report = stage.run(place.options(users, shard_rows=SHARD_ROWS, out=str(out)))
    assert report.failure is None and len(stage.calls) == report.record["counts"]["batches"]
    return out

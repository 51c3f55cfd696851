"""The job on a GPU against the job on the CPU: the same lists with all kinds of filters, the same bits each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from filter_support import lists_of, make_assets, options_for, write_users
from tiny import same_ranking

from xgr_engine.job.run import run_job
from xgr_engine.options import SearchOptions


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"exclude_seen": True},
        {"exclude_seen": True, "match": ("country",)},
        {"diversify": "category=2"},
        {"search": SearchOptions(beam=33, top_k=33, collisions="first", score_over="level")},
        {"search": SearchOptions(beam=7, top_k=7, score_over="allowed"), "exclude_col": "deny"},
    ],
    ids=["plain", "seen", "match", "diversify", "level", "deny"],
)
def test_same_lists_as_on_the_cpu(tmp_path: Path, assets: tuple[Path, Path], rows: int, given: dict[str, Any]) -> None:
    users = write_users(
        tmp_path / "users.parquet",
        rows,
        country=[["AT", "DE", "CH"][row % 3] for row in range(rows)],
        deny=pa.array([[100 + row % 40, 101] for row in range(rows)]),
    )
    found = {}
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        run_job(options_for(tmp_path / device, *assets, users, device=device, shard_rows=16, **given))
        found[device] = lists_of(tmp_path / device / "recs")
    assert len(found["cuda"]) == rows
    for mine, theirs in zip(found["cuda"], found["cpu"], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            same_ranking(mine, [(item, (), score) for item, score in theirs])


@pytest.mark.cuda
def test_a_second_run_gives_the_same_bits(tmp_path: Path, assets: tuple[Path, Path]) -> None:
    users = write_users(tmp_path / "users.parquet", 50)
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run_job(options_for(tmp_path / name, *assets, users, device="cuda", shard_rows=16))
        found.append(lists_of(tmp_path / name / "recs"))
    assert found[0] == found[1]

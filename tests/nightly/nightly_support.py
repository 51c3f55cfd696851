"""What the fault tests share: histories, equality of outputs, and engines that do something at a chosen batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from job_support import FakeEngine, Place

from xgr_engine.job.engine import LoadedEngine
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.record import JobReport
from xgr_engine.job.run import Caller, run_job
from xgr_engine.job.stop import Stop

# Of the runs that are stopped and go on.
SHARDS, SHARD_ROWS = 10, 40


def histories(users: int, seed: int = 0) -> list[list[int]]:
    """3 to 8 items a user, so that no two are equal (equal prompts are computed once)."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 140) for _ in range(rng.randrange(3, 9))] for _ in range(users)]


def write_users(path: Path, users: int, group: int, seed: int = 0, **given: Any) -> Path:
    """A Parquet file with row groups of ``group`` users."""
    table = {"user_id": [f"u{i}" for i in range(users)], "history": pa.array(histories(users, seed))}
    pq.write_table(pa.table(table), path, row_group_size=group, **given)
    return path


def rows_of(out: Path) -> list[tuple[str, pa.Table]]:
    """Name and content of every part, without the run's metadata."""
    parts = sorted(out.glob("part-*.parquet"))
    return [(part.name, pq.ParquetFile(part).read().replace_schema_metadata(None)) for part in parts]


def same_output(one: Path, other: Path) -> bool:
    """Both finished, part for part the same rows and bits, and the same rejects."""
    if not (one / "_SUCCESS").exists() or not (other / "_SUCCESS").exists():
        return False
    first, second = rows_of(one), rows_of(other)
    equal = len(first) == len(second) and all(
        mine == theirs and table.equals(copy) for (mine, table), (theirs, copy) in zip(first, second, strict=True)
    )
    rejects = [pq.ParquetFile(out / "_xgr" / "rejects.parquet").read() for out in (one, other)]
    return equal and rejects[0].equals(rejects[1])


class Stage:
    """Runs jobs with a stand-in engine that calls ``before_batch(number)`` first."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.calls: list[int] = []
        self.notes: list[str] = []

    def run(
        self,
        options: RecommendOptions,
        before_batch: Callable[[int], None] = lambda number: None,
        stop: Stop | None = None,
        fails: Callable[[list[Any]], bool] = lambda prompts: False,
    ) -> JobReport:
        self.calls, self.notes = [], []

        def loader(model: Any, vocabulary: Any, search: Any, device: Any, plan: Any, threads: Any) -> LoadedEngine:
            def at_batch(prompts: list[Any]) -> bool:
                before_batch(len(self.calls))
                return fails(prompts)

            engine = FakeEngine(vocabulary, search, at_batch, self.calls)
            description = {"device": "cpu", "device_name": "stand-in", "dtype": "-", "implementation": "fake"}
            return LoadedEngine(engine, plan.limits, description)

        caller = Caller(engine_loader=loader, stop=stop or Stop(), note=self.notes.append)
        return run_job(options, caller)


class Gone(BaseException):
    """Stands for a process that ends without a word."""


def fails_at(batch: int, error: BaseException) -> Any:
    def before(number: int) -> None:
        if number == batch:
            raise error

    return before


def raises(error: BaseException) -> Any:
    def instead(*given: Any) -> None:
        raise error

    return instead


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    path.write_bytes(data)

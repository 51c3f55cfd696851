"""What is done with one shard, stage by stage, and what is done once all shards are written."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import UnreadableRowsError
from xgr_engine.job.audit import Audit, Auditor
from xgr_engine.job.commit import commit
from xgr_engine.job.engine import LoadedEngine
from xgr_engine.job.histories import HistoryResolver
from xgr_engine.job.input_formats import Rows
from xgr_engine.job.inputs import Inputs, RowReader
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.output import ItemColumns, all_rejects, long_table, nested_table, rejects_table
from xgr_engine.job.prompts import Prepared, PromptMaker
from xgr_engine.job.shards import Shard
from xgr_engine.job.stop import Stop, Stopped
from xgr_engine.progress import ProgressSink
from xgr_engine.xschedule.pipeline import Ranked, compute_batches

_NOTES_KEY = b"xgr.notes"


@dataclass(frozen=True)
class ReadyShard:
    """Input rows with their prompts."""

    copied: pa.Table
    prepared: Prepared


@dataclass(frozen=True)
class DoneShard:
    """Input rows with their results."""

    copied: pa.Table
    prepared: Prepared
    ranked: Ranked
    batch_seconds: list[float]


class ShardWork:
    """The four stages of a shard, each free of the others' state.

    A stage passes on None for a shard that is not done this time: its rows could not be read, or the job was asked to
    stop. The shards around it go their way.

    Attributes:
        seconds: time spent in each stage so far.
        unreadable: index of a shard -> why its rows could not be read.
        written: shards written so far.
    """

    def __init__(
        self,
        options: RecommendOptions,
        inputs: Inputs,
        out: OutDir,
        maker: PromptMaker,
        loaded: LoadedEngine,
        columns: ItemColumns,
        metadata: Mapping[str, str],
        progress: ProgressSink,
        stop: Stop,
    ) -> None:
        self.reader = RowReader(inputs)
        self.unreadable: dict[int, str] = {}
        self.written = 0
        self.seconds: dict[str, float] = {"read": 0.0, "prepare": 0.0, "compute": 0.0, "write": 0.0}
        self._options = options
        self._inputs = inputs
        self._out = out
        self._maker = maker
        self._loaded = loaded
        self._columns = columns
        self._metadata = dict(metadata)
        self._progress = progress
        self._stop = stop

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - started

    def read(self, shard: Shard) -> Rows | None:
        """
        Raises:
            HistoryError: the file is no longer the one that the run began with.
        """
        with self._timed("read"):
            try:
                rows = self.reader.read(shard.file, shard.start, shard.stop)
            except UnreadableRowsError as error:
                if self._options.on_error == "fail":
                    raise
                self.unreadable[shard.index] = error.what
                return None
            # Again after reading: what is computed from these rows must be what the fingerprint says.
            self.reader.check_unchanged(shard.file)
            return rows

    def prepare(self, shard: Shard, rows: Rows | None) -> ReadyShard | None:
        if rows is None or self._stop.requested:
            return None
        with self._timed("prepare"):
            place = f"{self._inputs.files[shard.file].path}: row {shard.start}"
            return ReadyShard(rows.table, self._maker.prepare(rows, place))

    def compute(self, shard: Shard, ready: ReadyShard | None) -> DoneShard | None:
        if ready is None or self._stop.requested:
            return None
        prepared = ready.prepared
        self._progress.advance(prepared.length - len(prepared.live))
        pace = _Pace(len(prepared.live))

        def on_batch(users: int) -> None:
            left = pace.batch(users)
            self._progress.advance(users)
            self._stop.check(left)

        with self._timed("compute"):
            try:
                ranked = compute_batches(
                    self._loaded.engine,
                    prepared.prompts,
                    prepared.excluded,
                    self._loaded.limits,
                    reject_errors=self._options.on_error == "reject",
                    on_batch=on_batch,
                )
            except Stopped:
                return None
        return DoneShard(ready.copied, prepared, ranked, pace.seconds)

    def write(self, shard: Shard, done: DoneShard | None) -> None:
        """First the rejects, then the part: a part that is there proves that its shard is complete."""
        if done is None:
            return
        with self._timed("write"):
            self._write_rejects(shard, done)
            if self._options.layout == "long":
                table = long_table(done.copied, done.prepared, done.ranked, self._columns, shard.first_row)
            else:
                table = nested_table(done.copied, done.prepared, done.ranked, self._columns)
            write_table(self._out.part(shard), table.replace_schema_metadata(self._metadata))
        self.written += 1

    def _write_rejects(self, shard: Shard, done: DoneShard) -> None:
        rejects = all_rejects(done.prepared, done.ranked)
        users = done.copied.column(self._options.histories.user_col)
        table = rejects_table(rejects, str(self._inputs.files[shard.file].path), shard.start, users)
        notes = {
            "counts": done.prepared.counts + Counter(batches=done.ranked.batches),
            "batch_seconds": [round(seconds, 6) for seconds in done.batch_seconds],
        }
        write_table(self._out.sidecar(shard), table.replace_schema_metadata({_NOTES_KEY: json.dumps(notes).encode()}))


class _Pace:
    """Seconds of a shard's batches, and how long the rest of it will take."""

    def __init__(self, users: int) -> None:
        self.seconds: list[float] = []
        self._left = users
        self._done = 0
        self._started = self._last = time.monotonic()

    def batch(self, users: int) -> float:
        """A batch has ended; returns the seconds until the shard's last one will."""
        now = time.monotonic()
        self.seconds.append(now - self._last)
        self._last = now
        self._done += users
        self._left -= users
        return (now - self._started) / max(1, self._done) * self._left


def write_table(path: Path, table: pa.Table) -> None:
    """One Parquet file, zstd, whole or not at all."""
    commit(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def _read_table(path: Path) -> pa.Table:
    """One file as it is; ``pq.read_table`` would read meaning into directory names."""
    with pq.ParquetFile(path) as file:
        return file.read()


@dataclass
class Merged:
    """Sums over all shards: counts by name, rejects by reason, seconds of every batch."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    batch_seconds: list[float] = field(default_factory=list)


class Finisher:
    """What follows the last shard; works from the files alone, so that it also serves a run that computes nothing.

    Args:
        check: called between shards; may raise.
    """

    def __init__(
        self,
        out: OutDir,
        inputs: Inputs,
        vocabulary: Vocabulary,
        resolver: HistoryResolver,
        options: RecommendOptions,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._out = out
        self._inputs = inputs
        self._auditor = Auditor(vocabulary, resolver, options)

    def merge(self, shards: Sequence[Shard]) -> Merged:
        """Writes ``_xgr/rejects.parquet`` and sums up what the shards' state files say, of all attempts."""
        merged = Merged()

        def write(temporary: Path) -> None:
            writer: pq.ParquetWriter | None = None
            try:
                for shard in shards:
                    table = _read_table(self._out.sidecar(shard))
                    notes = json.loads(table.schema.metadata[_NOTES_KEY])
                    merged.counts.update(notes["counts"])
                    merged.batch_seconds.extend(notes["batch_seconds"])
                    merged.reasons.update(table.column("reason").to_pylist())
                    table = table.replace_schema_metadata(None)
                    writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd")
                    writer.write_table(table)
            finally:
                if writer is not None:
                    writer.close()

        commit(self._out.rejects, write)
        return merged

    def audit(self, shards: Sequence[Shard]) -> Audit:
        """Reads every part file and its input rows again and counts."""
        reader = RowReader(self._inputs)
        total: Audit | None = None
        for shard in shards:
            self._check()
            rejected = _read_table(self._out.sidecar(shard)).column("row").to_numpy().astype(np.int64) - shard.start
            rows = reader.read(shard.file, shard.start, shard.stop)
            part = self._auditor.part(self._out.part(shard), shard, rows, rejected)
            total = part if total is None else total + part
        assert total is not None  # there is always one shard
        return total

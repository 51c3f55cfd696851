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
from numpy.typing import NDArray

from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import UnreadableRowsError
from xgr_engine.job.audit import Audit, Auditor
from xgr_engine.job.commit import commit
from xgr_engine.job.histories import HistoryResolver
from xgr_engine.job.input_formats import Rows
from xgr_engine.job.inputs import Inputs, RowReader
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.output import ItemColumns, all_rejects, long_table, nested_table, rejects_table
from xgr_engine.job.prompts import Prepared, PromptMaker
from xgr_engine.job.resume import NOTES_KEY, PART_KEY, read_notes
from xgr_engine.job.shards import Piece, Shard
from xgr_engine.job.stop import Stop
from xgr_engine.options import Exclusion
from xgr_engine.progress import ProgressSink
from xgr_engine.xschedule.engines import numbers
from xgr_engine.xschedule.pipeline import Stages
from xgr_engine.xschedule.results import Ranked


@dataclass(frozen=True)
class ReadyPiece:
    """Input rows with their prompts. ``skipped``: its shard cannot be read, and is left out this time."""

    copied: pa.Table
    prepared: Prepared
    skipped: bool = False

    @property
    def prompts(self) -> Sequence[NDArray[np.int32]]:
        return self.prepared.prompts

    @property
    def excluded(self) -> Sequence[Exclusion]:
        return self.prepared.excluded

    @property
    def rows(self) -> int:
        return self.prepared.length


@dataclass
class _OpenShard:
    """The shard that is being assembled from its pieces."""

    tables: list[pa.Table] = field(default_factory=list)
    rejects: list[pa.Table] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    batch_seconds: list[float] = field(default_factory=list)


class ShardWork:
    """What the scheduler does with each piece of a shard; its threads call one method each.

    A shard whose rows cannot be read does not hold up the others. Nothing of a shard is written before its last piece
    is there.

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
        columns: ItemColumns,
        metadata: Mapping[str, str],
        progress: ProgressSink,
        stop: Stop,
    ) -> None:
        self.reader = RowReader(inputs)
        self.unreadable: dict[int, str] = {}
        self.written = 0
        self.seconds: dict[str, float] = {"read": 0.0, "prepare": 0.0, "write": 0.0}
        self._options = options
        self._inputs = inputs
        self._out = out
        self._maker = maker
        self._columns = columns
        self._metadata = dict(metadata)
        self._progress = progress
        self._stop = stop
        self._open = _OpenShard()
        self._current: Piece | None = None
        self._pace = _Pace()

    @property
    def stages(self) -> Stages[Piece, Rows | None, ReadyPiece]:
        """For the scheduler."""
        return Stages(self.read, self.prepare, self.write, self._name_rows)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - started

    def read(self, piece: Piece) -> Rows | None:
        """
        Raises:
            HistoryError: the file is no longer the one that the run began with.
        """
        shard = piece.shard
        if shard.index in self.unreadable:
            return None
        with self._timed("read"):
            try:
                rows = self.reader.read(shard.file, piece.start, piece.stop)
            except UnreadableRowsError as error:
                if self._options.on_error == "fail":
                    raise
                self.unreadable[shard.index] = error.what
                return None
            # Again after reading: what is computed from these rows must be what the fingerprint says.
            self.reader.check_unchanged(shard.file)
            return rows

    def prepare(self, piece: Piece, rows: Rows | None) -> ReadyPiece:
        """Prompts of the rows; none for a shard that is left out."""
        if rows is None:
            return ReadyPiece(pa.table({}), Prepared(0), skipped=True)
        with self._timed("prepare"):
            file = str(self._inputs.files[piece.shard.file].path)
            return ReadyPiece(rows.table, self._maker.prepare(rows, file, piece.start))

    def write(self, piece: Piece, ready: ReadyPiece, ranked: Ranked) -> None:
        """First the rejects, then the part: a part that is there proves that its shard is complete."""
        shard = piece.shard
        if piece.start == shard.start:
            self._open = _OpenShard()
        if ready.skipped or shard.index in self.unreadable:
            return
        with self._timed("write"):
            self._add(piece, ready, ranked)
            if not piece.last:
                return
            done = self._open
            notes = {
                "counts": done.counts,
                "batch_seconds": [round(seconds, 6) for seconds in done.batch_seconds],
            }
            rejects = pa.concat_tables(done.rejects)
            noted = rejects.replace_schema_metadata({NOTES_KEY: json.dumps(notes).encode()})
            write_table(self._out.sidecar(shard), noted)
            # these columns are in the names of the directories
            table = pa.concat_tables(done.tables).drop_columns(list(self._options.partition_by))
            metadata = self._metadata | {PART_KEY.decode(): shard.name}
            write_table(self._out.part(shard), table.replace_schema_metadata(metadata))
        self.written += 1

    def _add(self, piece: Piece, ready: ReadyPiece, ranked: Ranked) -> None:
        rejects = all_rejects(ready.prepared, ranked)
        users = ready.copied.column(self._options.histories.user_col)
        file = str(self._inputs.files[piece.shard.file].path)
        self._open.rejects.append(rejects_table(rejects, file, piece.start, users))
        self._open.counts += ready.prepared.counts + Counter(batches=ranked.batches)
        self._open.batch_seconds += ranked.batch_seconds
        if self._options.layout == "long":
            table = long_table(ready.copied, ready.prepared, ranked, self._columns, piece.first_row)
        else:
            table = nested_table(ready.copied, ready.prepared, ranked, self._columns)
        self._open.tables.append(table)

    def _name_rows(self, piece: Piece, ready: ReadyPiece, prompts: list[int]) -> str:
        rows = [piece.start + ready.prepared.live[prompt] for prompt in prompts]
        return f"{self._inputs.files[piece.shard.file].path}: row {numbers(rows)}"

    # ---- in the job's thread ----------------------------------------------------------------------------------------

    def on_rows(self, rows: int) -> None:
        """Count ``rows`` more rows as done."""
        self._pace.rows += rows
        self._progress.advance(rows)

    def safe_point(self, piece: Piece | None) -> None:
        """Called before each batch, with its piece, and without one while there is nothing to launch.

        Raises:
            Stopped: asked to stop, and the current shard is finished, or cannot be finished in time.
        """
        current, self._current = self._current, piece or self._current
        if not self._stop.requested:
            return
        begun = current is not None and (piece is None or piece.shard == current.shard)
        if current is None or not begun or (piece is None and current.last):
            self._stop.check()
            return
        self._stop.check(self._pace.seconds_for(current.shard.stop - current.start))


class _Pace:
    """How long so many rows will take, from the rows done so far."""

    def __init__(self) -> None:
        self.rows = 0
        self._started = time.monotonic()

    def seconds_for(self, rows: int) -> float:
        elapsed = time.monotonic() - self._started
        return elapsed / self.rows * rows if self.rows else float("inf")


def write_table(path: Path, table: pa.Table) -> None:
    """One Parquet file, zstd, its pages with checksums, whole or not at all."""
    commit(path, lambda temporary: pq.write_table(table, temporary, compression="zstd", write_page_checksum=True))


def _read_table(path: Path) -> pa.Table:
    """One file as it is; ``pq.read_table`` would read meaning into directory names."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read()


@dataclass
class Merged:
    """Sums over all shards: counts by name, rejects by reason, seconds of every batch."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    batch_seconds: list[float] = field(default_factory=list)


class Finisher:
    """What follows the last shard; works from the files alone, so that it also serves a run that computes nothing new.

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
                    notes = read_notes(table.schema.metadata)
                    merged.counts.update(notes["counts"])
                    merged.batch_seconds.extend(notes["batch_seconds"])
                    merged.reasons.update(table.column("reason").to_pylist())
                    table = table.replace_schema_metadata(None)
                    writer = writer or pq.ParquetWriter(
                        temporary, table.schema, compression="zstd", write_page_checksum=True
                    )
                    writer.write_table(table)
            finally:
                if writer is not None:
                    writer.close()

        commit(self._out.rejects, write)
        return merged

    def audit(self, shards: Sequence[Shard]) -> Audit:
        """Reads every part file and its input rows again and counts."""
        reader = RowReader(self._inputs)
        total = Audit()

        def read(piece: Piece) -> Rows:
            return reader.read(piece.shard.file, piece.start, piece.stop)

        for shard in shards:
            self._check()
            rejected = _read_table(self._out.sidecar(shard)).column("row").to_numpy().astype(np.int64)
            total += self._auditor.part(self._out.part(shard), shard, read, rejected)
        return total

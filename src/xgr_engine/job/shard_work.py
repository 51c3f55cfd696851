"""What is done with one shard, stage by stage, and what is done once all shards are written."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.catalog.vocabulary import Vocabulary
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
from xgr_engine.progress import ProgressSink
from xgr_engine.xschedule.pipeline import Ranked, compute_batches

_COUNTS_KEY = b"xgr.counts"


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


class ShardWork:
    """The four stages of a shard, each free of the others' state.

    Attributes:
        seconds: time spent in each stage so far.
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
    ) -> None:
        self.reader = RowReader(inputs)
        self.seconds: dict[str, float] = {"read": 0.0, "prepare": 0.0, "compute": 0.0, "write": 0.0}
        self._options = options
        self._inputs = inputs
        self._out = out
        self._maker = maker
        self._loaded = loaded
        self._columns = columns
        self._metadata = dict(metadata)
        self._progress = progress

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - started

    def read(self, shard: Shard) -> Rows:
        with self._timed("read"):
            return self.reader.read(shard.file, shard.start, shard.stop)

    def prepare(self, shard: Shard, rows: Rows) -> ReadyShard:
        with self._timed("prepare"):
            place = f"{self._inputs.files[shard.file].path}: row {shard.start}"
            return ReadyShard(rows.table, self._maker.prepare(rows, place))

    def compute(self, shard: Shard, ready: ReadyShard) -> DoneShard:
        prepared = ready.prepared
        self._progress.advance(prepared.length - len(prepared.live))
        with self._timed("compute"):
            ranked = compute_batches(
                self._loaded.engine,
                prepared.prompts,
                prepared.excluded,
                self._loaded.limits,
                reject_errors=self._options.on_error == "reject",
                on_batch=self._progress.advance,
            )
        return DoneShard(ready.copied, prepared, ranked)

    def write(self, shard: Shard, done: DoneShard) -> None:
        """First the rejects, then the part: a part that is there proves that its shard is complete."""
        with self._timed("write"):
            self._write_rejects(shard, done)
            if self._options.layout == "long":
                table = long_table(done.copied, done.prepared, done.ranked, self._columns, shard.first_row)
            else:
                table = nested_table(done.copied, done.prepared, done.ranked, self._columns)
            write_table(self._out.part(shard), table.replace_schema_metadata(self._metadata))

    def _write_rejects(self, shard: Shard, done: DoneShard) -> None:
        rejects = all_rejects(done.prepared, done.ranked)
        users = done.copied.column(self._options.histories.user_col)
        table = rejects_table(rejects, str(self._inputs.files[shard.file].path), shard.start, users)
        counts = done.prepared.counts + Counter(batches=done.ranked.batches)
        write_table(self._out.sidecar(shard), table.replace_schema_metadata({_COUNTS_KEY: json.dumps(counts).encode()}))


def write_table(path: Path, table: pa.Table) -> None:
    """One Parquet file, zstd, whole or not at all."""
    commit(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def _read_table(path: Path) -> pa.Table:
    """One file as it is; ``pq.read_table`` would read meaning into directory names."""
    with pq.ParquetFile(path) as file:
        return file.read()


class Finisher:
    """What follows the last shard; works from the files alone, so that it also serves a run that computes nothing."""

    def __init__(
        self,
        out: OutDir,
        inputs: Inputs,
        vocabulary: Vocabulary,
        resolver: HistoryResolver,
        options: RecommendOptions,
    ) -> None:
        self._out = out
        self._inputs = inputs
        self._auditor = Auditor(vocabulary, resolver, options)

    def merge_rejects(self, shards: Sequence[Shard]) -> tuple[Counter[str], Counter[str]]:
        """Writes ``_xgr/rejects.parquet`` and sums the shards' counts.

        Returns:
            Counts by name, and rejects by reason.
        """
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()

        def write(temporary: Path) -> None:
            writer: pq.ParquetWriter | None = None
            try:
                for shard in shards:
                    table = _read_table(self._out.sidecar(shard))
                    counts.update(json.loads(table.schema.metadata[_COUNTS_KEY]))
                    reasons.update(table.column("reason").to_pylist())
                    table = table.replace_schema_metadata(None)
                    writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd")
                    writer.write_table(table)
            finally:
                if writer is not None:
                    writer.close()

        commit(self._out.rejects, write)
        return counts, reasons

    def audit(self, shards: Sequence[Shard]) -> Audit:
        """Reads every part file and its input rows again and counts."""
        reader = RowReader(self._inputs)
        total: Audit | None = None
        for shard in shards:
            rejected = _read_table(self._out.sidecar(shard)).column("row").to_numpy().astype(np.int64) - shard.start
            rows = reader.read(shard.file, shard.start, shard.stop)
            part = self._auditor.part(self._out.part(shard), shard, rows, rejected)
            total = part if total is None else total + part
        assert total is not None  # there is always one shard
        return total

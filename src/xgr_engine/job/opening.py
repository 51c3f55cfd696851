"""Opens and checks all that a job needs, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xgr_engine.catalog.vocabulary import Vocabulary, load_vocabulary
from xgr_engine.checkpoint.model_dir import ModelDir, load_model_dir
from xgr_engine.errors import UnreadableRowsError
from xgr_engine.job.diversify import search_for
from xgr_engine.job.engine import Device, MemoryPlan, plan_memory, resolve_device
from xgr_engine.job.filesystems import is_remote
from xgr_engine.job.filters import ItemFilters, open_filters
from xgr_engine.job.histories import HistoryResolver
from xgr_engine.job.inputs import Inputs, RowReader, open_inputs
from xgr_engine.job.manifest import fingerprint, fingerprint_fields
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.outdir import OutDir, check_apart, check_out_of_reach
from xgr_engine.job.output import ItemColumns, check_column_names
from xgr_engine.job.partitions import check_partition_by, chosen, folder_of
from xgr_engine.job.prompts import PromptMaker, make_prompt_maker
from xgr_engine.job.record import Subject
from xgr_engine.job.resume import Earlier, look
from xgr_engine.job.shards import Shard, plan_shards


@dataclass(frozen=True)
class OpenedJob:
    """A job whose parts have been opened and checked; nothing is written yet."""

    options: RecommendOptions
    inputs: Inputs
    vocabulary: Vocabulary
    model: ModelDir
    shards: list[Shard]
    fields: dict[str, Any]
    out: OutDir
    earlier: Earlier
    filters: ItemFilters

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def todo(self) -> list[Shard]:
        """The shards that no earlier attempt finished."""
        return [shard for shard in self.shards if shard.index not in self.earlier.finished]

    @property
    def resolver(self) -> HistoryResolver:
        """Looks the job's histories up in its catalog."""
        return HistoryResolver(self.vocabulary, self.model.table, self.options.histories)

    @property
    def subject(self) -> Subject:
        return Subject(
            self.options,
            self.inputs,
            self.model.fingerprint,
            self.vocabulary.content_hash,
            self.fields,
            self.rows,
            len(self.shards),
        )


def open_job(options: RecommendOptions) -> OpenedJob:
    """Opens and checks everything but the device. Imports no torch.

    Raises:
        XgrError: whatever is wrong, before anything is written.
    """
    histories = options.histories
    out = OutDir(Path(options.out))
    inputs = open_inputs(histories)
    files = [file.path for file in inputs.files if isinstance(file.path, Path)]
    roots = [Path(path) for path in histories.paths if Path(path).exists()]
    check_apart(out.root, [*roots, *files], {"--model": Path(options.model), "--vocab": Path(options.vocab)})
    patterns = [path for path in histories.paths if not is_remote(path) and not Path(path).exists()]
    check_out_of_reach(out.root, patterns, files)
    check_column_names(inputs.schema.names, options.layout, options.item_cols)
    vocabulary = load_vocabulary(Path(options.vocab))
    model = load_model_dir(Path(options.model))
    model.table.bind_catalog(vocabulary)
    ItemColumns.of(vocabulary, options.item_cols)
    shards = _plan_shards(options, inputs)
    filters = open_filters(options.filters, histories.match, vocabulary)
    fields = fingerprint_fields(options, inputs, model.fingerprint, vocabulary.content_hash) | filters.digests
    earlier = _look(options, out, fields, inputs, shards)
    return OpenedJob(options, inputs, vocabulary, model, shards, fields, out, earlier, filters)


def _plan_shards(options: RecommendOptions, inputs: Inputs) -> list[Shard]:
    partitions = [file.partition for file in inputs.files]
    check_partition_by(options.partition_by, partitions, options.histories.user_col)
    shards = plan_shards([file.groups for file in inputs.files], options.shard_rows, options.histories.limit)
    return [replace(shard, folder=folder_of(chosen(partitions[shard.file], options.partition_by))) for shard in shards]


def _look(
    options: RecommendOptions, out: OutDir, fields: Mapping[str, Any], inputs: Inputs, shards: Sequence[Shard]
) -> Earlier:
    if not options.fresh:
        return look(out, fields, inputs, shards)
    out.check_can_clear()
    return Earlier("new", {}, frozenset(), (fingerprint(fields),))


def look_again(job: OpenedJob) -> OpenedJob:
    """The same job after its output may have changed."""
    return replace(job, earlier=_look(job.options, job.out, job.fields, job.inputs, job.shards))


def plan_compute(job: OpenedJob, note: Callable[[str], None]) -> tuple[Device, MemoryPlan]:
    """The device, and how large a batch may be.

    Raises:
        XgrError: no such device, or one user does not fit.
    """
    device = resolve_device(job.options.device, note)
    filters, search = job.filters, search_for(job.filters, job.options.search)
    for text in filters.notes:
        note(text)
    return device, plan_memory(job.model, filters.searched, search, device, job.options.max_memory)


def prompt_maker(job: OpenedJob) -> PromptMaker:
    """Renders the job's histories for its model."""
    return make_prompt_maker(job.model, job.resolver, job.options.histories, job.filters.matcher)


def try_first_rows(job: OpenedJob, maker: PromptMaker) -> None:
    """A file whose columns have other types than the first one's is found now, and not after hours.

    Raises:
        HistoryError: a column of one of the files holds something else than the options say.
    """
    reader = RowReader(job.inputs)
    for number in sorted({shard.file for shard in job.todo if shard.rows}):
        with suppress(UnreadableRowsError):  # the run goes on around damaged rows
            maker.prepare(reader.read(number, 0, 1), str(job.inputs.files[number].path))

"""The job behind ``xgr recommend``: open and check everything, compute shard by shard, audit, ``_SUCCESS``.

Order matters: whatever can be wrong with options, inputs, catalog, model, device or output directory is found before
the output directory is touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xgr_engine.errors import InputError, OutputWriteError, TooManyRejectsError, UsageError, XgrError
from xgr_engine.job.caches import use_caches
from xgr_engine.job.diversify import capped_engine, search_for
from xgr_engine.job.engine import (
    LoadedEngine,
    device_peak_bytes,
    load_engine,
    weight_bytes,
)
from xgr_engine.job.filesystems import is_remote
from xgr_engine.job.input_formats import Rows
from xgr_engine.job.lock import is_held
from xgr_engine.job.manifest import SCHEMA_VERSION, write_manifest
from xgr_engine.job.metrics_file import exit_code_of, reported, write_metrics
from xgr_engine.job.opening import OpenedJob, look_again, open_job, plan_compute, prompt_maker, try_first_rows
from xgr_engine.job.options import RecommendOptions, max_rejects_of
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.output import ItemColumns
from xgr_engine.job.prompts import PromptMaker
from xgr_engine.job.read_back import AuditError
from xgr_engine.job.record import (
    JobReport,
    batch_summary,
    close_attempt,
    events_of,
    first_record,
    note_engine,
    plan_record,
    state_after,
)
from xgr_engine.job.remote import RemoteOutput, run_published, staged
from xgr_engine.job.resume import part_stamps, unreadable_record
from xgr_engine.job.shard_work import Finisher, ReadyPiece, ShardWork
from xgr_engine.job.shards import Piece, Shard, cut
from xgr_engine.job.stop import Stop
from xgr_engine.progress import NoProgress, ProgressSink
from xgr_engine.xschedule.pipeline import Pipeline, Settings
from xgr_engine.xschedule.trace import Trace

_log = logging.getLogger(__name__)

Note = Callable[[str], None]


def _silent(text: str) -> None:
    """No notes wanted."""


@dataclass(frozen=True)
class Caller:
    """Who runs the job: the command line it came from, where its settings came from, and where to report.

    ``stop`` is how the caller ends the run early; ``begin`` is called with the run id. ``engine_loader`` lets tests put
    another engine in place of the model.
    """

    argv: Sequence[str] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    progress: ProgressSink = field(default_factory=NoProgress)
    note: Note = _silent
    begin: Note = _silent
    stop: Stop = field(default_factory=Stop)
    engine_loader: Callable[..., LoadedEngine] = load_engine


def plan_job(options: RecommendOptions, caller: Caller | None = None) -> JobReport:
    """``--dry-run``: what a run would do. Writes nothing, loads no weights."""
    store = RemoteOutput.open(options.out) if is_remote(options.out) else None
    job = open_job(staged(options))
    state, finished = job.earlier.state, len(job.earlier.finished)
    if store is not None and store.finished(options.fresh, lambda: job.fields) is not None:
        state, finished = "done", len(job.shards)
    device, memory = plan_compute(job, (caller or Caller()).note)
    try_first_rows(job, prompt_maker(job))
    return JobReport(
        {
            **plan_record(job.subject, options.out, state, finished),
            "items": job.vocabulary.num_items,
            "filters": job.filters.counts,
            "device": device.name,
            "weight_bytes": weight_bytes(job.model, device),
            "memory_plan": memory.to_json(),
        }
    )


def run_job(options: RecommendOptions, caller: Caller | None = None) -> JobReport:
    """Runs the job to its end, continuing where an earlier attempt at the same output stopped.

    Returns:
        The manifest. With ``failure`` set, ``_SUCCESS`` was not written: too many rejects, rows that could not be
        read, or a failed audit.

    Raises:
        XgrError: the job could not start, or an error with ``--on-error fail``.
        Stopped: the caller asked for it; the same job continues where this one stopped.
    """
    caller = caller or Caller()
    record: dict[str, Any] = {}
    metrics = options.operation.metrics_file
    with reported(metrics, lambda: record), caller.stop.obeyed():
        use_caches(options.operation.cache_dir)
        report = (_run_published if is_remote(options.out) else _run)(options, caller, record)
    try:
        write_metrics(metrics, report.record, exit_code_of(report.failure))
    except (OSError, XgrError) as error:
        _warn_unwritten("--metrics-file", metrics, error)
    return report


def _run_published(options: RecommendOptions, caller: Caller, record: dict[str, Any]) -> JobReport:
    """A run whose output goes to an object store."""
    return run_published(
        options,
        run=lambda local: _run(local, caller, record),
        fields_of=lambda local: open_job(local).fields,
        nothing_to_do=lambda manifest: _done_before(manifest, options, options.out),
        note=caller.note,
        check=caller.stop.check,
    )


def _run(options: RecommendOptions, caller: Caller, record: dict[str, Any]) -> JobReport:
    started = time.monotonic()
    out, stop = OutDir(Path(options.out)), caller.stop
    with ExitStack() as stack:
        if held := is_held(out.lock):
            # Before the inputs are read: they may change while this run waits.
            stack.enter_context(out.held(options.operation.wait, caller.note, stop.check))
        job = open_job(options)
        if job.earlier.state == "done":
            return _nothing_to_do(job)
        stop.check()
        if not held:
            stack.enter_context(out.held(options.operation.wait, caller.note, stop.check))
            job = look_again(job)
            if job.earlier.state == "done":
                return _nothing_to_do(job)
        return _attempt(job, caller, record, started)


# Metrics are made from these as well: a run that finds nothing to do must not empty the series of the one that did it.
_KEPT_OF_A_FINISHED_RUN = (
    "run_id",
    "fingerprint",
    "finished",
    "rows",
    "shards",
    "shards_finished",
    "counts",
    "audit",
    "attempts",
    "durations",
    "batches",
    "memory",
    "events",
)


def _nothing_to_do(job: OpenedJob) -> JobReport:
    job.out.tidy()
    return _done_before(job.earlier.manifest, job.options, str(job.out.root))


def _done_before(manifest: Mapping[str, Any], options: RecommendOptions, out: str) -> JobReport:
    """A finished output is left as it is. Its rejects still have to be within the limit of this command, which may be
    stricter than that of the one that did the work."""
    shown = {name: manifest[name] for name in _KEPT_OF_A_FINISHED_RUN if name in manifest}
    failure = _too_many_rejects(
        manifest.get("counts", {}).get("rejects", 0),
        manifest.get("rows", 0),
        options.max_rejects,
        why=f"{out} was finished under a larger limit; it stays as it is, with its _SUCCESS",
        hint="fix the input and use --fresh, or run the same command with the larger --max-rejects",
    )
    return JobReport({"state": "too-many-rejects" if failure else "nothing-to-do", "out": out, **shown}, failure)


def _attempt(job: OpenedJob, caller: Caller, record: dict[str, Any], started: float) -> JobReport:
    """One attempt at the output, which is held."""
    record.update(first_record(job.subject, job.earlier, caller.argv, caller.origins))
    record["filters"] = job.filters.counts
    caller.begin(record["run_id"])
    finisher = Finisher(job.out, job.inputs, job.vocabulary, job.resolver, job.options, caller.stop.check)
    if not job.todo:
        caller.note(f"{job.out.root}: all parts are written already; nothing is computed again")
        record["engine"] = job.earlier.manifest.get("engine", {})
        loaded, maker = None, None
    else:
        if job.earlier.finished:
            done, count = len(job.earlier.finished), len(job.shards)
            caller.note(f"{job.out.root}: attempt {len(record['attempts'])}, {done} of {count} shards are finished")
        maker = prompt_maker(job)
        try_first_rows(job, maker)
        device, memory = plan_compute(job, caller.note)
        job.model.verify_weights()
        caller.stop.check()
        search = search_for(job.filters, job.options.search)
        arguments = (job.model, job.filters.searched, search, device, memory, job.options.threads)
        loaded = capped_engine(caller.engine_loader(*arguments), job.filters, job.options.search, record)
        note_engine(record, loaded.description)
        record["durations"]["load"] = time.monotonic() - started
    caller.stop.check()
    if job.options.fresh:
        job.out.clear()
    job.out.create(job.shards)
    job.out.sweep()
    with _recorded(job, caller, record, started):
        write_manifest(job.out.manifest, record)
        if loaded is not None and maker is not None:
            failure = _compute(job, caller, maker, loaded, record)
            if failure is not None:
                return _ended(job, record, "unreadable", started, failure)
        return _finish(job, finisher, record, started)


@contextmanager
def _recorded(job: OpenedJob, caller: Caller, record: dict[str, Any], started: float) -> Iterator[None]:
    """Records in the manifest whatever ends the attempt early. A full disk must not hide the first error."""

    def save(error: BaseException) -> None:
        if job.out.success.exists():
            return  # the output is complete, and its manifest says so: a signal that came too late changes neither
        # A copy: when the process is ended by force, another thread may still be at work on the record.
        last = deepcopy(record)
        last["durations"]["total"] = time.monotonic() - started
        close_attempt(last, state_after(error), error)
        record.update(last)
        with suppress(OSError, OutputWriteError):
            write_manifest(job.out.manifest, last)

    def last_words(error: BaseException) -> None:
        save(error)
        write_metrics(job.options.operation.metrics_file, record, exit_code_of(error))

    caller.stop.on_forced = last_words
    try:
        yield
    except BaseException as error:
        save(error)
        raise


def _compute(
    job: OpenedJob, caller: Caller, maker: PromptMaker, loaded: LoadedEngine, record: dict[str, Any]
) -> XgrError | None:
    """Computes and writes what is left to do.

    Returns:
        Why the output cannot be finished this time, although every other shard is.
    """
    metadata = {
        "xgr.schema_version": str(SCHEMA_VERSION),
        "xgr.run_id": record["run_id"],
        "xgr.fingerprint": record["fingerprint"],
        "xgr.model": job.model.fingerprint,
        "xgr.vocab": job.vocabulary.content_hash,
    }
    columns = ItemColumns.of(job.vocabulary, job.options.item_cols)
    work = ShardWork(job.options, job.inputs, job.out, maker, columns, metadata, caller.progress, caller.stop)
    pipeline = _pipeline(job.options, loaded, work)
    caller.progress.start(sum(shard.rows for shard in job.todo), "users")
    try:
        with caller.stop.finishing():
            pipeline.run(_claimed(job.todo, caller.stop))
        work.reader.check_unchanged()
    finally:
        caller.progress.finish()
        _save_trace(pipeline.trace)
        record["schedule"] = pipeline.summary.to_json()
        record["events"] += events_of(record, pipeline.summary.halvings)
        record["shards_finished"] = len(job.earlier.finished) + work.written
        record["durations"].update(work.seconds, compute=pipeline.summary.busy)
        record["memory"] = {"device_peak_bytes": device_peak_bytes(record["engine"].get("device", "cpu"))}
    return _unreadable(job, work, record) if work.unreadable else None


def _pipeline(
    options: RecommendOptions, loaded: LoadedEngine, work: ShardWork
) -> Pipeline[Piece, Rows | None, ReadyPiece]:
    trace = options.operation.trace
    settings = Settings(
        reject_errors=options.on_error == "reject",
        slo_seconds=None if options.slo_ms is None else options.slo_ms / 1e3,
        on_rows=work.on_rows,
        safe_point=work.safe_point,
        trace=Trace(None if trace is None else Path(trace)),
    )
    return Pipeline(loaded.engine, loaded.limits, work.stages, settings)


def _save_trace(trace: Trace) -> None:
    try:
        trace.write()
    except (OSError, UsageError) as error:
        _warn_unwritten("--trace", trace.path, error)


def _warn_unwritten(option: str, path: object, error: OSError | XgrError) -> None:
    """A warning, not a note: with -q nobody would see a note, and whoever watches the file would look at an old one."""
    reason = error.what if isinstance(error, XgrError) else error.strerror or error
    _log.warning("%s %s cannot be written: %s", option, path, reason)


def _claimed(todo: Sequence[Shard], stop: Stop) -> Iterator[Piece]:
    """Nothing new is begun once the job was asked to stop."""
    for shard in todo:
        if stop.requested:
            return
        yield from cut(shard)


def _unreadable(job: OpenedJob, work: ShardWork, record: dict[str, Any]) -> XgrError:
    record["unreadable"] = unreadable_record(job.inputs, job.shards, work.unreadable)
    first = min(work.unreadable)
    return InputError(
        f"{len(work.unreadable)} of {len(job.shards)} shards could not be read: {work.unreadable[first]}",
        why="the input is damaged there; every other shard is finished",
        hint="put a good copy of the file in its place and run the same command: only these shards are computed",
    )


def _finish(job: OpenedJob, finisher: Finisher, record: dict[str, Any], started: float) -> JobReport:
    """Rejects file, audit, verdict, manifest, ``_SUCCESS``: in this order, so that the last file proves the rest."""
    merged = finisher.merge(job.shards)
    record.pop("unreadable", None)
    rejected = sum(merged.reasons.values())
    record["counts"] = {
        **merged.counts,
        "rejects": rejected,
        "rejects_by_reason": dict(sorted(merged.reasons.items())),
    }
    record["batches"] = batch_summary(merged.batch_seconds)
    audit_started = time.monotonic()
    audit = finisher.audit(job.shards)
    record["durations"]["audit"] = time.monotonic() - audit_started
    record["audit"] = {**audit.to_json(), "line": audit.line()}
    record["parts"] = part_stamps(job.out, job.shards)
    failure = _verdict(job, audit.faults, audit.line(), rejected)
    return _ended(job, record, _STATE_AFTER[type(failure)], started, failure)


def _ended(job: OpenedJob, record: dict[str, Any], state: str, started: float, failure: XgrError | None) -> JobReport:
    record["durations"]["total"] = time.monotonic() - started
    close_attempt(record, state, failure)
    write_manifest(job.out.manifest, record)
    if failure is None:
        job.out.succeed()
    return JobReport(record, failure)


_STATE_AFTER = {type(None): "done", AuditError: "audit-failed", TooManyRejectsError: "too-many-rejects"}


def _verdict(job: OpenedJob, faults: int, line: str, rejected: int) -> XgrError | None:
    if faults:
        return AuditError(
            f"the audit of {job.out.root} found {faults} faults: {line}",
            why="the written files were read again and compared with the catalog and the histories",
            hint="do not use this output: compute it again with --fresh, and report it with this _xgr/manifest.json",
        )
    return _too_many_rejects(
        rejected,
        job.rows,
        job.options.max_rejects,
        why=f"each row's reason is in {job.out.rejects}",
        hint="fix the input, or run the same command with a larger --max-rejects: nothing is computed again",
    )


def _too_many_rejects(rejected: int, rows: int, limit: str, why: str, hint: str) -> TooManyRejectsError | None:
    """None where that many are allowed."""
    allowed = max_rejects_of(limit, rows)
    if rejected <= allowed:
        return None
    what = f"{rejected} of {rows} rows were rejected, but --max-rejects {limit} allows {allowed}"
    return TooManyRejectsError(what, why=why, hint=hint)

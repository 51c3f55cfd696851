"""The job behind ``xgr recommend``: open and check everything, compute shard by shard, audit, ``_SUCCESS``.

Order matters: whatever can be wrong with options, inputs, catalog, model, device or output directory is found before
the output directory is touched.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xgr_engine.catalog.vocabulary import Vocabulary, load_vocabulary
from xgr_engine.checkpoint.model_dir import ModelDir, load_model_dir
from xgr_engine.errors import TooManyRejectsError, XgrError
from xgr_engine.job.audit import AuditError
from xgr_engine.job.engine import (
    Device,
    LoadedEngine,
    MemoryPlan,
    load_engine,
    plan_memory,
    resolve_device,
    weight_bytes,
)
from xgr_engine.job.histories import HistoryResolver
from xgr_engine.job.inputs import Inputs, open_inputs
from xgr_engine.job.manifest import (
    KIND,
    SCHEMA_VERSION,
    environment,
    fingerprint,
    fingerprint_fields,
    read_manifest,
    write_manifest,
)
from xgr_engine.job.options import RecommendOptions, flatten, max_rejects_of
from xgr_engine.job.outdir import OutDir, State, check_apart
from xgr_engine.job.output import ItemColumns, check_column_names
from xgr_engine.job.prompts import PromptMaker, make_prompt_maker
from xgr_engine.job.shard_work import Finisher, ShardWork
from xgr_engine.job.shards import Shard, plan_shards
from xgr_engine.progress import NoProgress, ProgressSink
from xgr_engine.xschedule.pipeline import Stages, run_stages

Note = Callable[[str], None]


def _silent(text: str) -> None:
    """No notes wanted."""


@dataclass(frozen=True)
class Caller:
    """Who runs the job: the command line it came from, where its settings came from, and where to report.

    ``engine_loader`` exists so that tests and later schedulers can put another engine in the place of the model.
    """

    argv: Sequence[str] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    progress: ProgressSink = field(default_factory=NoProgress)
    note: Note = _silent
    engine_loader: Callable[..., LoadedEngine] = load_engine


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
    state: State

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class JobReport:
    """What a run did.

    Attributes:
        record: the manifest's content, or the plan of a dry run.
        failure: why the exit code is not 0; raise it after the record has been shown.
    """

    record: dict[str, Any]
    failure: XgrError | None = None


def open_job(options: RecommendOptions) -> OpenedJob:
    """Opens and checks everything but the device. Imports no torch.

    Raises:
        XgrError: whatever is wrong, before anything is written.
    """
    histories = options.histories
    out = OutDir(Path(options.out))
    inputs = open_inputs(histories)
    roots = [Path(path) for path in histories.paths if Path(path).exists()]
    check_apart(
        out.root,
        [*roots, *(file.path for file in inputs.files)],
        {"--model": Path(options.model), "--vocab": Path(options.vocab)},
    )
    check_column_names(inputs.schema.names, options.layout, options.item_cols)
    vocabulary = load_vocabulary(Path(options.vocab))
    model = load_model_dir(Path(options.model))
    model.table.bind(vocabulary.trie)
    ItemColumns.of(vocabulary, options.item_cols)
    shards = plan_shards([file.groups for file in inputs.files], options.shard_rows, histories.limit)
    fields = fingerprint_fields(options, inputs, model.fingerprint, vocabulary.content_hash)
    if options.fresh:
        out.check_can_clear()
        state: State = "new"
    else:
        state = out.state(fields, shards)
    return OpenedJob(options, inputs, vocabulary, model, shards, fields, out, state)


def _plan_compute(job: OpenedJob, note: Note) -> tuple[Device, MemoryPlan]:
    device = resolve_device(job.options.device, note)
    return device, plan_memory(job.model, job.vocabulary, job.options.search, device, job.options.max_memory)


def plan_job(options: RecommendOptions, caller: Caller | None = None) -> JobReport:
    """``--dry-run``: what a run would do. Writes nothing, loads no weights."""
    job = open_job(options)
    device, memory = _plan_compute(job, (caller or Caller()).note)
    _prompt_maker(job)
    return JobReport(
        {
            "dry_run": True,
            "output": {"path": str(job.out.root), "state": job.state},
            "inputs": [_input_record(job, number) for number in range(len(job.inputs.files))],
            "rows": job.rows,
            "shards": len(job.shards),
            "items": job.vocabulary.num_items,
            "device": device.name,
            "weight_bytes": weight_bytes(job.model, device),
            "memory_plan": memory.to_json(),
            "fingerprint": fingerprint(job.fields),
        }
    )


def run_job(options: RecommendOptions, caller: Caller | None = None) -> JobReport:
    """Runs the job to its end.

    Returns:
        The manifest. With ``failure`` set, ``_SUCCESS`` was not written: too many rejects, or a failed audit.

    Raises:
        XgrError: the job could not start, or an error with ``--on-error fail``.
    """
    caller = caller or Caller()
    started = time.monotonic()
    job = open_job(options)
    earlier = read_manifest(job.out.manifest) or {}
    if job.state == "done":
        shown = {name: earlier.get(name) for name in ("run_id", "fingerprint", "audit")}
        return JobReport({"state": "nothing-to-do", "out": str(job.out.root), **shown})
    manifest = _first_manifest(job, caller)
    finisher = Finisher(job.out, job.inputs, job.vocabulary, _resolver(job), options)
    if job.state == "computed":
        caller.note(f"{job.out.root}: all parts are written; checking rejects against --max-rejects again")
        manifest.update({name: earlier[name] for name in ("run_id", "started", "engine", "durations")})
        return _finish(job, finisher, manifest, started)
    maker = _prompt_maker(job)
    device, memory = _plan_compute(job, caller.note)
    job.model.verify_weights()
    loaded = caller.engine_loader(job.model, job.vocabulary, options.search, device, memory, options.threads)
    manifest["engine"] = loaded.description
    manifest["durations"]["load"] = time.monotonic() - started
    if options.fresh:
        job.out.clear()
    job.out.create()
    write_manifest(job.out.manifest, manifest)
    with _recorded(job, manifest):
        _compute(job, caller, maker, loaded, manifest)
        return _finish(job, finisher, manifest, started)


@contextmanager
def _recorded(job: OpenedJob, manifest: dict[str, Any]) -> Iterator[None]:
    """Whatever ends the run early is said in the manifest."""
    try:
        yield
    except BaseException as error:
        manifest["state"] = "failed" if isinstance(error, Exception) else "interrupted"
        manifest["error"] = f"{type(error).__name__}: {error}"
        manifest["finished"] = _now()
        write_manifest(job.out.manifest, manifest)
        raise


def _compute(
    job: OpenedJob, caller: Caller, maker: PromptMaker, loaded: LoadedEngine, manifest: dict[str, Any]
) -> None:
    metadata = {
        "xgr.schema_version": str(SCHEMA_VERSION),
        "xgr.run_id": manifest["run_id"],
        "xgr.fingerprint": manifest["fingerprint"],
        "xgr.model": job.model.fingerprint,
        "xgr.vocab": job.vocabulary.content_hash,
    }
    columns = ItemColumns.of(job.vocabulary, job.options.item_cols)
    work = ShardWork(job.options, job.inputs, job.out, maker, loaded, columns, metadata, caller.progress)
    caller.progress.start(job.rows, "users")
    try:
        run_stages(job.shards, Stages(work.read, work.prepare, work.compute, work.write))
        work.reader.check_unchanged()
    finally:
        caller.progress.finish()
        manifest["durations"].update(work.seconds)


def _finish(job: OpenedJob, finisher: Finisher, manifest: dict[str, Any], started: float) -> JobReport:
    """Rejects file, audit, verdict, manifest, ``_SUCCESS``: in this order, so that the last file proves the rest."""
    counts, reasons = finisher.merge_rejects(job.shards)
    rejected = sum(reasons.values())
    manifest["counts"] = {**counts, "rejects": rejected, "rejects_by_reason": dict(sorted(reasons.items()))}
    audit_started = time.monotonic()
    audit = finisher.audit(job.shards)
    manifest["durations"]["audit"] = time.monotonic() - audit_started
    manifest["audit"] = {**audit.to_json(), "line": audit.line()}
    failure = _verdict(job, audit.faults, audit.line(), rejected)
    manifest["state"] = _STATE_AFTER[type(failure)]
    manifest["finished"] = _now()
    manifest["durations"]["total"] = time.monotonic() - started
    write_manifest(job.out.manifest, manifest)
    if failure is None:
        job.out.succeed()
    return JobReport(manifest, failure)


_STATE_AFTER = {type(None): "done", AuditError: "audit-failed", TooManyRejectsError: "too-many-rejects"}


def _verdict(job: OpenedJob, faults: int, line: str, rejected: int) -> XgrError | None:
    if faults:
        return AuditError(
            f"the audit of {job.out.root} counts {faults} wrong rows: {line}",
            why="the written files were read again and compared with the catalog and the histories",
            hint="do not use this output; please report it with _xgr/manifest.json",
        )
    allowed = max_rejects_of(job.options.max_rejects, job.rows)
    if rejected > allowed:
        return TooManyRejectsError(
            f"{rejected} of {job.rows} rows were rejected, --max-rejects {job.options.max_rejects} allows {allowed}",
            why=f"each row's reason is in {job.out.rejects}",
            hint="mend the input, or run the same command with a larger --max-rejects: nothing is computed again",
        )
    return None


def _resolver(job: OpenedJob) -> HistoryResolver:
    return HistoryResolver(job.vocabulary, job.model.table, job.options.histories)


def _prompt_maker(job: OpenedJob) -> PromptMaker:
    return make_prompt_maker(job.model, _resolver(job), job.options.histories)


def _first_manifest(job: OpenedJob, caller: Caller) -> dict[str, Any]:
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "state": "running",
        "run_id": uuid.uuid4().hex,
        "started": _now(),
        "argv": list(caller.argv),
        "options": {
            name: {"value": list(value) if isinstance(value, tuple) else value, "origin": _origin(caller, name)}
            for name, value in flatten(job.options)
        },
        "fingerprint": fingerprint(job.fields),
        "fingerprint_fields": job.fields,
        "model": {"path": job.options.model, "fingerprint": job.model.fingerprint},
        "vocab": {"path": job.options.vocab, "content_hash": job.vocabulary.content_hash},
        "inputs": [_input_record(job, number) for number in range(len(job.inputs.files))],
        "rows": job.rows,
        "shards": len(job.shards),
        "environment": environment(),
        "durations": {},
    }


def _origin(caller: Caller, name: str) -> str:
    return caller.origins.get(name, "caller")


def _input_record(job: OpenedJob, number: int) -> dict[str, Any]:
    file = job.inputs.files[number]
    return {
        "path": str(file.path),
        "format": file.format,
        "rows": file.rows,
        "row_groups": len(file.groups),
        "bytes": file.stamp[0],
        "sha256": file.sha256,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""What the manifest says about a run, from its beginning to its end."""

from __future__ import annotations

import resource
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xgr_engine.errors import XgrError
from xgr_engine.job.inputs import Inputs
from xgr_engine.job.manifest import KIND, SCHEMA_VERSION, environment, fingerprint
from xgr_engine.job.options import RecommendOptions, flatten
from xgr_engine.job.resume import Earlier, new_attempt, now
from xgr_engine.job.stop import Stopped
from xgr_engine.xschedule.results import percentiles
from xgr_engine.xschedule.worker import Halving

# What an attempt keeps of the engine's description.
_ENGINE_FIELDS = ("device", "device_name", "dtype", "implementation", "torch")


@dataclass(frozen=True)
class JobReport:
    """What a run did.

    Attributes:
        record: the manifest's content, or the plan of a dry run.
        failure: why the exit code is not 0; raise it after the record has been shown.
    """

    record: dict[str, Any]
    failure: XgrError | None = None


@dataclass(frozen=True)
class Subject:
    """What a run is about, for its record."""

    options: RecommendOptions
    inputs: Inputs
    model: str
    vocab: str
    fields: Mapping[str, Any]
    rows: int
    shards: int


def first_record(subject: Subject, earlier: Earlier, argv: Sequence[str], origins: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of an attempt that begins. An attempt at the same output goes on with its run id.

    Args:
        origins: where each option comes from, by its dotted name.
    """
    options = subject.options
    before = earlier.manifest
    own = fingerprint(subject.fields)
    record: dict[str, Any] = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "state": "running",
        "run_id": before.get("run_id") or uuid.uuid4().hex,
        "started": before.get("started") or now(),
        "argv": list(argv),
        "options": {
            name: {"value": list(value) if isinstance(value, tuple) else value, "origin": origins.get(name, "caller")}
            for name, value in flatten(options)
        },
        "fingerprint": own,
        "fingerprint_fields": dict(subject.fields),
        "model": {"path": options.model, "fingerprint": subject.model},
        "vocab": {"path": options.vocab, "content_hash": subject.vocab},
        "inputs": [_input_record(subject.inputs, number) for number in range(len(subject.inputs.files))],
        "rows": subject.rows,
        "shards": subject.shards,
        "shards_finished": len(earlier.finished),
        "environment": environment(),
        "durations": {},
        "events": list(before.get("events", [])),
        "attempts": new_attempt(before, argv),
    }
    if others := [known for known in earlier.fingerprints if known != own]:
        record["earlier_fingerprints"] = others
    if before.get("fingerprint") == own and "unreadable" in before:
        # until the rows are read: if this attempt is killed, the next must still know what a good copy repairs
        record["unreadable"] = before["unreadable"]
    return record


def _input_record(inputs: Inputs, number: int) -> dict[str, Any]:
    file = inputs.files[number]
    return {
        "path": str(file.path),
        "format": file.format,
        "rows": file.rows,
        "row_groups": len(file.groups),
        "bytes": file.stamp[0],
        "sha256": file.sha256,
    }


def note_engine(record: dict[str, Any], description: Mapping[str, Any]) -> None:
    """What computes in this attempt."""
    record["engine"] = dict(description)
    record["attempts"][-1].update({name: description[name] for name in _ENGINE_FIELDS if name in description})


def events_of(record: Mapping[str, Any], halvings: Sequence[Halving]) -> list[dict[str, Any]]:
    """What happened in this attempt that a reader of the manifest should know."""
    attempt = record["attempts"][-1]["number"]
    return [
        {"kind": "out-of-memory", "attempt": attempt, "users": cut.users, "tokens": cut.tokens, "detail": cut.detail}
        for cut in halvings
    ]


def close_attempt(record: dict[str, Any], state: str, error: BaseException | None = None) -> None:
    """The attempt is over: its state, time, seconds and memory; and why, if it failed."""
    record["state"] = state
    record["finished"] = now()
    record["memory"] = {"host_peak_bytes": host_peak_bytes(), **record.get("memory", {})}
    ended: dict[str, Any] = {
        "state": state,
        "finished": record["finished"],
        "shards_finished": record["shards_finished"],
        "durations": dict(record["durations"]),
        "memory": dict(record["memory"]),
    }
    record.pop("error", None)
    if error is not None:
        what = error.what if isinstance(error, XgrError) else str(error)
        record["error"] = ended["error"] = what if isinstance(error, XgrError | Stopped) else (
            f"{type(error).__name__}: {what}"
        )  # fmt: skip
    if isinstance(error, Stopped):
        ended["signal"] = error.reason
    record["attempts"][-1].update(ended)


def state_after(error: BaseException) -> str:
    """``interrupted`` for a signal, else ``failed``."""
    return "failed" if isinstance(error, Exception) else "interrupted"


def host_peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def batch_summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Number of batches of all attempts, and percentiles of their time."""
    return {"count": len(seconds), **({"seconds": percentiles(seconds)} if seconds else {})}


def plan_record(subject: Subject, out: str, state: str, finished: int) -> dict[str, Any]:
    """The part of ``--dry-run``'s result that does not depend on the machine."""
    return {
        "dry_run": True,
        "output": {"path": out, "state": state, "shards_finished": finished},
        "inputs": [_input_record(subject.inputs, number) for number in range(len(subject.inputs.files))],
        "rows": subject.rows,
        "shards": subject.shards,
        "fingerprint": fingerprint(subject.fields),
    }

"""``--metrics-file``: the last run in Prometheus' text format, for node_exporter's textfile collector.

Every series carries the label ``name``, the file's name without its suffix, so that the files of several jobs can lie
in one directory. The file is replaced as a whole. After a failure it keeps the time of the last success.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from xgr_engine.errors import XgrError
from xgr_engine.files import destination
from xgr_engine.job.commit import commit_text
from xgr_engine.job.stop import Stopped

_LAST_SUCCESS = "xgr_last_success_timestamp_seconds"
_QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99"}


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of a run that ends with this error, or without one."""
    if error is None:
        return 0
    if isinstance(error, XgrError | Stopped):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


@contextmanager
def reported(path: str | None, record: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Writes the metrics when the block ends by an exception. The file being unwritable hides no other error.

    Args:
        path: the file, or None for no metrics.
        record: the manifest so far.
    """
    try:
        yield
    except BaseException as error:
        with suppress(OSError, XgrError):
            write_metrics(path, record(), exit_code_of(error))
        raise


def write_metrics(path: str | Path | None, record: Mapping[str, Any], exit_code: int) -> None:
    """Replaces the file.

    Args:
        record: the manifest, as far as the run came.

    Raises:
        OSError, XgrError: the file cannot be written.
    """
    if path is None:
        return
    path = Path(path)
    target = destination(path)  # before it is read: a pipe would not end
    target.parent.mkdir(parents=True, exist_ok=True)
    commit_text(path, metrics_text(path.stem, record, exit_code, time.time(), _last_success(path)))


def report_failure(path: str | Path | None, error: XgrError) -> None:
    """For a command that fails before its job begins: the metrics say so, and the error is not hidden."""
    with suppress(OSError, XgrError):
        write_metrics(path, {}, error.exit_code)


def metrics_text(
    name: str, record: Mapping[str, Any], exit_code: int, now: float, last_success: float | None = None
) -> str:
    """The file's content.

    Args:
        name: value of the label ``name``.
        now: when the run ended, seconds since 1970.
        last_success: of the file that is replaced.
    """
    lines: list[str] = []

    def gauge(metric: str, help_text: str, *values: tuple[Mapping[str, str], float | int | None]) -> None:
        given = [(labels, value) for labels, value in values if value is not None]
        if given:
            lines.append(f"# HELP {metric} {help_text}")
            lines.append(f"# TYPE {metric} gauge")
        for labels, value in given:
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in {"name": name, **labels}.items())
            lines.append(
                f"{metric}{{{text}}} {value:.10g}" if isinstance(value, float) else f"{metric}{{{text}}} {value}"
            )

    if exit_code == 0:
        last_success = _finished(record) or now
    gauge("xgr_last_run_exit_code", "Exit code of the last run.", ({}, exit_code))
    gauge("xgr_last_run_timestamp_seconds", "When the last run ended.", ({}, float(round(now, 3))))
    gauge(_LAST_SUCCESS, "When the output of the last successful run was complete.", ({}, last_success))
    _counts(gauge, record)
    _timings(gauge, record)
    return "\n".join(lines) + "\n"


_Gauge = Callable[..., None]


def _counts(gauge: _Gauge, record: Mapping[str, Any]) -> None:
    counts, audit = record.get("counts", {}), record.get("audit") or {}
    gauge("xgr_rows", "Rows of the input.", ({}, record.get("rows")))
    gauge(
        "xgr_shards",
        "Shards by state.",
        ({"state": "planned"}, record.get("shards")),
        ({"state": "finished"}, record.get("shards_finished")),
    )
    gauge("xgr_rejected_rows", "Rows without recommendations.", ({}, counts.get("rejects")))
    reasons = counts.get("rejects_by_reason", {})
    gauge("xgr_rejects", "Rejected rows by reason.", *(({"reason": key}, value) for key, value in reasons.items()))
    unknown = counts.get("unknown_items", 0) if counts else None
    gauge("xgr_unknown_items", "Ids in histories that are not in the catalog.", ({}, unknown))
    gauge("xgr_users", "Users with a list.", ({}, audit.get("users")))
    gauge("xgr_items", "Recommendations written.", ({}, audit.get("items")))
    gauge("xgr_short_users", "Users with fewer than K items.", ({}, audit.get("short")))
    faults = ("invalid", "duplicate", "seen", "excluded", "filtered", "over_cap", "misordered", "misplaced")
    found = [({"fault": key}, audit[key]) for key in faults if type(audit.get(key)) is int]
    gauge("xgr_audit_faults", "Faults that the audit found in the written rows, by kind.", *found)


def _timings(gauge: _Gauge, record: Mapping[str, Any]) -> None:
    durations = record.get("durations", {})
    gauge(
        "xgr_duration_seconds",
        "Seconds of the last run that computed, by stage; stages overlap.",
        *(({"stage": key}, float(value)) for key, value in durations.items()),
    )
    batches = record.get("batches") or {}
    gauge("xgr_batches", "Batches computed.", ({}, batches.get("count")))
    seconds = batches.get("seconds") or {}
    found = [({"quantile": text}, float(seconds[key])) for key, text in _QUANTILES.items() if key in seconds]
    gauge("xgr_batch_seconds", "Seconds of a batch.", *found)
    memory = record.get("memory") or {}
    gauge(
        "xgr_memory_peak_bytes",
        "Peak memory of the process and of the device.",
        ({"where": "host"}, memory.get("host_peak_bytes")),
        ({"where": "device"}, memory.get("device_peak_bytes")),
    )
    events: dict[str, int] = {}
    for event in record.get("events", []):
        events[str(event.get("kind"))] = events.get(str(event.get("kind")), 0) + 1
    gauge("xgr_events", "Noteworthy events, such as batches split for memory.",
          *(({"kind": key}, value) for key, value in events.items()))  # fmt: skip
    gauge("xgr_attempts", "Attempts at this output.", ({}, len(record.get("attempts", [])) or None))


def _finished(record: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(record["finished"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def _last_success(path: Path) -> float | None:
    with suppress(OSError, ValueError):
        if match := re.search(rf"^{_LAST_SUCCESS}\{{.*\}} (\S+)$", path.read_text(encoding="utf-8"), re.M):
            return float(match[1])
    return None


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

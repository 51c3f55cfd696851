"""Two results side by side: ratios, and what got worse."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgr_engine.bench.record import read_record
from xgr_engine.errors import InputError, UsageError

Record = dict[str, Any]
_SHAPE = ("model", "dtype", "items", "context", "users", "beam", "top_k", "score_over", "shared_prefix", "prompts")
# Figures that are compared: name, where it stands, whether more of it is better.
_FIGURES = (
    ("latency p50, ms", ("latency_ms", "p50", "value"), False),
    ("users/s", ("users_per_s", "value"), True),
    ("device memory, bytes", ("device_peak_bytes",), False),
)


def parse_share(text: str) -> float:
    """``5%`` or ``0.05`` as a share.

    Raises:
        UsageError: anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    if not found:
        raise UsageError(f"--fail-over {text}: must be a share such as 5% or 0.05")
    return float(found.group(1)) / (100 if found.group(2) else 1)


def compare_files(before: Path, after: Path, limit: float | None) -> Record:
    """:func:`compare_records` of two files."""
    records = read_record(before), read_record(after)
    for path, record in zip((before, after), records, strict=True):
        _check_fields(path, record)
    return {"before": str(before), "after": str(after)} | compare_records(*records, limit)


def _check_fields(path: Path, record: Record) -> None:
    """Raises InputError unless the record has every field that is compared, which comparing it with itself shows."""
    try:
        with suppress(InputError):  # a record without rows: the comparison of both will say so
            compare_records(record, record, None)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InputError(
            f"{path}: lacks fields of a benchmark's result, or has others in their place",
            why=f"{type(error).__name__}: {error}",
            hint="give files as xgr bench --json or --out wrote them",
        ) from error


def compare_records(before: Record, after: Record, limit: float | None) -> Record:
    """Ratios after / before of every figure that both have, row by row and contender by contender.

    Args:
        limit: share beyond which a figure that got worse is a regression. Latency counts only where the intervals of
            both runs lie apart as well. None: no figure is a regression.

    Raises:
        InputError: the two have no row in common.
    """
    old, new = _contenders(before), _contenders(after)
    common = [key for key in old if key in new]
    if not common:
        raise InputError(
            "the two results have no row in common", why="model, catalog, context, users, beam and mode must be equal"
        )
    rows: list[Record] = []
    for key in common:
        rows += _compare_one(key, old[key], new[key], limit)
    rows += _compare_online(before, after, limit)
    machines = [record["machine"]["device_name"] for record in (before, after)]
    return {
        "machines": machines,
        "same_machine": machines[0] == machines[1],
        "rows": rows,
        "only_before": [_title(key) for key in old if key not in new],
        "only_after": [_title(key) for key in new if key not in old],
        "regressions": [row for row in rows if row["regression"]],
    }


def _compare_one(key: tuple[Any, ...], old: Record, new: Record, limit: float | None) -> list[Record]:
    title = {"row": _title(key), "contender": key[-1]}
    rows: list[Record] = []
    if old["status"] != new["status"]:
        worse = limit is not None and old["status"] == "ok"
        rows.append({**title, "figure": "status", "before": old["status"], "after": new["status"], "ratio": None})
        rows[-1]["regression"] = worse
        return rows
    if old["status"] != "ok":
        return rows
    marks = [_answers(one["parity"]) for one in (old, new)]
    if marks[0] != marks[1]:
        worse = limit is not None and marks[0] == "equal"
        rows.append({**title, "figure": "answers", "before": marks[0], "after": marks[1], "ratio": None})
        rows[-1]["regression"] = worse
    for name, path, more_is_better in _FIGURES:
        first, second = _at(old, path), _at(new, path)
        if not first or not second:
            continue
        ratio = second / first
        loss = 1 / ratio - 1 if more_is_better else ratio - 1
        worse = limit is not None and loss > limit and _apart(old, new, path)
        rows.append({**title, "figure": name, "before": first, "after": second, "ratio": ratio, "regression": worse})
    return rows


def _compare_online(before: Record, after: Record, limit: float | None) -> list[Record]:
    """Highest rates with the P99 kept, where both runs had the same limit. A rate that is no more is a regression."""
    if before["options"]["slo_ms"] != after["options"]["slo_ms"]:
        return []
    old, new = ({_online_key(one): one for one in record["online"]} for record in (before, after))
    rows: list[Record] = []
    for key in (key for key in old if key in new):
        first, second = old[key]["rate"], new[key]["rate"]
        if not first:
            continue
        worse = limit is not None and (not second or first / second - 1 > limit)
        title = {"row": f"{key[0]}, {key[1]} tokens, W {key[2]}", "contender": key[3], "figure": "online users/s"}
        ratio = second / first if second else None
        rows.append({**title, "before": first, "after": second, "ratio": ratio, "regression": worse})
    return rows


def _online_key(one: Record) -> tuple[Any, ...]:
    return tuple(one[name] for name in ("model", "context", "beam", "contender"))


def _answers(parity: Record | None) -> str:
    return "not compared" if parity is None else ", ".join(parity["marks"]) or "equal"


def _apart(old: Record, new: Record, path: tuple[str, ...]) -> bool:
    """Whether the intervals of a figure do not overlap; true for figures without one."""
    if path[-1] != "value":
        return True
    first, second = _at(old, path[:-1]), _at(new, path[:-1])
    return bool(first["high"] < second["low"] or second["high"] < first["low"])


def _contenders(record: Record) -> dict[tuple[Any, ...], Record]:
    return {(*(row[name] for name in _SHAPE), one["name"]): one for row in record["rows"] for one in row["contenders"]}


def _title(key: tuple[Any, ...]) -> str:
    shape = dict(zip(_SHAPE, key, strict=False))
    return f"{shape['model']}, {shape['context']} x {shape['users']} x W {shape['beam']}"


def _at(record: Record, path: tuple[str, ...]) -> Any:
    for name in path:
        record = record.get(name) if record is not None else None  # type: ignore[assignment]
    return record

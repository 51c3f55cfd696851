"""The claims of the xGR paper (arXiv 2512.11529) beside what this run measured, where it measured them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Record = dict[str, Any]
OTHERS = ("paged", "hf", "hf-fast")  # whom the engine is held against


def paper_claims(record: Record) -> list[Record]:
    """One entry a claim and shape that this run has figures for.

    ``paper`` is the paper's text and ``unit`` that of ``values``, which holds a figure of each contender, or why there
    is none. ``better`` says how many times better than each other one the engine is: above 1 the engine is ahead.
    """
    return [*_memory(record), *_growth(record), *_attention(record), *_throughput(record)]


def _memory(record: Record) -> Iterable[Record]:
    """Device memory at W 512, weights included, with the longest prompts and the largest batch of each model."""
    rows = [row for row in record["rows"] if row["beam"] == 512]
    for model in dict.fromkeys(row["model"] for row in rows):
        row = max((row for row in rows if row["model"] == model), key=lambda row: (row["context"], row["users"]))
        values = _values(row, _gigabytes)
        yield from _claim("device memory at W 512", "10.6 GB against 46.3 GB", "GB", row, values, less_is_better=True)


def _growth(record: Record) -> Iterable[Record]:
    """Latency from W 128 to W 512."""
    rows = {(row["model"], row["context"], row["users"], row["beam"]): row for row in record["rows"]}
    for (model, context, users, beam), narrow in rows.items():
        wide = rows.get((model, context, users, 512))
        if beam != 128 or wide is None:
            continue
        before, after = _values(narrow, _latency), _values(wide, _latency)
        growth = {name: _over(value, before.get(name, "not run")) for name, value in after.items()}
        yield from _claim("latency at W 512 over that at W 128", "", "times", wide, growth, less_is_better=True)


def _attention(record: Record) -> Iterable[Record]:
    for entry in record["attention"]:
        if entry.get("status") == "ok" and entry["kernels"] == "triton":  # plain torch says nothing about kernels
            values = {"xgr": entry["xgr_ms"], "paged": entry["paged_ms"]}
            yield from _claim(
                "decode attention of a layer", "up to 6.6 times quicker", "ms", entry, values, less_is_better=True
            )


def _throughput(record: Record) -> Iterable[Record]:
    """The highest rate whose P99 keeps the limit; ``better`` where both searches came to their end."""
    by_shape: dict[tuple[Any, ...], list[Record]] = {}
    for entry in record["online"]:
        by_shape.setdefault((entry["model"], entry["context"], entry["beam"]), []).append(entry)
    for entries in by_shape.values():
        values: dict[str, float | str] = {
            one["contender"]: one["rate"] or one.get("reason") or one["status"] for one in entries
        }
        name = f"throughput with P99 <= {record['options']['slo_ms']:,.0f} ms"
        ended = {one["contender"] for one in entries if not one.get("reason")}
        for claim in _claim(name, "2.89 to 8 times", "users/s", entries[0], values, less_is_better=False):
            claim["better"] = {other: times for other, times in claim["better"].items() if {"xgr", other} <= ended}
            yield claim


def _claim(
    name: str, paper: str, unit: str, shape: Record, values: Mapping[str, float | str], *, less_is_better: bool
) -> Iterable[Record]:
    """The entry, if the engine has a figure."""
    ours = values.get("xgr")
    if ours is None or isinstance(ours, str):
        return
    size = f"{shape['context']:,} tokens" + (f" x {shape['users']} users" if "users" in shape else "")
    better: dict[str, float] = {}
    for other in OTHERS:
        theirs = values.get(other)
        if theirs is not None and not isinstance(theirs, str):
            better[other] = theirs / ours if less_is_better else ours / theirs
    yield {
        "claim": name,
        "shape": f"{shape['model']}, {size}, W {shape['beam']}",
        "paper": paper,
        "unit": unit,
        "values": {other: values[other] for other in ("xgr", *OTHERS) if other in values},
        "better": better,
    }


def _values(row: Record, figure: Callable[[Record], float | None]) -> dict[str, float | str]:
    """Of each contender in a row its figure, or why it has none."""
    found: dict[str, float | str] = {}
    for one in row["contenders"]:
        value = figure(one) if one["status"] == "ok" else None
        found[one["name"]] = value if value is not None else "not measured" if one["status"] == "ok" else one["status"]
    return found


def _latency(one: Record) -> float:
    return float(one["latency_ms"]["p50"]["value"])


def _gigabytes(one: Record) -> float | None:
    """None on a CPU: what a process holds says little about a GPU's memory."""
    return None if one["device_peak_bytes"] is None else one["device_peak_bytes"] / 1e9


def _over(after: float | str, before: float | str) -> float | str:
    """Their ratio, or why there is none."""
    if isinstance(after, str):
        return after
    return before if isinstance(before, str) else after / before

"""The record's figures as charts: who is drawn against what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from xgr_engine.bench.record import exceeded
from xgr_engine.bench.report.svg import Axes, Series, bar_chart, line_chart, number, roofline, span_chart

Record = dict[str, Any]
Figure = tuple[str, str]  # heading and SVG
# Contenders in the order of their colours; any other comes after them.
_ORDER = ("xgr", "hf", "hf-fast", "paged", "paper", "cascade", "flashrec", "vllm")
_WIDE = 512

Value = tuple[float, float, float]  # a figure and its interval


def model_charts(record: Record, model: str) -> list[Figure]:
    """Latency and memory against width, throughput and memory against context, for one model of the run.

    With a single width, batch size takes its place on the axis; an axis with one value becomes a bar chart.
    """
    rows = [row for row in record["rows"] if row["model"] == model]
    contexts, users, beams = (sorted({row[name] for row in rows}) for name in ("context", "users", "beam"))
    context, batch = contexts[0], users[-1]
    wide = _WIDE if _WIDE in beams else beams[-1]
    gpu = any(one.get("device_peak_bytes") is not None for row in rows for one in row["contenders"])
    memory = "Memory" if gpu else "Extra memory"
    by_users = len(beams) == 1 and len(users) > 1
    first = [row for row in rows if row["context"] == context and (by_users or row["users"] == batch)]
    second = [row for row in rows if row["beam"] == wide and row["users"] == batch]
    axis, name, ticks = ("users", "users per batch", users) if by_users else ("beam", "W", beams)
    if by_users:
        word, at = "batch", f"{context:,} tokens, W {wide}"
    else:
        word, at = "width", f"{context:,} tokens x {batch} users"
    across = f"W {wide}, {batch} users"
    over_first = partial(_chart, first, axis, name, ticks)
    over_context = partial(_chart, second, "context", "prompt tokens", contexts)
    against = f" against {word}: {at}" if len(ticks) > 1 else f": {at}, W {wide}"
    against_context = f" against context: {across}" if len(contexts) > 1 else f": {contexts[0]:,} tokens, {across}"
    figures = [
        (f"Latency{against}", over_first(_latency, "ms, p50 with 95 % interval")),
        (f"Throughput{against_context}", over_context(_rate, "users/s")),
        (f"{memory}{against}", over_first(_memory, "GB")),
    ]
    if len(contexts) > 1:
        figures.append((f"{memory}{against_context}", over_context(_memory, "GB")))
    return figures


def _chart(
    rows: Sequence[Record],
    axis: str,
    name: str,
    ticks: Sequence[float],
    figure: Callable[[Record], Value | None],
    unit: str,
) -> str:
    """Lines of all contenders, or bars where the axis has one value."""
    series = _series(rows, axis, figure)
    label = f"{unit} against {name}"
    if len(ticks) > 1:
        return line_chart(series, Axes(name, unit, log_y=True, x_ticks=list(ticks)), label)
    bars = [(one.name, one.points[0][1], f"{number(one.points[0][1])} {unit.split(',')[0]}") for one in series]
    return bar_chart(bars, label)


def other_charts(record: Record) -> list[Figure]:
    """Roofline, ablations, timeline, the constraint's cost, online rates: those that the run has figures for."""
    charts = []
    if record["rows"]:
        charts.append(("Roofline: the least work a batch needs, over the time it took", _roofline(record)))
    if record["ablations"]:
        charts.append(("Ablations: how many times slower without each part", _ablations(record["ablations"])))
    if record["timeline"] and record["timeline"]["spans"]:
        traced = record["timeline"]
        title = f"Timeline of one batch: {traced['context']} tokens x {traced['users']} users x W {traced['beam']}"
        spans = [(kind, start / 1e3, stop / 1e3) for kind, start, stop in traced["spans"]]
        charts.append((title, span_chart(spans, f"ms; {traced['unit']} by kind", title)))
    if record["phases"]:
        ms = record["phases"]["ms"]
        total = sum(ms.values()) or 1.0
        bars = [(name, value, f"{value:.3g} ms, {value / total:.0%}") for name, value in ms.items()]
        charts.append(("Phases of that batch", bar_chart(bars, "milliseconds by phase")))
    if record["constraint"]:
        charts.append(("The constraint's cost against the catalog", _constraint(record["constraint"])))
    if any(entry.get("rate") for entry in record["online"]):
        charts.append((f"Highest rate with P99 <= {record['options']['slo_ms']:,.0f} ms", _online(record["online"])))
    return charts


def _series(rows: Sequence[Record], axis: str, figure: Callable[[Record], Value | None]) -> list[Series]:
    found: dict[str, list[tuple[float, Value]]] = {}
    for row in rows:
        for one in row["contenders"]:
            value = figure(one) if one["status"] == "ok" else None
            if value is not None and value[0] > 0:
                found.setdefault(one["name"], []).append((row[axis], value))
    series = []
    for name in sorted(found, key=_place):
        points = sorted(found[name])
        series.append(
            Series(
                name,
                [(x, value) for x, (value, _, _) in points],
                [(low, high) for _, (_, low, high) in points],
                _place(name),
            )
        )
    return series


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _latency(one: Record) -> Value | None:
    return _estimate(one["latency_ms"]["p50"])


def _rate(one: Record) -> Value | None:
    return _estimate(one["users_per_s"])


def _memory(one: Record) -> Value | None:
    count = one["device_peak_bytes"] if one["device_peak_bytes"] is not None else one["host_own_bytes"]
    return None if not count else (count / 1e9, count / 1e9, count / 1e9)


def _estimate(figure: Record | None) -> Value | None:
    return None if figure is None else (figure["value"], figure["low"], figure["high"])


def _roofline(record: Record) -> str:
    points = []
    for row in record["rows"]:
        work = row["work"]
        intensity = (work["prefill_flops"] + work["decode_flops"]) / (work["prefill_bytes"] + work["decode_bytes"])
        points += [
            (one["name"], intensity, one["tflops"], _place(one["name"]))
            for one in row["contenders"]
            if one["status"] == "ok"
        ]
    ceilings = record["ceilings"]
    roof = f"{number(ceilings['tflops'])} TFLOP/s, {number(ceilings['tbs'])} TB/s measured"
    if exceeded(ceilings, record["rows"]):
        roof += ", and exceeded: too low"
    label = "achieved TFLOP/s beside the measured ceilings"
    return roofline(points, ceilings["tflops"], ceilings["tbs"], label, roof)


def _ablations(ablations: Record) -> str:
    bars = [
        (
            part["part"],
            part["slower"],
            f"{part['slower']:.2f}" + (" (wrong)" if part["parity"] and part["parity"]["marks"] else ""),
        )
        for part in ablations["parts"]
        if part["status"] == "ok"
    ]
    return bar_chart(bars, "times slower", one=1.0)


def _constraint(constraint: Record) -> str:
    sizes = [entry for entry in constraint["sizes"] if entry.get("status") == "ok"]
    lines = [("xgr", "constraint_ms", 0), ("masked full-vocabulary top-k", "masked_constraint_ms", 1)]
    series = [
        Series(name, [(entry["items"], entry[key]) for entry in sizes if entry.get(key)], (), style)
        for name, key, style in lines
    ]
    return line_chart(
        [one for one in series if one.points], Axes("items", "ms", log_x=True, log_y=True), "cost of the constraint"
    )


def _online(entries: Sequence[Record]) -> str:
    bars = [
        (f"{entry['contender']}, W {entry['beam']}", entry["rate"], f"{entry['rate']:,.1f} users/s")
        for entry in entries
        if entry.get("rate")
    ]
    return bar_chart(bars, "users per second within the P99 limit")

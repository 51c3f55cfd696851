"""Charts as inline SVG. Colours come from the page's style sheet, so light and dark need no second drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 14, 12, 46
_LETTER = 9.5  # width of a letter, in the larger font that the style sheet uses on phones
_SERIES = 8  # colours that the style sheet defines
_NOTHING = '<p class="nothing">{}</p>'


@dataclass(frozen=True)
class Series:
    """A line: points in ascending x, each with an optional interval of y. ``style`` numbers its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()
    style: int = 0


@dataclass(frozen=True)
class Axes:
    """Labels and scales."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = field(default_factory=tuple)


def line_chart(series: Sequence[Series], axes: Axes, label: str) -> str:
    """Lines with points and intervals."""
    points = [point for one in series for point in one.points]
    if not points:
        return _NOTHING.format("no figures")
    ys = [y for _, y in points] + [end for one in series for pair in one.intervals for end in pair]
    xs = [x for x, _ in points]
    plot = _Plot(_range(xs, axes.log_x, tight=True), _range(ys, axes.log_y), axes)
    parts = [plot.frame()]
    for one in series:
        colour = f"s{one.style % _SERIES}"
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        for (x, _), (low, high) in zip(one.points, one.intervals, strict=False):
            at = plot.x(x)
            parts.append(f'<line class="whisker {colour}" x1="{at:.1f}" x2="{at:.1f}" y1="{plot.y(low):.1f}" ')
            parts.append(f'y2="{plot.y(high):.1f}"/>')
        for x, y in one.points:
            parts.append(f'<circle class="dot {colour}" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="4">')
            parts.append(f"<title>{escape(one.name)}: {number(y)} at {number(x)}</title></circle>")
    return figure("".join(parts), label) + legend({one.name: one.style for one in series})


def bar_chart(bars: Sequence[tuple[str, float, str]], label: str, one: float | None = None) -> str:
    """Horizontal bars of (name, value, text beside it).

    ``one`` draws a dashed line at that value; texts of shorter bars begin to the right of it, so that it crosses none.
    """
    if not bars:
        return _NOTHING.format("no figures")
    row, top = 30, 6
    name_width = 8 + math.ceil(_LETTER * max(len(name) for name, _, _ in bars))
    text_width = 20 + math.ceil(_LETTER * max(len(text) for _, _, text in bars))
    height = top * 2 + row * len(bars)
    longest = max(value for _, value, _ in bars) or 1.0
    room = max(80, WIDTH - name_width - text_width)
    mark = room * one / longest if one is not None and one <= longest else 0.0
    parts = []
    for at, (name, value, text) in enumerate(bars):
        y = top + at * row
        size = max(1.0, room * value / longest)
        parts.append(f'<text x="{name_width - 8}" y="{y + 20}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="bar s0" x="{name_width}" y="{y + 5}" width="{size:.1f}" height="{row - 10}" rx="3"/>'
        )
        parts.append(f'<text x="{name_width + max(size, mark) + 6:.1f}" y="{y + 20}">{escape(text)}</text>')
    if mark:
        x = name_width + mark
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    return figure("".join(parts), label, height)


def span_chart(spans: Sequence[tuple[str, float, float]], unit: str, label: str) -> str:
    """A timeline: one lane a kind of work, rectangles from start to end."""
    if not spans:
        return _NOTHING.format("nothing was recorded")
    kinds = list(dict.fromkeys(kind for kind, _, _ in spans))
    end = max(stop for _, _, stop in spans)
    left, row = 16 + math.ceil(_LETTER * max(map(len, kinds))), 34  # single words may be of wide letters
    height = row * len(kinds) + 40
    room = WIDTH - left - _RIGHT
    parts = []
    for at, kind in enumerate(kinds):
        y = 6 + at * row
        parts.append(f'<text x="{left - 8}" y="{y + 19}" text-anchor="end">{escape(kind)}</text>')
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{y + 26}" y2="{y + 26}"/>')
        for name, start, stop in spans:
            if name == kind:
                x, size = left + room * start / end, max(0.6, room * (stop - start) / end)
                parts.append(
                    f'<rect class="bar s{at % _SERIES}" x="{x:.2f}" y="{y + 4}" width="{size:.2f}" height="20"/>'
                )
    base = 6 + row * len(kinds)
    for tick in ticks(0.0, end):
        x = left + room * tick / end
        parts.append(f'<text class="small" x="{x:.1f}" y="{base + 14}" text-anchor="middle">{number(tick)}</text>')
    parts.append(
        f'<text class="small" x="{left + room / 2:.0f}" y="{base + 30}" text-anchor="middle">{escape(unit)}</text>'
    )
    return figure("".join(parts), label, height)


def roofline(points: Sequence[tuple[str, float, float, int]], tflops: float, tbs: float, label: str, roof: str) -> str:
    """Achieved TFLOP/s against operations per byte, under both ceilings. Points are (name, intensity, TFLOP/s, style).

    The text ``roof`` stands above the plot, where no point can be.
    """
    if not points:
        return _NOTHING.format("no figures")
    ridge = tflops / tbs
    xs = [x for _, x, _, _ in points] + [ridge / 8, ridge * 8]
    ys = [y for _, _, y, _ in points] + [tflops * 1.3]
    plot = _Plot(_range(xs, True), _range(ys, True), Axes("operations per byte", "TFLOP/s", True, True))
    low, high = plot.x_range
    bottom = plot.y_range[0]
    start = max(low, bottom / tbs)
    corners = [(start, start * tbs), (ridge, tflops), (high, tflops)]
    path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in corners)
    parts = [plot.frame(), f'<polyline class="roof" points="{path}"/>']
    parts.append(f'<text class="small" x="{WIDTH - _RIGHT}" y="{_TOP - 1}" text-anchor="end">{escape(roof)}</text>')
    for name, x, y, style in points:
        parts.append(f'<circle class="dot s{style % _SERIES}" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="5">')
        parts.append(f"<title>{escape(name)}: {number(y)} TFLOP/s at {number(x)} operations per byte</title></circle>")
    return figure("".join(parts), label) + legend({name: style for name, _, _, style in points})


def legend(names: Mapping[str, int]) -> str:
    """Names with their colours."""
    entries = [f'<span><i class="key s{style % _SERIES}"></i>{escape(name)}</span>' for name, style in names.items()]
    return f'<p class="legend">{"".join(entries)}</p>'


def figure(content: str, label: str, height: int = HEIGHT) -> str:
    """An SVG that fits its box."""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">{content}</svg>'


def number(value: float) -> str:
    """Three significant digits, thousands as k and M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values from ``low`` to ``high``."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, int(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    return [f * 10.0**power for power in powers for f in factors if low <= f * 10.0**power <= high]


class _Plot:
    """Maps data coordinates to those of the drawing."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float], axes: Axes) -> None:
        self.x_range, self.y_range, self.axes = x_range, y_range, axes

    def x(self, value: float) -> float:
        share = _share(value, self.x_range, self.axes.log_x)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = _share(value, self.y_range, self.axes.log_y)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def frame(self) -> str:
        axes, parts = self.axes, []
        x_ticks = axes.x_ticks or (log_ticks(*self.x_range) if axes.log_x else ticks(*self.x_range))
        y_ticks = log_ticks(*self.y_range) if axes.log_y else ticks(*self.y_range)
        for tick in y_ticks:
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        base = HEIGHT - _BOTTOM
        below = f'y="{base + 18}" text-anchor="middle"'
        parts += [f'<text x="{self.x(tick):.1f}" {below}>{number(tick)}</text>' for tick in x_ticks]
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(axes.x)}</text>')
        centre = (_TOP + base) / 2
        turned = f'transform="rotate(-90 13 {centre:.0f})"'
        parts.append(f'<text x="13" y="{centre:.0f}" {turned} text-anchor="middle">{escape(axes.y)}</text>')
        return "".join(parts)


def _share(value: float, limits: tuple[float, float], log: bool) -> float:
    low, high = limits
    if log:
        value, low, high = math.log(max(value, 1e-30)), math.log(low), math.log(high)
    return (value - low) / (high - low) if high > low else 0.5


def _range(values: Sequence[float], log: bool, *, tight: bool = False) -> tuple[float, float]:
    """A range with some margin; linear ranges of measured values start at zero."""
    low, high = min(values), max(values)
    if log:
        low, high = max(low, 1e-30), max(high, 1e-30)
        return (low / 1.08, high * 1.08) if tight else (low / 1.3, high * 1.3)
    if tight:
        margin = (high - low) * 0.06 or max(1.0, abs(high)) * 0.2
        return low - margin, high + margin
    return 0.0, high * 1.08 or 1.0

"""The charts of the report: scales, and texts that fit and are crossed by nothing."""

from __future__ import annotations

import re

import pytest
from run_support import Record

from xgr_engine.bench.report.svg import (
    WIDTH,
    Axes,
    Series,
    bar_chart,
    line_chart,
    log_ticks,
    number,
    roofline,
    span_chart,
    ticks,
)
from xgr_engine.bench.report.tables import (
    row_table,
)


def test_axes_have_round_ticks_inside_their_range() -> None:
    for low, high in ((0.0, 7.3), (0.0, 1234.0), (3.0, 3.5)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert log_ticks(9.0, 2100.0) == pytest.approx([10, 20, 50, 100, 200, 500, 1000, 2000])
    assert [number(value) for value in (0.00123, 12.345, 1234.0, 45_600.0, 2.5e6)] == [
        *("0.00123", "12.3", "1,234", "45.6k", "2.5M")
    ]


def test_higher_figures_are_drawn_higher() -> None:
    svg = line_chart([Series("a", [(1.0, 1.0), (2.0, 10.0)])], Axes("x", "y", log_y=True), "label")
    heights = [float(y) for y in re.findall(r'<circle class="dot s0" cx="[\d.]+" cy="([\d.]+)"', svg)]
    assert heights[0] > heights[1]
    assert line_chart([], Axes("x", "y"), "label").startswith("<p")


def _places(svg: str, pattern: str) -> list[float]:
    return [float(place) for place in re.findall(pattern, svg)]


@pytest.mark.parametrize("highest", [0.01, 0.9, 5.0, 5000.0])
def test_no_point_is_drawn_over_the_roofs_label(highest: float) -> None:
    points = [("xgr", 10.0 * step, highest / step, 0) for step in (1, 2, 4)]
    svg = roofline(points, 1.0, 0.02, "label", "1 TFLOP/s measured")
    (label,) = _places(svg, r'y="([\d.]+)" text-anchor="end">1 TFLOP/s measured')
    assert 10 <= label < min(_places(svg, r'cy="([\d.]+)"')) - 5  # the radius; an ascender is less than 10


def test_names_and_texts_of_bars_fit_in_a_phones_font() -> None:
    letter = 10  # digits are wider than the average of 9
    name, text = "xBeam: early termination", "1.05 (wrong)"
    svg = bar_chart([(name, 2.0, text), ("b", 1.0, "2.00")], "label", one=1.0)
    (end,) = _places(svg, rf'<text x="([\d.]+)" y="\d+" text-anchor="end">{name}')
    (start,) = _places(svg, rf'<text x="([\d.]+)" y="\d+">{re.escape(text)}')
    assert end >= 9 * len(name) and start + letter * len(text) <= WIDTH


def test_names_of_a_timelines_lanes_fit_in_a_phones_font() -> None:
    """The longest was cut off at its beginning."""
    svg = span_chart([("head", 0.0, 1.0), ("elementwise", 1.0, 2.0)], "ms", "label")
    (end,) = _places(svg, r'<text x="([\d.]+)" y="\d+" text-anchor="end">elementwise')
    assert end >= 10.2 * len("elementwise")  # wider letters than the average of 9


@pytest.mark.parametrize("value", [0.5, 0.9, 0.98, 1.0, 1.02, 3.0])
def test_the_line_at_one_crosses_no_text(value: float) -> None:
    svg = bar_chart([("a", value, f"{value:.2f} (wrong)"), ("b", 2.0, "2.00")], "label", one=1.0)
    (mark,) = _places(svg, r'class="mark" x1="([\d.]+)"')
    texts = _places(svg, r'<text x="([\d.]+)" y="\d+">')
    assert len(texts) == 2 and min(texts) >= mark + 5


def test_an_interval_stands_where_there_are_samples_for_it(record: Record) -> None:
    """Two samples and what is between them used to stand under 95 %."""
    row = record["rows"][0]
    for samples, shown in ((1, "1 sample"), (2, "2 samples"), (3, "4 to 6")):
        latency = {"p50": {"value": 5.0, "low": 4.0, "high": 6.0}, "p90": None, "p99": None, "samples": samples}
        row["contenders"][0]["latency_ms"] = latency
        table = row_table(row)
        assert table.rows[0][table.columns.index("95 % interval")] == shown

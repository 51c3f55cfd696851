"""A whole small run, its record, its report in a browser, and the comparison of two results."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from xgr_cli.bench_views import show_bench
from xgr_cli.output import Output, show
from xgr_engine.bench.claims import paper_claims
from xgr_engine.bench.compare import compare_files, compare_records, parse_share
from xgr_engine.bench.machine import Ceilings
from xgr_engine.bench.options import BenchOptions
from xgr_engine.bench.record import exceeded, read_record, write_record
from xgr_engine.bench.report.page import page
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
    attention_table,
    claims_table,
    constraint_table,
    online_table,
    row_table,
    shape_of,
)
from xgr_engine.bench.run import Bench, BenchCaller, run_bench
from xgr_engine.bench.workloads import BenchModel
from xgr_engine.errors import InputError, UsageError

Record = dict[str, Any]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt install chromium)")


TINY = BenchOptions(
    geometries=("quick",),
    items=500,
    codes=40,
    levels=3,
    contexts=(8,),
    users=(1,),
    beams=(4,),
    baselines=(),
    ablations=False,
    attention=False,
    timeline=False,
    budget_s=0.01,
)


@functools.cache
def _small_run() -> str:
    options = BenchOptions(
        geometries=("quick",),
        items=2000,
        codes=40,
        levels=3,
        contexts=(8, 17),
        users=(2,),
        beams=(4, 9),
        top_k=None,
        baselines=("paged", "vllm"),
        budget_s=0.02,
        max_repeats=3,
        online=True,
        online_requests=5,
        online_trial_s=0.05,
        online_contenders=("xgr",),
        constraint=True,
        constraint_items=(500, 5000, 10**7),
    )
    kept: list[str] = []
    caller = BenchCaller(("bench", "--items", "2000"), keep=lambda record: kept.append(record["state"]))
    record = run_bench(options, torch.device("cpu"), caller)
    assert kept[-1] == "done"
    assert set(kept[:-1]) == {"running"}
    return json.dumps(record)


@pytest.fixture
def record() -> Record:
    """A record as it comes from a run, as JSON."""
    return dict(json.loads(_small_run()))


def test_run_measures_all_that_was_asked_for(record: Record) -> None:
    assert [(row["context"], row["beam"]) for row in record["rows"]] == [(8, 4), (8, 9), (17, 4), (17, 9)]
    assert record["left_out"] == []
    for row in record["rows"]:
        status = {one["name"]: one["status"] for one in row["contenders"]}
        assert status == {"xgr": "ok", "paged": "ok", "vllm": "not run"}
        for one in row["contenders"][:2]:
            assert one["parity"]["marks"] == []
            assert one["latency_ms"]["p50"]["value"] > 0
            assert one["latency_ms"]["p99"] is None  # three samples have no 99th percentile
    assert record["ceilings"]["tflops"] > 0
    assert record["ceilings"]["tbs"] > 0
    assert set(record["phases"]["ms"]) == {"prefill", "levels", "ranking"}
    assert sum(record["timeline"]["shares"].values()) == pytest.approx(1.0)
    assert {"linear", "selection"} <= set(record["timeline"]["shares"])
    assert [entry["status"] for entry in record["attention"]] == ["ok", "ok"]
    assert record["attention"][0]["relative_difference"] < 1e-4


def test_ablations_name_every_part_and_simulate_none(record: Record) -> None:
    parts = {part["part"]: part for part in record["ablations"]["parts"]}
    assert len(parts) == 9
    assert parts["xAttention"]["status"] == "ok"
    assert parts["shared prefix"]["status"] == "ok"
    for name in ("xBeam: ragged rows", "xSchedule: graph", "xSchedule: streams"):
        assert parts[name]["status"] == "not available"
        assert parts[name]["reason"]
        assert "slower" not in parts[name]
    assert all(part["off"] for part in parts.values())


def test_constraint_agrees_with_the_masked_search(record: Record) -> None:
    sizes = {entry["items"]: entry for entry in record["constraint"]["sizes"]}
    for items in (500, 5000):
        assert sizes[items]["marks"] == []
        assert sizes[items]["overlap"] == 1.0
    assert sizes[10**7]["status"] == "not run"


def test_online_reports_what_it_tried(record: Record) -> None:
    for entry in record["online"]:
        assert entry["status"] == "ok"
        assert entry["trials"] or entry["reason"]
        assert entry["latency_model"]["observed_batches"] > 3
        assert entry["latency_model"]["relative_error"]["p50_abs"] >= 0


def test_a_time_limit_leaves_out_and_says_so() -> None:
    options = BenchOptions(geometries=("quick",), items=500, codes=40, levels=3, budget_s=0.01, time_limit_s=1e-6)
    record = run_bench(options, torch.device("cpu"), BenchCaller())
    assert record["rows"] == []
    assert record["state"] == "failed"  # no row was measured
    assert "time limit" in record["left_out"][0]["reason"]
    assert "Not run" in page(record)


def test_the_timeline_is_of_the_last_model_that_was_measured() -> None:
    """The limit may leave out the models after it; and the profiler, which slows a GPU's launches, comes last."""
    options = replace(TINY, geometries=("quick", "qwen3-4b"), attention=True, timeline=True, time_limit_s=3600.0)
    order: list[str] = []

    def note(text: str) -> None:
        order.append(text)
        if text == "attention":  # the last part of the first model
            bench._started -= 3600.0

    bench = Bench(options, torch.device("cpu"), BenchCaller(note=note))
    record = bench.run()
    assert [part["part"] for part in record["left_out"]] == ["model qwen3-4b"]
    assert record["phases"]["model"] == record["timeline"]["model"] == "quick"
    assert order[-1] == "timeline"


# ---- the page -------------------------------------------------------------------------------------------------------


def test_page_needs_nothing_from_outside(record: Record) -> None:
    html = page(record)
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|https?://|\bsrc=|\bhref=", html)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    memory = "Extra memory"
    for text in ("Latency against width", "Throughput against context", f"{memory} against width"):
        assert text in html
    for text in (
        "Roofline",
        "Ablations",
        "One part switched off at a time",
        "Timeline of one batch",
        "Machine, versions, command",
        "xgr bench --items 2000",
    ):
        assert text in html
    assert html.count("<svg") >= 9
    assert "rounding cannot lose" in html
    assert "prediction error" in html
    assert "vllm needs a CUDA GPU" in html


def test_page_escapes_what_it_is_given(record: Record) -> None:
    nasty = "<b>&\"'"
    record["command"] = ["xgr", nasty]
    record["warnings"] = [nasty]
    for row in record["rows"]:
        row["model"] = nasty
    html = page(record)
    assert nasty not in html
    assert escape(nasty) in html


def test_page_marks_wrong_answers_and_missing_memory(record: Record) -> None:
    paged = record["rows"][0]["contenders"][1]
    paged["parity"] |= {"marks": ["2 invalid"], "invalid": 2}
    record["rows"][1]["contenders"][1] = {"name": "paged", "what": "", "status": "out of memory", "reason": ""}
    html = page(record)
    assert "<td class=bad>WRONG</td>" in html
    assert '<p class="bad">paged WRONG: 2 invalid</p>' in html
    assert "answers of paged WRONG" in html  # beside the headline's ratio
    assert "<td class=bad>out of memory</td>" in html


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_the_screen_in_a_browser(record: Record, tmp_path: Path, width: int) -> None:
    """Nothing is wider than a phone, nothing is fetched, every chart has a size."""
    inside = escape(page(record), quote=True)
    probe = f"""<body><iframe id=f width={width} height=800 srcdoc="{inside}"></iframe><script>
onload = () => {{ const d = f.contentDocument, w = f.contentWindow;
const sizes = [...d.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(r => Math.min(r.width, r.height));
document.body.innerHTML = '<pre>' + JSON.stringify([d.documentElement.scrollWidth, w.innerWidth,
w.performance.getEntriesByType('resource').length, sizes.length, Math.min(...sizes)]) + '</pre>'; }};</script>"""
    file = tmp_path / "probe.html"
    file.write_text(probe, encoding="utf-8")
    dom = _chromium(tmp_path, "--virtual-time-budget=3000", "--dump-dom", file.as_uri())
    found = re.search(r"<pre>(\[.*?\])</pre>", dom)
    assert found, dom[-500:]
    scroll, inner, fetched, charts, smallest = json.loads(found.group(1))
    assert scroll <= inner <= width
    assert fetched == 0
    assert charts >= 9
    assert smallest > 30


def _chromium(folder: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


# ---- charts ---------------------------------------------------------------------------------------------------------


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


def test_decode_attention_of_plain_torch_says_so_and_flashinfers_columns_need_figures(record: Record) -> None:
    table = attention_table(record["attention"])
    assert table.columns[4:] == ("paged / xgr", "kernels", "output difference") and "plain torch" in table.notes[0]
    (entry, *_), known = record["attention"], {"flashinfer_paged_ms": 2.0, "paged_against_flashinfer": 1.5}
    table = attention_table([entry | {"kernels": "triton"}, entry | known | {"kernels": "triton"}])
    assert table.columns[5:7] == ("FlashInfer's ms", "paged / FlashInfer's") and table.notes == ()
    assert [row[5:7] for row in table.rows] == [[None, "-"], [2.0, "1.50, more than 1.3"]]


def test_an_interval_stands_where_there_are_samples_for_it(record: Record) -> None:
    """Two samples and what is between them used to stand under 95 %."""
    row = record["rows"][0]
    for samples, shown in ((1, "1 sample"), (2, "2 samples"), (3, "4 to 6")):
        latency = {"p50": {"value": 5.0, "low": 4.0, "high": 6.0}, "p90": None, "p99": None, "samples": samples}
        row["contenders"][0]["latency_ms"] = latency
        table = row_table(row)
        assert table.rows[0][table.columns.index("95 % interval")] == shown


# ---- disturbed ceilings ---------------------------------------------------------------------------------------------


def test_rows_above_a_ceiling_are_warned_of(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    record["ceilings"] |= {"tflops": 1e6, "tbs": 1e6}
    assert exceeded(record["ceilings"], record["rows"]) == []
    row_table(record["rows"][0], record["ceilings"])
    assert "percentages of it mean nothing" not in page(record) and "exceeded: too low" not in page(record)
    record["rows"][0]["contenders"][0]["tflops"] = 2e6
    (text,) = exceeded(record["ceilings"], record["rows"])
    assert text.startswith("the measured ceiling of 1e+06 TFLOP/s is too low, xgr reached up to 2e+06: ")
    assert "was disturbed; percentages of it mean nothing" in text
    assert text in row_table(record["rows"][0], record["ceilings"]).notes
    assert text not in row_table(record["rows"][1], record["ceilings"]).notes
    assert text in page(record) and "measured, and exceeded: too low" in page(record)
    record["warnings"] = []
    show_bench(Output(), record)
    assert "percentages of it mean nothing" in " ".join(capsys.readouterr().out.split())


def test_a_run_with_disturbed_ceilings_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Ceilings(tflops=1e-9, tbs=1e-9, matmul="product", copy="copy")
    monkeypatch.setattr("xgr_engine.bench.run.measure_ceilings", lambda *_: low)
    record = run_bench(TINY, torch.device("cpu"), BenchCaller())
    flops, data = (text for text in record["warnings"] if "mean nothing" in text)
    assert "1e-09 TFLOP/s is too low, xgr reached" in flops and "1e-09 TB/s is too low, xgr reached" in data


def test_a_record_says_in_which_dtype_it_ran(record: Record) -> None:
    assert BenchOptions().dtype == "bfloat16"
    assert record["options"]["dtype"] == record["rows"][0]["dtype"] == "float32"


def test_the_dtype_is_that_of_the_model_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(replace(TINY, rows=False, attention=True), torch.device("cpu"), BenchCaller())
    assert bench.record["options"]["dtype"] == "float32"  # of a run that loads none
    monkeypatch.setattr(BenchModel, "dtype", property(lambda model: "float16"))
    assert bench.run()["options"]["dtype"] == "float16"


def test_contenders_that_were_not_measured_online_are_named(record: Record) -> None:
    options = record["options"] | {"preset": "quick"}
    assert "not measured online in preset quick: paged, vllm" in online_table(record["online"], options).notes
    assert "not measured online: paged, vllm" in page(record)
    options["online_contenders"] = ["xgr", "paged", "vllm"]
    assert not [note for note in online_table(record["online"], options).notes if "not measured online" in note]


# ---- comparison -----------------------------------------------------------------------------------------------------


def _slower(record: Record, factor: float) -> Record:
    record["rows"][0]["contenders"][0]["latency_ms"]["samples"] = 3  # else no figure is a regression
    changed = copy.deepcopy(record)
    for figure in ("latency_ms",):
        p50 = changed["rows"][0]["contenders"][0][figure]["p50"]
        for name in ("value", "low", "high"):
            p50[name] *= factor
    return changed


def test_compare_flags_only_what_got_worse_beyond_the_limit(record: Record) -> None:
    p50 = record["rows"][0]["contenders"][0]["latency_ms"]["p50"]
    p50["low"], p50["high"] = p50["value"] * 0.99, p50["value"] * 1.01
    assert compare_records(record, record, 0.05)["regressions"] == []
    worse = compare_records(record, _slower(record, 1.2), 0.05)["regressions"]
    assert [(row["contender"], row["figure"]) for row in worse] == [("xgr", "latency p50, ms")]
    assert worse[0]["ratio"] == pytest.approx(1.2)
    assert compare_records(record, _slower(record, 0.5), 0.05)["regressions"] == []
    assert compare_records(record, _slower(record, 1.2), 0.5)["regressions"] == []
    assert compare_records(record, _slower(record, 1.2), None)["regressions"] == []


def test_compare_takes_noise_for_noise(record: Record) -> None:
    p50 = record["rows"][0]["contenders"][0]["latency_ms"]["p50"]
    p50["low"], p50["high"] = p50["value"] * 0.5, p50["value"] * 2
    assert compare_records(record, _slower(record, 1.2), 0.05)["regressions"] == []


def test_compare_flags_lost_contenders_and_wrong_answers(record: Record) -> None:
    gone, wrong = copy.deepcopy(record), copy.deepcopy(record)
    gone["rows"][0]["contenders"][0] = {"name": "xgr", "what": "", "status": "out of memory", "reason": ""}
    wrong["rows"][0]["contenders"][0]["parity"]["marks"] = ["1 invalid"]
    assert [row["figure"] for row in compare_records(record, gone, 0.05)["regressions"]] == ["status"]
    assert [row["figure"] for row in compare_records(record, wrong, 0.05)["regressions"]] == ["answers"]


def test_compare_looks_at_online_rates_under_the_same_limit(record: Record) -> None:
    record["online"] = record["online"][:1]
    record["online"][0] |= {"rate": 100.0, "status": "ok", "reason": ""}  # whatever this machine reached
    slower, gone, other = (copy.deepcopy(record) for _ in range(3))
    slower["online"][0]["rate"] = 80.0
    gone["online"][0]["rate"] = None
    other["online"][0]["rate"], other["options"]["slo_ms"] = 10.0, 50.0
    for changed in (slower, gone):
        worse = compare_records(record, changed, 0.05)["regressions"]
        assert [row["figure"] for row in worse] == ["online users/s"]
        assert compare_records(changed, record, 0.05)["regressions"] == []
    assert compare_records(record, slower, 0.3)["regressions"] == []
    assert compare_records(record, other, 0.05)["regressions"] == []


def test_compare_needs_rows_in_common(record: Record) -> None:
    other = {**copy.deepcopy(record), "attention": [], "online": [], "constraint": None}
    other["options"] |= {"beams": [5, 10], "constraint": False}
    for row in other["rows"]:
        row["beam"] += 1
    with pytest.raises(InputError, match="no row in common"):
        compare_records(record, other, 0.05)
    assert parse_share("5%") == parse_share("0.05") == 0.05
    with pytest.raises(UsageError):
        parse_share("fast")


def test_records_survive_the_disk_and_foreign_files_are_refused(record: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "deep" / "a.json", record)
    assert read_record(tmp_path / "deep" / "a.json")["rows"] == record["rows"]
    (tmp_path / "b.json").write_text('{"kind": "manifest"}')
    (tmp_path / "c.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("b.json", "c.json", "deep.json", "absent.json"):
        with pytest.raises(InputError):
            read_record(tmp_path / name)
    whole = tmp_path / "deep" / "a.json"
    row = {**record["rows"][0], "contenders": [{"name": "xgr"}]}
    for broken in ({}, {"rows": None}, {"rows": [{"model": "x"}]}, {**record, "rows": [row]}, {**record, "online": 1}):
        write_record(tmp_path / "broken.json", {"kind": "bench", **broken})
        for pair in ((tmp_path / "broken.json", whole), (whole, tmp_path / "broken.json")):
            with pytest.raises(InputError, match=r"broken\.json: fields of"):
                compare_files(*pair, None)


# ---- the command ----------------------------------------------------------------------------------------------------


def _xgr(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xgr_cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_command_writes_json_and_report(tmp_path: Path) -> None:
    sizes = ["--items", "300", "--codes", "20x2", "--context", "6", "--users", "1", "--beam", "3", "--budget", "0.02"]
    html, out = tmp_path / "r.html", tmp_path / "r.json"
    choice = ["--geometry", "quick", "--baselines", "none", "--no-ablations"]
    done = _xgr("bench", *sizes, *choice, "--html", str(html), "--out", str(out), "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema_version"] == 1
    assert result["rows"] == read_record(out)["rows"]
    assert result["rows"][0]["top_k"] == 3
    assert html.read_text("utf-8").startswith("<!doctype html>")


def test_compare_command_exits_1_on_a_regression(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p50 = record["rows"][0]["contenders"][0]["latency_ms"]["p50"]
    p50["low"], p50["high"] = p50["value"] * 0.99, p50["value"] * 1.01
    for name, factor in (("a", 1.0), ("b", 1.5)):
        write_record(tmp_path / f"{name}.json", _slower(record, factor))
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert _xgr("bench", "compare", a, b, "--fail-over", "5%").returncode == 1
    assert _xgr("bench", "compare", a, b).returncode == 0
    assert _xgr("bench", "compare", a, a, "--fail-over", "5%").returncode == 0
    assert _xgr("bench", "compare", a).returncode == 2
    for option, value in (("--html", tmp_path / "c.html"), ("--out", tmp_path / "c.json"), ("--beam", "4")):
        done = _xgr("bench", "compare", a, b, option, str(value))
        assert done.returncode == 2 and f"{option} does not belong to xgr bench compare" in done.stderr
    monkeypatch.setenv("XGR_BENCH_OUT", str(tmp_path / "c.json"))  # for runs; nobody asked for it here
    assert _xgr("bench", "compare", a, a, "--json", "-q").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    assert _xgr("bench", "frobnicate").returncode == 2


def _begun(tmp_path: Path, out: Path, *arguments: str, program: str = "") -> subprocess.Popen[str]:
    """A run with hours to go, whose first row stands in its file."""
    sizes = ["--items", "300", "--codes", "20x2", "--context", "6", "--users", "1,2", "--beam", "3", "--budget", "0.02"]
    choice = ["--geometry", "quick", "--baselines", "none", "--no-ablations", "--device", "cpu", "--time-limit", "9999"]
    (tmp_path / "temp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program or _SECOND_ROW_HANGS, "bench", *sizes, *choice, "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "temp")},
    )
    deadline = time.monotonic() + 120
    while not out.exists() or not read_record(out)["rows"]:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    return process


# the second row hangs in an engine of another process, which has a checkpoint
_SECOND_ROW_HANGS = """
import sys
from xgr_engine.bench.row import Row
from xgr_engine.bench.foreign import process

def measure(row, first=Row.measure):
    if row.workload.users == 1:
        return first(row)
    process.new_folder().joinpath("model.safetensors").write_text("weights")
    process.Process(sys.executable, "sleeper", {})

process.subprocess.Popen = lambda command, popen=process.subprocess.Popen, **more: popen(
    [sys.executable, "-c", "import time, os; print(os.getpid(), file=open(os.environ['TMPDIR'] + '.pid', 'w')); "
     "time.sleep(600)"], **more)
Row.measure = measure
from xgr_cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_stopped_run_keeps_what_it_measured_and_says_so(tmp_path: Path, number: signal.Signals, code: int) -> None:
    out = tmp_path / "r.json"
    process = _begun(tmp_path, out, "--json", "-q", "--html", str(tmp_path / "r.html"))
    assert read_record(out)["state"] == "running"
    child = tmp_path / "temp.pid"
    while not (child.exists() and child.read_text()):
        time.sleep(0.1)
    begin = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert time.monotonic() - begin < 15.0
    assert len(stderr.splitlines()) == 1 and f"stopped by {number.name} after" in stderr
    assert "1 of 2 rows measured" in stderr and str(out) in stderr and "6 tokens x 2 users x W 3" in stderr
    record = read_record(out)
    assert record["state"] == json.loads(stdout)["state"] == "interrupted"
    assert len(record["rows"]) == 1 and record["stopped"]["by"] == number.name
    assert "stopped by" in (tmp_path / "r.html").read_text("utf-8")
    assert not list((tmp_path / "temp").iterdir()), "no checkpoint is left"
    status = Path("/proc") / child.read_text().strip() / "stat"
    assert not status.exists() or ") Z" in status.read_text(), "no engine is left"


def test_a_run_that_does_not_listen_is_ended_by_a_second_signal(tmp_path: Path) -> None:
    """A library's call of minutes, in which no handler of Python runs: the record and the checkpoint are seen to."""
    deaf = (
        "import ctypes, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
        "open(process.os.environ['TMPDIR'] + '.pid', 'w').write('0'); ctypes.CDLL(None).sleep(600)"
    )
    out = tmp_path / "r.json"
    program = _SECOND_ROW_HANGS.replace('process.Process(sys.executable, "sleeper", {})', deaf)
    process = _begun(tmp_path, out, "-q", program=program)
    while not (tmp_path / "temp.pid").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None and "again to stop at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    process.communicate()
    assert read_record(out)["state"] == "interrupted" and not list((tmp_path / "temp").iterdir())


def test_a_run_that_is_stopped_at_once_says_so(tmp_path: Path) -> None:
    program = "import os, signal, sys\nfrom xgr_engine.bench import choices\n"
    program += "choices.open_device = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
    program += "from xgr_cli.main import main\nmain()"
    done = subprocess.run([sys.executable, "-c", program, "bench"], capture_output=True, text=True, check=False)
    assert done.returncode == 143 and "stopped by SIGTERM: nothing was measured yet" in done.stderr


def test_a_report_that_cannot_be_written_stops_the_command_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option, place in (("--html", tmp_path), ("--out", tmp_path / "file" / "a.json"), ("--html", "/proc/a/b.html")):
        done = _xgr("bench", option, str(place))
        assert done.returncode == 2 and f"error: {option} {place}" in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_very_narrow_terminal_loses_no_value(
    record: Record, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    record["warnings"] = ["somebody else was busy"]
    show_bench(Output(), record)
    text = capsys.readouterr().out
    for value in ("xgr bench --items 2000", "somebody else was busy", f"{record['machine']['cores']} cores"):
        assert value in text


def test_one_user_is_no_plural(record: Record) -> None:
    assert shape_of({"model": "m", "context": 4, "users": 1, "beam": 2}) == "m, 4 tokens x 1 user, W 2"
    record["constraint"]["users"] = 1
    assert constraint_table(record["constraint"]).title.startswith("The constraint alone: 1 user, ")


def test_text_never_folds_a_number_and_shows_what_the_page_shows(
    record: Record, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record["warnings"] = ["somebody else was busy"]
    record["rows"][0]["contenders"][1]["parity"] |= {"marks": ["2 invalid"], "invalid": 2}
    for width in ("60", "100", "200"):
        monkeypatch.setenv("COLUMNS", width)
        show_bench(Output(), record)
        text = capsys.readouterr().out
        p50 = show(record["rows"][0]["contenders"][0]["latency_ms"]["p50"]["value"])
        assert re.search(rf"xgr +{re.escape(p50)} ", text)
        assert "paged WRONG: 2 invalid" in text
        assert "somebody else was busy" in text
        assert "not available" in text


def test_claims_name_figures_and_who_is_better() -> None:
    def contender(name: str, ms: float, gigabytes: float) -> Record:
        estimate = {"value": ms}
        return {
            "name": name,
            "status": "ok",
            "latency_ms": {"p50": estimate},
            "device_peak_bytes": gigabytes * 1e9,
            "host_own_bytes": 0,
        }

    def row(beam: int, *contenders: Record) -> Record:
        return {"model": "m", "context": 1000, "users": 4, "beam": beam, "contenders": list(contenders)}

    oom = {"name": "hf", "status": "out of memory"}
    online = {"model": "m", "context": 1000, "beam": 512, "status": "ok"}
    record = {
        "rows": [
            row(128, contender("xgr", 10.0, 8), contender("paged", 20.0, 9), contender("hf", 500.0, 40)),
            row(512, contender("xgr", 15.0, 10), contender("paged", 80.0, 45), oom),
        ],
        "attention": [
            {**row(512), "status": "ok", "kernels": "triton", "xgr_ms": 0.1, "paged_ms": 0.5},
            {**row(512), "status": "ok", "kernels": "reference", "xgr_ms": 1.0, "paged_ms": 5.0},
        ],
        "online": [
            {**online, "contender": "xgr", "rate": 90.0, "reason": ""},
            {**online, "contender": "paged", "rate": None, "reason": "one user takes 300 ms"},
        ],
        "options": {"slo_ms": 200.0},
    }
    claims = {claim["claim"]: claim for claim in paper_claims(record)}
    assert len(claims) == 4
    memory = claims["device memory at W 512"]
    assert memory["values"] == {"xgr": 10.0, "paged": 45.0, "hf": "out of memory"}
    assert memory["better"] == {"paged": 4.5}
    growth = claims["latency at W 512 over that at W 128"]
    assert growth["values"] == {"xgr": 1.5, "paged": 4.0, "hf": "out of memory"}
    assert growth["better"]["paged"] == pytest.approx(4 / 1.5)
    assert claims["decode attention of a layer"]["better"] == {"paged": 5.0}
    assert claims["throughput with P99 <= 200 ms"]["values"] == {"xgr": 90.0, "paged": "one user takes 300 ms"}
    table = claims_table(list(claims.values()))
    assert table.columns == ("claim", "where", "the paper says", "xgr", "paged", "hf")
    assert table.rows[0][3:] == ["10 GB", "45 GB (4.50)", "out of memory"]

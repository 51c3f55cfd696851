"""The report of a run: the page, also in a browser, and the text on the terminal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
from run_support import Record

from xgr_cli.bench_views import show_bench
from xgr_cli.output import Output, show
from xgr_engine.bench.claims import paper_claims
from xgr_engine.bench.report.page import page
from xgr_engine.bench.report.tables import (
    attention_table,
    claims_table,
    constraint_table,
    shape_of,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt install chromium)")


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


def test_decode_attention_of_plain_torch_says_so_and_flashinfers_columns_need_figures(record: Record) -> None:
    table = attention_table(record["attention"])
    assert table.columns[4:] == ("paged / xgr", "kernels", "output difference") and "plain torch" in table.notes[0]
    (entry, *_), known = record["attention"], {"flashinfer_paged_ms": 2.0, "paged_against_flashinfer": 1.5}
    table = attention_table([entry | {"kernels": "triton"}, entry | known | {"kernels": "triton"}])
    assert table.columns[5:7] == ("FlashInfer's ms", "paged / FlashInfer's") and table.notes == ()
    assert [row[5:7] for row in table.rows] == [[None, "-"], [2.0, "1.50, more than 1.3"]]


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

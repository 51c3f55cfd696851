"""What a comparison of two results lets through, what it does not, and which files it refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_support import CPU
from compare_support import LIMIT, Record, estimate, whole_record
from job_support import make_model, make_vocabulary

from xgr_cli.bench_views import show_comparison
from xgr_cli.output import Output
from xgr_engine.bench.choices import choose_options
from xgr_engine.bench.compare import compare_files, compare_records, parse_share
from xgr_engine.bench.options import BenchWishes
from xgr_engine.bench.run import BenchCaller, run_bench
from xgr_engine.errors import InputError, UsageError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def _of_samples(record: Record, count: int, factor: float = 1.0) -> Record:
    """``record`` with so many samples in its first entry, which is slower by the factor."""
    record = copy.deepcopy(record)
    one = record["rows"][0]["contenders"][0]
    one["latency_ms"] |= {"samples": count, "p50": estimate(10.0 * factor)}
    one |= {"users_per_s": estimate(200 / factor), "users_per_s_from": "median latency"}
    if count == 1:
        for figure in (one["latency_ms"]["p50"], one["users_per_s"]):
            figure |= dict.fromkeys(("low", "high"), figure["value"])
    return record


@pytest.fixture
def record() -> Record:
    return whole_record()


def _worse(before: Record, after: Record) -> list[tuple[str, str, str, Any]]:
    lines = compare_records(before, after, LIMIT)["regressions"]
    return [(line["row"], line["contender"], line["figure"], line["after"]) for line in lines]


def _static(record: Record) -> Record:
    """As ``--preset static`` leaves it."""
    record["options"] |= {"rows": False, "attention": False, "online": False}
    return record | {"rows": [], "attention": [], "online": []}


def test_a_row_that_vanished_is_a_regression(record: Record) -> None:
    after = copy.deepcopy(record)
    del after["rows"][1]
    after["left_out"] = [{"part": "quick, 16 tokens x 2 users x W 16", "reason": "out of memory"}]
    row = "quick, 16 x 2 x W 16"
    assert _worse(record, after) == [(row, "xgr", "status", "missing"), (row, "paged", "status", "missing")]
    assert compare_records(record, after, LIMIT)["left_out"] == ["quick, 16 tokens x 2 users x W 16: out of memory"]
    assert compare_records(record, after, None)["regressions"] == []
    assert _worse(after, record) == []


def test_a_record_with_no_row_left_is_a_regression_and_no_wrong_input(record: Record) -> None:
    after = {**copy.deepcopy(record), "rows": [], "online": [], "attention": [], "constraint": None}
    worse = _worse(record, after)
    assert len(worse) == 4 + 1 + 2 + 4
    assert {figure for _, _, figure, _ in worse} == {"status"}


def test_a_contender_that_vanished_is_a_regression(record: Record) -> None:
    after = copy.deepcopy(record)
    del after["rows"][0]["contenders"][0]
    assert _worse(record, after) == [("quick, 16 x 2 x W 8", "xgr", "status", "missing")]


@pytest.mark.parametrize("part", ["online", "attention"])
def test_a_part_that_failed_is_a_regression(record: Record, part: str) -> None:
    after = {**copy.deepcopy(record), part: []}
    assert {figure for _, _, figure, _ in _worse(record, after)} == {"status"}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"baselines": [], "attention": False}, lambda name, row: name == "xgr"),
        ({"beams": [8], "attention": False, "online": False, "constraint": False}, lambda name, row: row["beam"] == 8),
    ],
    ids=["contenders", "widths"],
)
def test_what_was_not_asked_for_again_is_no_regression(
    record: Record, options: Record, kept: Callable[[str, Record], bool]
) -> None:
    after = copy.deepcopy(record)
    after["options"] |= options
    for row in after["rows"]:
        row["contenders"] = [one for one in row["contenders"] if kept(one["name"], row)]
    for part in ("attention", "online", "constraint"):
        if options.get(part) is False:
            after[part] = None if part == "constraint" else []
    compared = compare_records(record, after, LIMIT)
    assert compared["regressions"] == []
    assert compared["only_before"]


@pytest.mark.parametrize("value", [0, None, float("nan")])
def test_a_figure_that_is_gone_is_a_regression(record: Record, value: float | None) -> None:
    after = copy.deepcopy(record)
    after["rows"][0]["contenders"][0]["users_per_s"] |= {"value": value}
    assert _worse(record, after) == [("quick, 16 x 2 x W 8", "xgr", "users/s", None)]
    after["rows"][0]["contenders"][0]["users_per_s"] = None
    assert _worse(record, after) == [("quick, 16 x 2 x W 8", "xgr", "users/s", None)]


@pytest.mark.parametrize("few", [1, 2])
def test_a_figure_of_too_few_samples_is_shown_and_not_counted(
    record: Record, few: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["latency p50, ms", "users/s"]
    for before, after in ((few, few), (few, 3), (3, few)):
        pair = _of_samples(record, before), _of_samples(record, after, 1.2)
        compared = compare_records(*pair, LIMIT)
        assert compared["regressions"] == []
        assert [line["figure"] for line in compared["not_counted"]] == names
        assert compare_records(*pair, None)["not_counted"] == []
    monkeypatch.setenv("COLUMNS", "200")
    show_comparison(Output(), compared)
    text = capsys.readouterr().out
    assert "not counted" in text and "2 figure(s) got worse, but come from fewer than 3 samples" in text
    assert "WORSE" not in text and "0 regression(s)" in text
    enough = compare_records(_of_samples(record, 3), _of_samples(record, 3, 1.2), LIMIT)
    assert [line["figure"] for line in enough["regressions"]] == names and enough["not_counted"] == []


def test_a_rate_of_a_search_that_was_cut_short_is_not_counted(record: Record) -> None:
    after = copy.deepcopy(record)
    after["online"][0] |= {"rate": 50.0, "reason": ""}
    assert _worse(record, after) == [("quick, 16 tokens, W 16", "xgr", "online users/s", 50.0)]
    after["online"][0]["reason"] = "the time limit ended the search"
    compared = compare_records(record, after, LIMIT)
    assert compared["regressions"] == []
    assert [line["figure"] for line in compared["not_counted"]] == ["online users/s"]


def test_the_rate_of_batches_in_flight_has_rounds_of_its_own(record: Record) -> None:
    before, after = _of_samples(record, 2), _of_samples(record, 2, 1.2)
    for one in (before, after):
        one["rows"][0]["contenders"][0]["users_per_s_from"] = "batches in flight"
    assert [figure for _, _, figure, _ in _worse(before, after)] == ["users/s"]
    after["rows"][0]["contenders"][0]["users_per_s"] |= {"low": 1.0, "high": 1.0, "value": 1.0}  # of one round
    assert _worse(before, after) == []


def test_warnings_of_both_runs_are_repeated(record: Record) -> None:
    before = record | {"warnings": ["other programs kept 0.5 of 2 CPU cores busy"]}
    after = record | {"warnings": ["the GPU lowered its clocks: heat"]}
    assert compare_records(before, after, LIMIT, ("a.json", "b.json"))["warnings"] == [
        "a.json: other programs kept 0.5 of 2 CPU cores busy",
        "b.json: the GPU lowered its clocks: heat",
    ]


@pytest.mark.parametrize("text", ["5", "1", "1.0", "500"])
def test_a_share_of_one_or_more_needs_the_percent_sign(text: str) -> None:
    with pytest.raises(UsageError, match=f"--fail-over {text}: would be {float(text):.0%}") as raised:
        parse_share(text)
    assert "5%" in raised.value.hint and "0.05" in raised.value.hint
    assert (parse_share("150%"), parse_share("0.99"), parse_share("0")) == (1.5, 0.99, 0.0)


def test_memory_is_compared_without_a_gpu(record: Record) -> None:
    after = copy.deepcopy(record)
    after["rows"][0]["contenders"][0]["host_own_bytes"] *= 100
    assert _worse(record, after) == [("quick, 16 x 2 x W 8", "xgr", "memory on top, bytes", 5e8)]
    after["rows"][0]["contenders"][0]["host_own_bytes"] = 9_000_000  # what an allocator has at hand
    assert _worse(record, after) == []


def test_memory_of_a_gpu_is_compared_to_the_limit(record: Record) -> None:
    record["machine"]["device"] = "cuda:0"
    for row in record["rows"]:
        for one in row["contenders"]:
            one["device_peak_bytes"] = 10_000_000
    after = copy.deepcopy(record)
    after["rows"][0]["contenders"][0] |= {"device_peak_bytes": 11_000_000, "host_own_bytes": 5 * 10**9}
    assert _worse(record, after) == [("quick, 16 x 2 x W 8", "xgr", "device memory, bytes", 11e6)]


def test_static_records_are_compared_by_the_number_of_items(record: Record) -> None:
    before = _static(record)
    after = copy.deepcopy(before)
    assert [line["ratio"] for line in compare_records(before, after, LIMIT)["rows"]] == [1.0] * 8
    after["constraint"]["sizes"][1] |= {"xgr_ms": 3.0, "constraint_ms": 2.0}
    row = "constraint, 1,000 items x 2 x W 16"
    assert _worse(before, after) == [(row, "xgr", "search, ms", 3.0), (row, "xgr", "constraint, ms", 2.0)]
    after["constraint"]["sizes"][1] = {"items": 1000, "status": "ok", "xgr_ms": 2.0, "masked_ms": None}
    after["constraint"]["sizes"][1]["masked"] = "out of memory"
    assert (row, "masked", "status", "out of memory") in _worse(before, after)
    del after["constraint"]["sizes"][1]
    assert _worse(before, after) == [(row, "xgr", "status", "missing"), (row, "masked", "status", "missing")]


def test_a_constraint_lost_in_the_noise_is_no_regression(record: Record) -> None:
    """It is the difference of two times that are close; the whole search is compared as well."""
    before = _static(record)
    for lost in (None, 1e-6):
        after = copy.deepcopy(before)
        after["constraint"]["sizes"][0]["constraint_ms"] = lost
        assert _worse(before, after) == _worse(after, before) == []


def test_attention_is_compared(record: Record) -> None:
    after = copy.deepcopy(record)
    after["attention"][0]["xgr_ms"] = 1.2
    assert _worse(record, after) == [("quick, 16 x 2 x W 16", "xgr", "attention a layer, ms", 1.2)]


def test_unfinished_records_and_rates_under_other_limits_are_warned_of(record: Record) -> None:
    after = copy.deepcopy(record)
    after["state"], after["options"]["slo_ms"] = "running", 50.0
    unfinished, rates = compare_records(record, after, LIMIT)["warnings"]
    assert "the second" in unfinished and "running" in unfinished
    assert "--slo-ms 200 and --slo-ms 50" in rates
    assert compare_records(record, record, LIMIT)["warnings"] == []


def _converted(record: Record, path: str, model: str | None, catalog: str = "sha256:c") -> Record:
    """``record`` as of ``--model path``."""
    record = copy.deepcopy(record)
    record["options"] |= {"geometries": [], "model": path, "vocab": f"{path}-vocab", "constraint": False}
    record["constraint"] = None
    for entry in (*record["rows"], *record["online"], *record["attention"]):
        entry["model"] = path
    for row in record["rows"]:
        row["catalog"] = f"{path}-vocab: 500 items"
    if model is not None:  # else as records were before there were fingerprints
        record["subject"] = {"model_fingerprint": model, "catalog_hash": catalog}
    return record


def test_models_match_by_content_not_by_path(record: Record) -> None:
    here, there = _converted(record, "../model", "f1"), _converted(record, "../../w/model", "f1")
    compared = compare_records(here, there, LIMIT)
    assert compared["only_before"] == compared["only_after"] == []
    assert {line["ratio"] for line in compared["rows"]} == {1.0}
    there["rows"].pop()
    assert {figure for _, _, figure, _ in _worse(here, there)} == {"status"}
    for other in (_converted(record, "../model", "f2"), _converted(record, "../model", "f1", "sha256:d")):
        after = {**other, "attention": []}  # which knows no catalog
        with pytest.raises(InputError, match="no row in common"):
            compare_records(here, after, LIMIT)


def test_records_without_fingerprints_match_by_name(record: Record) -> None:
    old, new = _converted(record, "model", None), _converted(record, "model", "f1")
    for before, after in ((old, new), (new, old), (old, old)):
        assert {line["ratio"] for line in compare_records(before, after, LIMIT)["rows"]} == {1.0}
    with pytest.raises(InputError, match="no row in common"):
        compare_records(old, _converted(record, "elsewhere", "f1"), LIMIT)


def test_catalogs_of_other_codes_are_others(record: Record) -> None:
    after = {**copy.deepcopy(record), "attention": [], "constraint": None}
    after["options"] |= {"codes": 64, "constraint": False, "attention": False}
    for row in after["rows"]:
        row["catalog"] = "500 items, 64x3 codes"
    with pytest.raises(InputError, match="no row in common"):
        compare_records(record, after, LIMIT)


def test_a_run_records_what_its_model_and_catalog_are(tmp_path: Path) -> None:
    model, vocab = make_model(tmp_path / "model", max_context=128), make_vocabulary(tmp_path / "vocab")
    wishes = BenchWishes(
        model=str(model), vocab=str(vocab), context="8", users="1", beam="4", baselines="none", budget_s=0.01
    )
    record = json.loads(json.dumps(run_bench(choose_options(CPU, wishes), CPU, BenchCaller())))
    described = json.loads((model / "xgr.json").read_text())
    catalog = json.loads((vocab / "vocab.json").read_text())
    assert record["subject"] == {
        "model_fingerprint": described["fingerprint"],
        "catalog_hash": catalog["content_hash"],
    }
    there = json.loads(json.dumps(record).replace(str(tmp_path), "/elsewhere"))
    assert there["rows"][0]["model"] != record["rows"][0]["model"]
    compared = compare_records(record, there, LIMIT)
    assert compared["rows"] and compared["only_before"] == compared["only_after"] == []


def test_committed_results_stay_comparable() -> None:
    count = 0
    for path in sorted(RESULTS.glob("*.json")):
        if json.loads(path.read_text()).get("kind") == "bench":
            compared = compare_files(path, path, LIMIT)
            assert compared["rows"] and compared["regressions"] == [], path
            assert {line["ratio"] for line in compared["rows"]} == {1.0}
            count += 1
    assert count >= 9

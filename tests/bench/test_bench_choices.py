"""Options that would mean nothing: refused where they were typed, left out where they were only configured."""

from __future__ import annotations

from typing import Any

import pytest
from bench_support import CPU

from xgr_engine.bench.choices import choose_options
from xgr_engine.bench.options import BenchOptions, BenchWishes
from xgr_engine.errors import UsageError

REAL = {"model": "m", "vocab": "v"}


@pytest.mark.parametrize(
    ("wishes", "option"),
    [
        ({"preset": "static", "top_k": 3}, "--top-k"),
        ({"preset": "static", "score_over": "level"}, "--score-over"),
        ({"preset": "static", "context": "8"}, "--context"),
        ({"preset": "static", "baselines": "hf"}, "--baselines"),
        ({"preset": "static", "geometry": "quick,onerec-0.1b"}, "--geometry"),
        ({"preset": "static", "beam": "4,8"}, "--beam"),
        ({"preset": "static", "users": "4,8"}, "--users"),
        ({"preset": "static", **REAL}, "--model"),
        ({"history_col": "clicks"}, "--history-col"),
        ({"history_format": "prompt", **REAL}, "--history-format"),
        ({"inputs": ("u",)}, "--in"),
        ({"inputs": ("u",), "shared_prefix": 2, **REAL}, "--shared-prefix"),
        ({"geometry": "quick", **REAL}, "--geometry"),
        ({"items": "5", **REAL}, "--items"),
        ({"codes": "5x2", **REAL}, "--codes"),
        ({"slo_ms": 100.0}, "--slo-ms"),
        ({"preset": "quick", "online": False, "slo_ms": 100.0}, "--slo-ms"),
        ({"beam": "8", "top_k": 100}, "--top-k 100"),
        ({"preset": "quick", "top_k": 33}, "--top-k 33"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name_or_left_out(wishes: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=rf"^{option}\b"):
        choose_options(CPU, BenchWishes(**wishes))
    name = {"--in": "inputs"}.get(option, option.split(" ")[0].removeprefix("--").replace("-", "_"))
    left = {key: value for key, value in wishes.items() if key not in {name, "vocab" if name == "model" else name}}
    configured = {option.split(" ")[0].removeprefix("--"), "vocab"}
    assert choose_options(CPU, BenchWishes(**wishes), configured) == choose_options(CPU, BenchWishes(**left))


def test_what_means_something_is_taken_wherever_it_comes_from() -> None:
    configured = {"slo-ms", "top-k", "beam", "history-col", "in", "context"}
    wishes = BenchWishes(
        online=True, slo_ms=50.0, top_k=3, beam="4", inputs=("u",), history_col="c", context="9", **REAL
    )
    options = choose_options(CPU, wishes, configured)
    assert (options.slo_ms, options.top_k, options.beams, options.contexts) == (50.0, 3, (4,), (9,))
    assert (options.inputs, options.history_col) == (("u",), "c")
    with_online = choose_options(CPU, BenchWishes(preset="static", online=True, top_k=3, context="8"))
    assert (with_online.top_k, with_online.contexts) == (3, (8,))


def test_a_typed_geometry_beats_a_configured_model() -> None:
    wishes = BenchWishes(geometry="quick", shared_prefix=2, inputs=("u",), history_col="c", **REAL)
    options = choose_options(CPU, wishes, {"model", "vocab", "in", "history-col"})
    assert (options.geometries, options.model, options.inputs) == (("quick",), None, ())
    assert (options.shared_prefix, options.history_col) == (2, "history")


def test_a_typed_shared_prefix_beats_configured_histories() -> None:
    options = choose_options(
        CPU, BenchWishes(shared_prefix=2, inputs=("u",), history_col="c", **REAL), {"in", "history-col"}
    )
    assert (options.model, options.shared_prefix, options.inputs) == ("m", 2, ())


def test_lists_count_what_is_named_twice_once_and_refuse_nothing() -> None:
    options = choose_options(CPU, BenchWishes(geometry=" quick,quick ", beam="8,8", baselines="paged, paged"))
    assert (options.geometries, options.beams, options.baselines) == (("quick",), (8,), ("paged",))
    assert options.online_contenders == ("xgr", "paged")
    assert options.items == choose_options(CPU, BenchWishes(geometry="quick")).items
    for text in ("", ",", " "):
        with pytest.raises(UsageError, match="--baselines"):
            choose_options(CPU, BenchWishes(baselines=text))


@pytest.mark.parametrize("codes", ["2x64", "2147483647x100", "2147483647x1", "2147483647x2147483647"])
def test_code_spaces_that_cannot_be_are_usage_errors(codes: str) -> None:
    with pytest.raises(UsageError, match=f"--codes {codes}: "):
        choose_options(CPU, BenchWishes(codes=codes, items="10"))
    assert choose_options(CPU, BenchWishes(codes="2x63", items="10")).levels == 63


def test_seeds_that_torch_cannot_take_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="--seed 9223372036854775808"):
        BenchOptions(seed=2**63)
    assert BenchOptions(seed=2**63 - 1).seed == 2**63 - 1

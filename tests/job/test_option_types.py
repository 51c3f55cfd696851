"""Options made in Python hold what they are declared to hold: a text is no switch, and no list of texts either."""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xgr_engine
from xgr_engine.bench.options import BenchOptions, BenchWishes
from xgr_engine.catalog.build import BuildOptions
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.errors import UsageError
from xgr_engine.job.filter_options import FilterOptions
from xgr_engine.job.options import HistoryOptions, OperationOptions, RecommendOptions, fingerprinted
from xgr_engine.metrics.evaluate import EvalOptions
from xgr_engine.options import SearchOptions

OPTIONS = (
    SearchOptions(),
    HistoryOptions(("users.parquet",)),
    FilterOptions(),
    OperationOptions(),
    RecommendOptions(HistoryOptions(("users.parquet",))),
    ReadOptions(),
    BuildOptions(),
    ConvertOptions(Path("source"), Path("out")),
    EvalOptions("recs", ("users.parquet",)),
    BenchOptions(),
    BenchWishes(),
)

# By the declared type. What is no type of Python's is a choice or other options.
WRONG: dict[str, tuple[Any, ...]] = {
    "bool": ("no", "", 1, 0.0),
    "int": ("3", 3.0, True),
    "float": ("3", True),
    "str": (5, b"text", Path("text"), ["text"], True),
    "Path": ("text", 5),
    "tuple[str, ...]": ("text", ["text"], (5,), (None,)),
    "tuple[int, ...]": (5, "5", [5], ("5",), (True,), (2.0,)),
}
NO_CHOICE = ("something else", 5, True, ["all"])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: type(options).__name__)
def test_a_value_of_another_type_is_refused(options: Any) -> None:
    for field in fields(options):
        declared = str(field.type).removesuffix(" | None")
        refused = WRONG.get(declared, NO_CHOICE)
        for value in refused if str(field.type).endswith(" | None") else (*refused, None):
            with pytest.raises(UsageError, match=f"^--{field.name.replace('_', '-')} .*: must be "):
                replace(options, **{field.name: value})


def test_all_options_are_in_the_test() -> None:
    found = set()
    for module in pkgutil.walk_packages(xgr_engine.__path__, "xgr_engine."):
        if module.name.endswith(("options", "build", "base", "evaluate")):
            content = vars(importlib.import_module(module.name)).values()
            found |= {one for one in content if isinstance(one, type) and one.__name__.endswith("Options")}
    assert {one for one in found if is_dataclass(one)} == {type(options) for options in OPTIONS} - {BenchWishes}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"exclude_seen": "no"}, "^--exclude-seen no: must be True or False$"),
        ({"exclude_seen": None}, "^--exclude-seen None: must be True or False$"),
        ({"match": "country"}, "^--match country: must be a tuple of texts$"),
        ({"history_format": "item"}, "^--history-format item: must be one of items, sids, tokens, prompt$"),
        ({"limit": "5"}, "^--limit 5: must be a whole number$"),
    ],
)
def test_what_it_must_be_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        HistoryOptions(("users.parquet",), **given)


def test_numbers_of_numpy_are_those_of_python() -> None:
    def run(whole: Any, real: Any) -> RecommendOptions:
        histories = HistoryOptions(("users.parquet",), limit=whole)
        return RecommendOptions(histories, SearchOptions(beam=whole, top_k=whole), slo_ms=real)

    ours = json.dumps(fingerprinted(run(np.int64(7), np.float32(0.5))))
    assert ours == json.dumps(fingerprinted(run(7, 0.5)))

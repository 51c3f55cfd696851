"""Whole runs of the benchmark on a CPU for its tests: the record of a small one, made once, and the command itself."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import torch

from xgr_engine.bench.options import BenchOptions
from xgr_engine.bench.run import BenchCaller, run_bench

Record = dict[str, Any]
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
def small_run() -> str:
    """The record, as JSON."""
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


def xgr(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "xgr_cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

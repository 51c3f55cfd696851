"""Small workloads for the tests."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from xgr_engine.bench.baselines.base import Contender, RankedSids, make_contender
from xgr_engine.bench.geometries import Geometry
from xgr_engine.bench.parity import Parity, judge
from xgr_engine.bench.workloads import BenchCatalog, BenchModel, Workload, random_weights, synthetic_catalog
from xgr_engine.options import SearchOptions

TINY = Geometry("tiny", 2, 32, 4, 2, 16, 48, text_tokens=11, codes=7, levels=3, max_context=256)
CPU = torch.device("cpu")


@functools.cache
def tiny_model() -> BenchModel:
    """Two layers, 11 text tokens, 3 x 7 SID tokens."""
    return random_weights(TINY, 7, 3, CPU)


@functools.cache
def tiny_catalog(items: int = 90) -> BenchCatalog:
    """Random SIDs of 3 x 7 codes."""
    return synthetic_catalog(items, 7, 3)


def tiny_workload(context: int = 13, users: int = 3, beam: int = 9, top_k: int = 9, shared_prefix: int = 0) -> Workload:
    """Of awkward sizes."""
    search = SearchOptions(beam=beam, top_k=top_k, collisions="first")
    return Workload(tiny_model(), tiny_catalog(), search, context, users, shared_prefix)


def ranked(*users: tuple[list[list[int]], list[float]]) -> RankedSids:
    """An answer from plain lists."""
    return RankedSids(
        [np.array(codes, np.int32).reshape(len(codes), -1) for codes, _ in users],
        [np.array(scores, np.float32) for _, scores in users],
    )


def judged(name: str, workload: Workload) -> tuple[Contender, RankedSids, Parity]:
    """A prepared contender, its answer to the first batch, and the judgement, which has to find nothing wrong.

    Skips the test where the contender says that it is not available.
    """
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    contender = make_contender(name)
    if reason := contender.available(workload):
        assert reason.startswith("not available"), reason
        pytest.skip(reason)
    contender.prepare(workload)
    batch = workload.batch(0)
    answer = getattr(contender, "run_scored", contender.run)(batch)
    found = judge(workload, batch, {name: answer}).parity[name]
    assert found.marks == []
    assert found.top1 == found.overlap == 1.0
    assert found.score_difference is not None and found.score_difference < 1e-4
    return contender, answer, found

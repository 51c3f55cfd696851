"""The contenders of the registry that run inside the engine, on whatever this machine has: the engine's lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xgr_engine.bench.baselines.base import make_contender
from xgr_engine.bench.geometries import GEOMETRIES
from xgr_engine.bench.workloads import Workload, random_weights, synthetic_catalog
from xgr_engine.options import SearchOptions


@pytest.fixture(scope="module")
def workload() -> Workload:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_weights(GEOMETRIES["quick"], 64, 3, device, dtype="float32")
    catalog = synthetic_catalog(3000, 64, 3)
    return Workload(model, catalog, SearchOptions(beam=40, top_k=20), context=47, users=3)


@pytest.mark.parametrize("name", ["paged", "paper", "paper-masks", "xgr-full-sort", "all-off"])
def test_finds_the_engines_lists(workload: Workload, name: str) -> None:
    batches = [workload.batch(number) for number in range(3)]
    engine, contender = make_contender("xgr"), make_contender(name)
    assert contender.available(workload) is None
    engine.prepare(workload)
    contender.prepare(workload)
    for expected, got in zip(engine.run_many(batches), contender.run_many(batches), strict=True):
        for user in range(workload.users):
            np.testing.assert_allclose(got.scores[user], expected.scores[user], atol=2e-5)
            differs = (got.codes[user] != expected.codes[user]).any(1)
            # only neighbours whose scores tie may change places
            gap = np.abs(np.diff(expected.scores[user], prepend=np.inf, append=-np.inf))
            assert (np.minimum(gap[:-1], gap[1:])[differs] < 2e-5).all()
    contender.release()
    engine.release()

"""FlashInfer's cascade attention through the adapter, over a stand-in of the library that keeps its contract."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from test_baseline_answers import LENGTHS, catalog_of, found, host_answer, nothing_dead, same
from tiny import TinyWorld, random_prompts

from xgr_engine.bench.baselines.base import NotAvailableError
from xgr_engine.bench.baselines.cascade import Cascade, CascadeDecoder, CascadeRecommender, PlannedSearch
from xgr_engine.bench.baselines.cascade_plan import CascadePlans, trial
from xgr_engine.bench.foreign.packages import FLASHINFER, Package
from xgr_engine.bench.geometries import GEOMETRIES
from xgr_engine.bench.measure import Budget
from xgr_engine.bench.parity import judge
from xgr_engine.bench.row import Row
from xgr_engine.bench.workloads import Workload, random_weights, synthetic_catalog
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import SearchOptions
from xgr_engine.search.device import DeviceSearch
from xgr_engine.search.setup import SearchSetup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in of the library, on the CPU")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in in the place of the library, without faults."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "fakes")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    library = importlib.import_module("flashinfer")
    yield library
    sys.modules.pop("flashinfer", None)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, flashinfer: ModuleType) -> ModuleType:
    """The contender takes the stand-in for an installed library that runs on this machine."""
    monkeypatch.setattr(Package, "installed", lambda self: "0.7.4")
    monkeypatch.setattr(Cascade, "devices", ("cpu",))
    monkeypatch.setattr(Cascade, "dtypes", ("float32",))
    monkeypatch.setattr(Cascade, "head_dims", (32,))
    return flashinfer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("tiny"))


def workload(beam: int = 20, shared_prefix: int = 5) -> Workload:
    model = random_weights(GEOMETRIES["quick"], 16, 3, torch.device("cpu"))
    search = SearchOptions(beam=beam, top_k=10, collisions="first")
    return Workload(model, synthetic_catalog(700, 16, 3), search, 23, 3, shared_prefix)


def with_cascade(setup: SearchSetup, library: ModuleType) -> SearchSetup:
    return replace(setup, model=CascadeDecoder(setup.model, library))


@torch.inference_mode()
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("beam", "suffix", "mixed"), [(33, (), False), (33, (2, 1), False), (20, (), True)])
@pytest.mark.parametrize("rows_at_once", [0, 4])
def test_on_the_host(
    world: TinyWorld, flashinfer: ModuleType, beam: int, suffix: tuple, mixed: bool, rows_at_once: int
) -> None:
    """Ragged prompts, rows left out, a suffix, and SIDs of several lengths."""
    depths = np.random.default_rng(1).integers(1, 5, 90) if mixed else np.full(90, 4)
    catalog = catalog_of(depths, seed=1)
    setup = world.recommender(catalog, SearchOptions(beam=beam, top_k=beam // 2), score_suffix=suffix).setup
    same(host_answer(with_cascade(setup, flashinfer), rows_at_once), host_answer(setup, rows_at_once), len(LENGTHS))


@torch.inference_mode()
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("suffix", [(), (2,)])
@pytest.mark.parametrize("beam", [5, 33])
def test_with_fixed_shapes(world: TinyWorld, flashinfer: ModuleType, beam: int, suffix: tuple) -> None:
    """As on a GPU without graphs: dead rows and absent users among the rows, batches of other lengths over one cache;
    every step is planned once a batch, before the search begins."""
    catalog = catalog_of(np.full(60, 4), seed=beam)
    setup = world.recommender(catalog, SearchOptions(beam=beam, top_k=beam), score_suffix=suffix).setup
    ours = with_cascade(setup, flashinfer)
    cache = ours.model.new_cache(sum(LENGTHS), 6, setup.slots)
    search = PlannedSearch(ours, cache, capture=False, make_search=DeviceSearch)
    shapes = 3 + len(suffix)
    for lengths, users in ((LENGTHS[::-1], 4), (LENGTHS[:3], 3), (LENGTHS, 4)):
        pack = PackedPrompts.of(random_prompts(5, lengths), ours.model.device)
        hidden = ours.model.prefill(pack, cache)
        before = flashinfer.plans
        outcome = search.run(hidden, nothing_dead(setup, users))
        assert flashinfer.plans == before + shapes
    same(outcome, host_answer(setup), len(LENGTHS))
    assert found(outcome, 0)


@torch.inference_mode()
def test_a_replay_finds_everything_planned(flashinfer: ModuleType) -> None:
    """A captured graph calls no plan(): after ``refresh`` the wrappers hold the new batch's lengths."""
    plans = CascadePlans(flashinfer, (4, 2, 16), 0.25, torch.float32, 50, torch.device("cpu"))
    plans.begin([7, 9], 0)
    planned, other = plans.get(3, 4, 2), plans.get(2, 4, 2)
    plans.begin([30, 1, 2], 4)
    before = flashinfer.plans
    plans.refresh(3)
    assert flashinfer.plans == before + 1
    assert plans.get(3, 4, 2) is planned
    assert flashinfer.plans == before + 1
    prompt_pages = planned.wrapper.buffers[2][0]
    assert prompt_pages[:33].tolist() == list(range(4, 37))
    assert planned.wrapper.buffers[1][0].tolist() == [0, 30, 31, 33]
    assert other.wrapper.buffers[1][0].tolist() == [0, 7, 16]  # of another number of users: planned when these come


@torch.inference_mode()
def test_the_workspace_grows_until_a_plan_fits(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from xgr_engine.bench.baselines import cascade_plan

    monkeypatch.setattr(cascade_plan, "_WORKSPACES", (100, 1000, 10_000))
    monkeypatch.setattr(flashinfer, "needed_workspace", 600)
    plans = CascadePlans(flashinfer, (4, 2, 16), 0.25, torch.float32, 50, torch.device("cpu"))
    plans.begin([7, 9], 0)
    first = plans.get(2, 4, 1)
    assert first.wrapper.workspace.numel() == 1000
    assert plans.get(2, 4, 2).wrapper.workspace is first.wrapper.workspace
    monkeypatch.setattr(flashinfer, "needed_workspace", 20_000)
    with pytest.raises(RuntimeError, match="workspace"):
        plans.get(2, 4, 3)


def test_the_contender_agrees_with_the_definition(on_cpu: ModuleType) -> None:
    """Through the registry's class, with a common beginning, also batch after batch."""
    asked = workload()
    contender = Cascade()
    assert contender.available(asked) is None
    contender.prepare(asked)
    assert isinstance(contender.recommender, CascadeRecommender)
    batch = asked.batch(0)
    found = judge(asked, batch, {"cascade": contender.run(batch)}).parity["cascade"]
    assert found.marks == []
    assert found.top1 == found.overlap == 1.0
    many = list(contender.run_many([asked.batch(number, 2) for number in range(3)]))
    again = contender.run(asked.batch(2, 2))
    assert [codes.tolist() for codes in many[2].codes] == [codes.tolist() for codes in again.codes]
    contender.release()


@pytest.mark.parametrize("fault", ["merge", "raise", "copies"])
def test_a_library_that_fails_or_is_wrong_is_not_run(
    on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Levels that are not merged, kernels that do not run, and page tables that are read when they are planned."""
    monkeypatch.setattr(on_cpu, "fault", fault)
    row = Row(workload(), ["xgr", "cascade"], Budget(0.02, 1), lambda text: None).measure()
    ours, theirs = row["contenders"]
    assert ours["status"] == "ok"
    assert theirs["status"] == "not run"
    assert "a trial call of flashinfer-python 0.7.4 failed" in theirs["reason"]
    assert ("no kernel image" if fault == "raise" else "was wrong by") in theirs["reason"]


def test_wrong_answers_are_marked(on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a fault to pass the trial, the comparison of answers sees it."""
    monkeypatch.setattr("xgr_engine.bench.baselines.cascade.trial", lambda *args, **more: None)
    monkeypatch.setattr(on_cpu, "fault", "merge")
    row = Row(workload(), ["cascade"], Budget(0.02, 1), lambda text: None).measure()
    assert row["contenders"][0]["parity"]["marks"]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, flashinfer: ModuleType) -> None:
    asked = workload()
    contender = Cascade()
    assert "CUDA GPU" in (contender.available(asked) or "")
    monkeypatch.setattr(Cascade, "devices", ("cpu",))
    monkeypatch.setattr(Package, "installed", lambda self: None)
    assert (contender.available(asked) or "").endswith("pip install flashinfer-python")
    monkeypatch.setattr(Package, "installed", lambda self: "0.1.6")
    assert FLASHINFER.wanted in (contender.available(asked) or "")
    monkeypatch.setattr(Package, "installed", lambda self: "0.7.4")
    assert "bfloat16" in (contender.available(asked) or "")
    monkeypatch.setattr(Cascade, "dtypes", ("float32",))
    assert "a head dimension of 32" in (contender.available(asked) or "")
    monkeypatch.delattr(flashinfer, "MultiLevelCascadeAttentionWrapper")
    with pytest.raises(NotAvailableError, match="has no MultiLevelCascade"):
        contender.prepare(asked)


def test_the_trial_accepts_what_is_right(flashinfer: ModuleType, world: TinyWorld) -> None:
    trial(flashinfer, world.model, captured=False)

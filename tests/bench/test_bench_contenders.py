"""Every contender gives the definition's answers; workloads are reproducible; options are what was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench_support import CPU, TINY, judged, tiny_model, tiny_workload

from xgr_engine.bench import measure, row_timing
from xgr_engine.bench.baselines.base import BASELINES, REGISTRY, NotAvailableError, RankedSids, make_contender
from xgr_engine.bench.baselines.hf_weights import named_tensors
from xgr_engine.bench.choices import choose_options
from xgr_engine.bench.foreign.packages import Package
from xgr_engine.bench.measure import Budget, interleaved
from xgr_engine.bench.options import BenchWishes, parse_codes, parse_count, parse_counts, preset_options
from xgr_engine.bench.parity import judge
from xgr_engine.bench.row import Row
from xgr_engine.bench.workloads import Batch, Workload, random_weights, synthetic_catalog
from xgr_engine.errors import UsageError

EXTERNAL = ("cascade", "flashrec", "vllm")
OURS = [name for name in REGISTRY if name not in EXTERNAL]


@pytest.mark.parametrize("name", OURS)
def test_contender_agrees_with_the_definition(name: str) -> None:
    workload = tiny_workload(shared_prefix=4)
    contender, _, found = judged(name, workload)
    assert found.users == 3
    assert found.certain == found.sids == 27  # no score of this model lies near a cut
    many = list(contender.run_many([workload.batch(number, 2) for number in range(3)]))
    again = contender.run(workload.batch(2, 2))
    assert [codes.tolist() for codes in many[2].codes] == [codes.tolist() for codes in again.codes]
    contender.release()


@pytest.mark.parametrize("name", OURS)
def test_one_beam_is_scored_as_well(name: str) -> None:
    """transformers searches greedily then, and gives no sequence a score."""
    judged(name, tiny_workload(beam=1, top_k=1))


@pytest.mark.parametrize("name", ["hf", "hf-fast"])
def test_transformers_gives_no_filler_when_there_are_too_few_items(name: str) -> None:
    """cases.md: fewer items than the beam is wide."""
    pytest.importorskip("transformers")
    workload = tiny_workload(beam=40, top_k=40)
    few = synthetic_catalog(5, 7, 3)
    workload = type(workload)(workload.model, few, workload.search, 13, 2)
    contender = make_contender(name)
    contender.prepare(workload)
    batch = workload.batch(0)
    answer = contender.run_scored(batch)  # type: ignore[attr-defined]
    assert judge(workload, batch, {name: answer}).parity[name].marks == []
    assert [len(codes) for codes in answer.codes] == [5, 5]


@pytest.mark.parametrize("name", EXTERNAL)
def test_engines_of_others_say_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their adapters are tested with stand-ins in tests/bench_baselines."""
    contender, workload = make_contender(name), tiny_workload()
    assert "needs a CUDA GPU" in (contender.available(workload) or "")
    monkeypatch.setattr(Package, "installed", lambda self: None)
    monkeypatch.setattr(type(contender), "devices", ("cpu",))
    assert REGISTRY[name].how_to_get in (contender.available(workload) or "")
    with pytest.raises(NotAvailableError):
        contender.run(workload.batch(0))


def test_a_contender_that_cannot_express_the_catalog_is_not_run() -> None:
    pytest.importorskip("transformers")
    workload = tiny_workload()
    mode = type(workload.search)(beam=9, top_k=9, score_over="level")
    reason = make_contender("hf").available(type(workload)(workload.model, workload.catalog, mode, 13, 3))
    assert reason
    assert "--score-over vocab" in reason


def test_a_row_survives_a_contender_that_fails_or_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a baseline runs out of memory the table says so, and the others are measured."""
    import torch

    from xgr_engine.bench.baselines import engine, variants

    class Greedy(engine.Xgr):
        name = "xgr-full-sort"

        def prepare(self, workload: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    class Broken(engine.Xgr):
        name = "xgr-no-shared-prefix"

        def run(self, batch: object) -> None:  # type: ignore[override]
            raise ValueError("a fault")

    monkeypatch.setattr(variants, "FullSort", Greedy)
    monkeypatch.setattr(variants, "NoSharedPrefix", Broken)
    names = ["xgr", "xgr-full-sort", "xgr-no-shared-prefix", "vllm"]
    row = Row(tiny_workload(), names, Budget(0.05, 3), lambda text: None).measure()
    status = {one["name"]: one["status"] for one in row["contenders"]}
    assert status == {
        "xgr": "ok",
        "xgr-full-sort": "out of memory",
        "xgr-no-shared-prefix": "failed",
        "vllm": "not run",
    }
    engine_row = row["contenders"][0]
    assert engine_row["latency_ms"]["samples"] >= 1
    assert engine_row["parity"]["marks"] == []
    assert engine_row["prompt_tokens_per_s"]["value"] == pytest.approx(engine_row["users_per_s"]["value"] * 13)


def test_a_row_ends_soon_after_the_time_limit_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over while one was prepared: not run. Over while one warmed up: few samples. Nobody's figures are lost."""
    from xgr_engine.bench.baselines import engine, variants

    late = False
    runs: list[str] = []

    class SlowToWarm(engine.Xgr):
        name = "xgr-full-sort"

        def run(self, batch: Batch) -> RankedSids:
            nonlocal late
            late = True
            runs.append(self.name)
            return super().run(batch)

    class SlowToPrepare(engine.Xgr):
        name = "xgr-eager"

        def available(self, workload: Workload) -> None:
            nonlocal late
            late = False  # as if it had come before the one above

        def prepare(self, workload: Workload) -> None:
            nonlocal late
            late = True

    monkeypatch.setattr(variants, "FullSort", SlowToWarm)
    monkeypatch.setattr(variants, "Eager", SlowToPrepare)
    monkeypatch.setattr(Budget, "over", lambda self: late)
    monkeypatch.setattr(row_timing, "_load", lambda contender, workload: None)
    # every run counts as quick and within the budget, however loaded this machine is
    monkeypatch.setattr(measure, "_QUICK_S", float("inf"))
    monkeypatch.setattr(measure, "_another_fits", lambda seconds, budget_s: True)
    names = ["xgr", "xgr-full-sort", "xgr-eager", "paged"]
    row = Row(tiny_workload(), names, Budget(0.5, 50), lambda text: None).measure()
    found = {one["name"]: one for one in row["contenders"]}
    assert found["xgr"]["latency_ms"]["samples"] == found["xgr-full-sort"]["latency_ms"]["samples"] == 3
    assert found["xgr-full-sort"]["latency_ms"]["warm_up_runs"] == 1 and len(runs) == 5  # with its answer
    assert found["xgr-full-sort"]["parity"]["marks"] == []
    assert found["xgr-eager"]["reason"] == "the time limit passed while it was prepared"
    assert found["paged"]["reason"] == "the time limit had passed"


def test_a_contender_that_fails_after_some_samples_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from xgr_engine.bench.baselines import engine, variants

    class Tires(engine.Xgr):
        name = "xgr-full-sort"
        samples = 0

        def run(self, batch: Batch) -> RankedSids:
            if len(batch.prompts) == 3 and not warming:
                Tires.samples += 1
                if Tires.samples == 3:
                    raise ValueError("tired")
            return super().run(batch)

    warming = True
    measure = interleaved

    def timed(*args: Any, **more: Any) -> dict[str, Exception]:
        nonlocal warming
        warming = False
        return measure(*args, **more)

    monkeypatch.setattr(variants, "FullSort", Tires)
    monkeypatch.setattr(row_timing, "interleaved", timed)
    row = Row(tiny_workload(), ["xgr", "xgr-full-sort"], Budget(0.5, 4), lambda text: None).measure()
    whole, tires = row["contenders"]
    assert tires["status"] == "ok" and tires["latency_ms"]["samples"] == 2
    assert any("tired" in note for note in tires["notes"])
    assert whole["latency_ms"]["samples"] == 4


def test_a_long_batch_of_what_preparing_has_run_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from xgr_engine.bench import measure
    from xgr_engine.bench.baselines import engine, variants

    runs: list[int] = []

    class Prepared(engine.Xgr):
        name = "xgr-full-sort"
        ran_while_prepared = True

        def run(self, batch: Batch) -> RankedSids:
            runs.append(len(batch.prompts))
            return super().run(batch)

    monkeypatch.setattr(variants, "FullSort", Prepared)
    monkeypatch.setattr(row_timing, "_load", lambda contender, workload: None)
    monkeypatch.setattr(measure, "_LONG_S", 0.0)
    workload = tiny_workload()
    row = Row(workload, ["xgr", "xgr-full-sort"], Budget(1e-9, 50), lambda text: None).measure()
    whole, long = row["contenders"]
    assert runs == [workload.users, row_timing._COMPARED_USERS]  # the sample, and the answer that is compared
    assert long["latency_ms"]["samples"] == 1 and long["latency_ms"]["warm_up_runs"] == 0
    assert not long["interleaved"] and any("one run, timed by itself" in note for note in long["notes"])
    assert long["parity"]["marks"] == [] and long["device_peak_bytes"] is None and long["host_peak_bytes"] > 0
    assert whole["interleaved"] and whole["notes"] == []


def test_synthetic_catalogs_are_unique_exact_and_reproducible() -> None:
    for items, codes, levels in ((1, 1, 1), (340, 7, 3), (343, 7, 3), (500, 100, 2), (17, 1000, 3)):
        catalog = synthetic_catalog(items, codes, levels)
        assert len(np.unique(catalog.sids, axis=0)) == items
        assert catalog.sids.max() < codes
        assert (catalog.trie.leaf_codes() == catalog.sids).all()
        assert (synthetic_catalog(items, codes, levels).sids == catalog.sids).all()
    with pytest.raises(UsageError, match="343"):
        synthetic_catalog(344, 7, 3)


def test_prompts_and_weights_follow_the_seed() -> None:
    workload = tiny_workload(shared_prefix=5)
    first, second = workload.batch(0), workload.batch(1)
    assert [prompt.tolist() for prompt in first.prompts] == [prompt.tolist() for prompt in workload.batch(0).prompts]
    assert first.prompts[0][5:].tolist() != second.prompts[0][5:].tolist()
    assert len({tuple(prompt[:5]) for prompt in first.prompts + second.prompts}) == 1
    again = random_weights(TINY, 7, 3, CPU)
    assert bool((again.decoder.layers[1].down == tiny_model().decoder.layers[1].down).all())


def test_numbers_of_the_command_line() -> None:
    assert parse_count("1e6", "--items") == 1_000_000
    assert parse_codes("8192x3") == (8192, 3)
    assert parse_count("2147483647", "--items") == 2**31 - 1
    for text in ("0", "1.5", "x", "1e-3", "-4", "1e400", "1e99999999", "2147483648", "9" * 5000, "5\n5"):
        with pytest.raises(UsageError):
            parse_count(text, "--items")
    for text in ("8192", "x3", "8x3x4", ""):
        with pytest.raises(UsageError, match=f"--codes '{text}'"):
            parse_codes(text)
    assert parse_counts("8, 16,8", "--beam") == (8, 16)
    for text in ("", ",", "8,", "8,x"):
        with pytest.raises(UsageError, match=f"--beam '?{text}'?: must be"):
            parse_counts(text, "--beam")


def test_wishes_change_a_preset_and_contradictions_are_refused() -> None:
    options = choose_options(CPU, BenchWishes(preset="quick", beam="5,7", baselines="hf", budget_s=1.0))
    assert options.beams == (5, 7)
    assert options.baselines == ("hf",)
    assert options.contexts == preset_options("quick", on_gpu=False).contexts
    assert choose_options(CPU, BenchWishes(beam="512")).geometries == ("quick",)
    for wishes in (
        BenchWishes(model="m"),
        BenchWishes(model="m", vocab="v", geometry="quick"),
        BenchWishes(inputs=("u",)),
        BenchWishes(baselines="nobody"),
        BenchWishes(geometry="t5"),
        BenchWishes(context="8", shared_prefix=8),
        BenchWishes(budget_s=float("nan")),
        BenchWishes(slo_ms=float("nan")),
        BenchWishes(time_limit_s=0.0),
        BenchWishes(time_limit_s=-1.0),
        BenchWishes(preset="static", model="m", vocab="v"),
    ):
        with pytest.raises(UsageError):
            choose_options(CPU, wishes)
    assert set(BASELINES) <= set(REGISTRY)


def test_bytes_of_a_model_are_those_of_its_tensors() -> None:
    model = tiny_model()
    stored = {tensor.data_ptr(): tensor for _, tensor in named_tensors(model)}  # a tied head is the embedding
    assert model.bytes == sum(tensor.nbytes for tensor in stored.values())

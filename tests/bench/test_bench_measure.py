"""Quantiles, warm-up, interleaving, memory, counts of work: arithmetic that the figures rest on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from bench_support import CPU, tiny_workload

from xgr_engine.bench import machine
from xgr_engine.bench.cost import decode_work, kv_cache_bytes, prefill_work, rows_a_level
from xgr_engine.bench.machine import Watch
from xgr_engine.bench.measure import Estimate, Samples, interleaved, quantile, warm_up
from xgr_engine.bench.memory import peak_memory
from xgr_engine.bench.row_record import Measured, row_record
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xschedule.engines import is_out_of_memory


class FakeClock:
    """Time moves when a run says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_quantiles_have_intervals_that_hold_the_figure() -> None:
    samples = np.random.default_rng(1).exponential(1.0, 400).tolist()
    for percent in (50, 90, 99):
        found = quantile(samples, percent)
        assert found is not None
        assert found.low <= found.value <= found.high
        assert found.value == pytest.approx(np.percentile(samples, percent))
    median = quantile(samples, 50)
    assert median is not None
    assert median.low < np.log(2) < median.high  # the distribution's own median


def test_a_tail_is_not_made_of_too_few_samples() -> None:
    assert quantile([1.0] * 9, 90) is None
    assert quantile([1.0] * 49, 99) is None
    assert quantile([1.0] * 50, 99) is not None
    single = quantile([3.0], 50)
    assert single == Estimate(3.0, 3.0, 3.0)


def test_rate_from_time_turns_the_interval_round() -> None:
    rate = Estimate(2.0, 1.0, 4.0).inverse(8)
    assert (rate.value, rate.low, rate.high) == (4.0, 2.0, 8.0)


def test_warm_up_goes_on_until_runs_agree() -> None:
    clock, times = FakeClock(), [9.0, 4.0, 2.0, 1.0, 1.0, 1.01, 1.0]
    runs = iter(times)

    def run() -> None:
        clock.now += next(runs)

    samples = warm_up(run, 1000.0, clock)
    assert samples.stable
    assert samples.warm_up == 6  # the first three in a row within 5 % are runs 4 to 6


def test_warm_up_ends_with_the_budget() -> None:
    clock, times = FakeClock(), iter([5.0, 1.0, 5.0, 1.0, 5.0])

    def run() -> None:
        clock.now += next(times)

    samples = warm_up(run, 10.0, clock)
    assert not samples.stable
    assert samples.warm_up == 3


@pytest.mark.parametrize(("seconds", "ran_before", "own"), [(9.0, True, [9.0]), (9.0, False, []), (2.0, True, [])])
def test_a_long_run_of_what_ran_before_is_its_sample(seconds: float, ran_before: bool, own: list[float]) -> None:
    clock, runs = FakeClock(), []

    def run(number: int = 0) -> None:
        runs.append(number)
        clock.now += seconds

    samples = warm_up(run, 1.0, clock, ran_before=ran_before)
    assert samples.seconds == own
    assert samples.warm_up == (0 if own else 1)
    interleaved({"slow": run}, {"slow": samples}, 1.0, 10, clock)
    assert samples.seconds == [seconds]
    assert len(runs) == (1 if own else 2)


def test_rounds_are_interleaved_and_the_slow_one_stops_first() -> None:
    clock, order = FakeClock(), []

    def runner(name: str, seconds: float):  # type: ignore[no-untyped-def]
        def run(number: int) -> None:
            order.append((name, number))
            clock.now += seconds

        return run

    samples = {"quick": Samples(), "slow": Samples()}
    interleaved({"quick": runner("quick", 1.0), "slow": runner("slow", 5.0)}, samples, 11.0, 4, clock)
    assert order == [
        *[("quick", 0), ("slow", 0), ("quick", 1), ("slow", 1)],
        *[("quick", 2), ("quick", 3)],  # a third slow run would leave its budget
    ]
    assert samples["quick"].seconds == [1.0] * 4
    assert samples["slow"].seconds == [5.0, 5.0]


def test_even_what_is_over_its_budget_is_measured_once() -> None:
    clock, samples = FakeClock(), {"slow": Samples()}

    def run(number: int) -> None:
        clock.now += 100.0

    interleaved({"slow": run}, samples, 1.0, 10, clock)
    assert samples["slow"].seconds == [100.0]


def test_when_the_time_is_over_little_more_is_begun_than_the_first_of_each() -> None:
    clock, samples = FakeClock(), {"a": Samples(), "b": Samples()}

    def run(number: int) -> None:
        clock.now += 2.0

    def over() -> bool:
        return clock.now >= 9.0

    interleaved({"a": run, "b": run}, samples, 1000.0, 50, clock, over)
    assert samples["a"].seconds == [2.0] * 3
    assert samples["b"].seconds == [2.0] * 2
    late = {"a": Samples(), "b": Samples()}
    interleaved({"a": run, "b": run}, late, 1000.0, 50, clock, over)
    assert late["a"].seconds == late["b"].seconds == [2.0]
    quick = Samples()
    interleaved({"quick": lambda number: 0.01}, {"quick": quick}, 1000.0, 50, clock, over)
    assert quick.seconds == [0.01] * 3
    assert warm_up(lambda: run(0), 1000.0, clock, over).warm_up == 1


def test_one_that_raises_keeps_its_samples_and_the_others_go_on() -> None:
    clock, samples = FakeClock(), {"good": Samples(), "bad": Samples(), "worse": Samples()}

    def good(number: int) -> None:
        clock.now += 1.0

    def bad(number: int) -> None:
        good(number)
        if number == 2:
            raise ValueError("a fault")

    def worse(number: int) -> None:
        raise MemoryError

    lost = interleaved({"worse": worse, "bad": bad, "good": good}, samples, 1000.0, 5, clock)
    assert {name: type(error) for name, error in lost.items()} == {"bad": ValueError, "worse": MemoryError}
    assert [len(samples[name].seconds) for name in ("good", "bad", "worse")] == [5, 2, 0]


def test_host_peak_sees_memory_that_is_gone_again() -> None:
    with peak_memory(CPU) as peak:
        torch.ones(40_000_000)  # 160 MB
    if peak.host is None:
        pytest.skip("this system does not let a process reset its peak")
    assert peak.host_own is not None
    assert 100e6 < peak.host_own < 400e6


def test_out_of_memory_is_recognised_and_other_errors_are_not() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_rows_follow_the_trie() -> None:
    workload = tiny_workload(beam=9)
    assert rows_a_level(workload) == [1, 7, 9]


def test_work_of_a_prefill_counts_each_prompt_once() -> None:
    one, three = (prefill_work(tiny_workload(), users) for users in (1, 3))
    assert three.flops == pytest.approx(3 * one.flops)
    spec = tiny_workload().model.spec
    layer = spec.hidden_size * (2 * 64 + 2 * 32 + 3 * spec.intermediate_size)
    tail = spec.hidden_size * (2 * 64 + 3 * spec.intermediate_size)  # of the last layer: the last token alone
    attention = 4 * (13 * 14 / 2) * 64
    assert one.flops == pytest.approx(2 * 13 * 2 * layer - 2 * 12 * tail + attention)
    shared = prefill_work(tiny_workload(shared_prefix=6), 3)
    beginning = 2 * 6 * (2 * layer - tail) + 4 * (6 * 7 / 2) * 64  # linears and attention of six tokens
    assert shared.flops == pytest.approx(three.flops - 2 * beginning)


def test_work_of_the_head_is_that_of_each_level_and_of_the_suffix() -> None:
    workload = tiny_workload()
    model = workload.model
    sizes = (3, 5, 7)
    codes = [np.arange(size, dtype=np.int32) for size in sizes]
    uneven = replace(model, table=SidTokenTable.from_levels(codes, [part + 40 * at for at, part in enumerate(codes)]))
    by_mode = {
        over: decode_work(replace(workload, model=uneven, search=replace(workload.search, score_over=over)), 3).flops
        for over in ("vocab", "level")
    }
    rows, vocabulary, hidden = (1, 7, 9), model.spec.vocab_size, model.spec.hidden_size
    fewer = sum(count * (vocabulary - size) for count, size in zip(rows, sizes, strict=True))
    assert by_mode["vocab"] - by_mode["level"] == 2 * 3 * hidden * fewer
    longer = decode_work(replace(workload, model=replace(model, score_suffix=(1,))), 3).flops
    linears = 2 * hidden * (2 * 64 + 2 * 32 + 3 * model.spec.intermediate_size)
    attention = 4 * 9 * (3 * 13 + 3 * 3) * 64 * 2  # 9 rows see the prompts and three codes of their own, two layers
    assert longer - by_mode["vocab"] == 2 * 3 * 9 * (linears + vocabulary * hidden) + attention


def test_work_of_the_levels_grows_with_the_beam_and_reads_weights_once_a_level() -> None:
    narrow, wide = (decode_work(tiny_workload(beam=beam, top_k=1), 3) for beam in (2, 9))
    assert wide.flops > narrow.flops
    assert wide.bytes > narrow.bytes


def test_rows_that_were_left_out_are_not_counted_as_computed() -> None:
    workload = tiny_workload(beam=9, top_k=1)
    rate = Estimate(6.0, 6.0, 6.0)
    counts = {"all": {"rows_live": 34, "rows_expanded": 34}, "half": {"rows_live": 34, "rows_expanded": 17}, "none": {}}
    found = [Measured(name, samples=Samples([0.5]), rate=rate, statistics=of) for name, of in counts.items()]
    rates = {one["name"]: one["tflops"] * 0.5e12 for one in row_record(workload, {}, found)["contenders"]}
    prefill, decode = prefill_work(workload, 3).flops, decode_work(workload, 3).flops
    assert rates["all"] == rates["none"] == pytest.approx(prefill + decode)
    assert rates["half"] == pytest.approx(prefill + decode / 2)


def test_cache_formula_is_the_engines() -> None:
    workload = tiny_workload()
    spec, slots = workload.model.spec, 7 + 9
    cache = workload.model.decoder.new_cache(3 * 13, 3, slots)
    held = sum(tensor.nbytes for tensor in (cache.prompt_k, cache.prompt_v, cache.generated_k, cache.generated_v))
    assert kv_cache_bytes(workload, 3) == held
    assert spec.num_layers == 2


def test_what_a_process_of_the_run_computes_is_no_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in another process (flashrec, vllm) used to be warned of as other programs."""
    busy = iter((100.0, 100.5))  # half a second of all cores: that of the process
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    with Watch(CPU) as watch:
        program = "import time\nwhile time.process_time() < 0.6: pass"
        subprocess.run([sys.executable, "-c", program], check=True)
    assert watch.facts["other_busy_cores"] == 0.0 and watch.warnings == []

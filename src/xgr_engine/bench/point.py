"""One row of the benchmark: every contender on one workload, answers first, then time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from xgr_engine.bench.baselines.base import Contender, NotAvailableError, OneAtATime, RankedSids, make_contender
from xgr_engine.bench.cost import decode_work, kv_cache_bytes, prefill_work, rows_a_level
from xgr_engine.bench.measure import Estimate, Samples, interleaved, quantile, warm_up
from xgr_engine.bench.memory import Peak, free_memory, peak_memory
from xgr_engine.bench.parity import Parity, judge
from xgr_engine.bench.workloads import Workload
from xgr_engine.errors import XgrError
from xgr_engine.xschedule.engines import is_out_of_memory

Note = Callable[[str], None]
_COMPARED_USERS = 2
_ROUNDS_OF_THROUGHPUT = 3
_DIFFERENT_BATCHES = 8  # prompts of timed rounds repeat after these


@dataclass(frozen=True)
class Budget:
    """Seconds of latency samples a contender, the most samples, and when (monotonic clock) no other may begin."""

    seconds: float
    max_repeats: int
    deadline: float = float("inf")

    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline


@dataclass
class Measured:
    """One contender's part of a row.

    Attributes:
        status: ``ok``, ``out of memory``, ``not run`` (with ``reason``) or ``failed`` (with ``reason``).
        rate: users a second, from batches one after the other, or in flight where the contender can.
        answer: to the batch that is compared; parity: what came of that, None where the definition did not fit.
        interleaved: its samples were taken between those of the others; its notes say why not.
        own_weights: it runs in another process, whose memory ``peak`` is, a copy of the weights included.
    """

    name: str
    what: str = ""
    status: str = "ok"
    reason: str = ""
    samples: Samples = field(default_factory=Samples)
    rate: Estimate | None = None
    rate_from: str = ""
    peak: Peak = field(default_factory=Peak)
    answer: RankedSids | None = None
    parity: Parity | None = None
    interleaved: bool = True
    own_weights: bool = False
    notes: list[str] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)


class Row:
    """Measures the contenders named on one workload. :meth:`measure` does it all; nothing stays prepared."""

    def __init__(self, workload: Workload, names: Sequence[str], budget: Budget, note: Note) -> None:
        self.workload = workload
        self.budget = budget
        self.note = note
        self.measured: dict[str, Measured] = {name: Measured(name) for name in names}
        self._ready: dict[str, Contender] = {}
        self._weights = 0
        self._compared = workload.batch(0, min(_COMPARED_USERS, workload.users))
        self._facts: dict[str, Any] = {}
        self._batches = [workload.batch(number) for number in range(_DIFFERENT_BATCHES)]

    def measure(self) -> dict[str, Any]:
        """All contenders: an answer, warm-up, interleaved samples, rate; then the answers beside the definition's.

        Returns:
            The row as JSON.
        """
        free_memory(self.workload.model.device)
        self._weights = self.workload.model.bytes
        try:
            for name in self.measured:
                self._prepare(name)
            self._time(list(self._ready))
        finally:
            self._release_all()
        self._judge()
        return self.to_json()

    def _judge(self) -> None:
        """Compare all answers at once, when no contender is in memory any more."""
        answers = {name: found.answer for name, found in self.measured.items() if found.answer is not None}
        if not answers:
            return
        try:
            judged = judge(self.workload, self._compared, answers)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._facts = {"reason": "the definition in float32 ran out of memory"}
        else:
            self._facts = judged.facts
            for name, parity in judged.parity.items():
                self.measured[name].parity = parity
        free_memory(self.workload.model.device)

    # ---- preparing --------------------------------------------------------------------------------------------------

    def _prepare(self, name: str) -> None:
        """Prepare, warm up and answer. What does not fit beside the others is measured alone."""
        found, too_large = self.measured[name], False
        try:
            contender = make_contender(name, self.budget.deadline)
            found.what = contender.what
            if reason := contender.available(self.workload):
                raise NotAvailableError(reason)
            if self._late(name):
                raise NotAvailableError("the time limit was over")
            self._warm(contender, found)
            self._ready[name] = contender
        except Exception as error:
            too_large = is_out_of_memory(error)
            if not too_large:
                _failed(found, error)
        if too_large:  # outside the handler: the exception holds what the failed run had allocated
            self._alone(name)

    def _alone(self, name: str) -> None:
        """Try again with nobody else in memory, and take the samples at once."""
        found = self.measured[name]
        others = list(self._ready)
        for other in others:
            self._ready.pop(other).release()
        free_memory(self.workload.model.device)
        contender = make_contender(name, self.budget.deadline)
        try:
            self._warm(contender, found)
            self._ready[name] = contender
            found.interleaved = False
            found.notes.append("measured alone, as it did not fit in memory beside the others")
            self._time([name])
        except Exception as error:
            _failed(found, error)
        self._ready.pop(name, None)
        contender.release()
        free_memory(self.workload.model.device)
        for other in others:
            self._again(other)

    def _again(self, name: str) -> None:
        """Prepare once more one that was ready, and made room."""
        self._ready[name] = make_contender(name, self.budget.deadline)
        try:
            self._ready[name].prepare(self.workload)
            self._ready[name].run(self._batches[0])
        except Exception as error:
            self._ready.pop(name).release()
            _failed(self.measured[name], error)

    def _late(self, name: str) -> bool:
        """Whether the time limit is over for it. The first of a row is measured in any case."""
        return self.budget.over() and name != next(iter(self.measured))

    def _warm(self, contender: Contender, found: Measured) -> None:
        """Warm up, and take the answer that will be compared. What fails leaves nothing behind, no process either."""
        try:
            self._warm_up(contender, found)
        except BaseException:
            contender.release()
            raise

    def _warm_up(self, contender: Contender, found: Measured) -> None:
        workload = self.workload
        started = time.perf_counter()
        device = workload.model.device
        if device.type == "cpu":
            _load(contender, workload)
        free_memory(device)
        with peak_memory(device) as whole:
            contender.prepare(workload)
        if self._late(found.name):
            raise NotAvailableError("the time limit was over while it was prepared")
        peaks: list[Peak] = []

        def run() -> None:
            with peak_memory(device) as peak:
                contender.run(self._batches[0])
            peaks.append(peak)

        ran_before = getattr(contender, "ran_while_prepared", False)
        found.samples = warm_up(run, self.budget.seconds, over=self.budget.over, ran_before=ran_before)
        # of the last run alone: what preparing tried and gave back does not count, what it kept does
        found.peak = replace(peaks[-1], device_before=whole.device_before, host_before=whole.host_before)
        if (own_peak := getattr(contender, "own_peak", None)) is not None:
            found.peak, found.own_weights = own_peak, True
        found.answer = getattr(contender, "run_scored", contender.run)(self._compared)
        found.notes = list(getattr(contender, "notes", []))
        if found.samples.seconds:
            found.interleaved = False
            found.notes.append("one run by itself: so long a batch is not computed again between those of others")
        self.note(f"  {contender.name}: ready after {time.perf_counter() - started:.1f} s")

    # ---- timing -----------------------------------------------------------------------------------------------------

    def _time(self, names: Sequence[str]) -> None:
        """Latency in rounds of all, then the rate of those that keep several batches in flight."""
        device = self.workload.model.device

        def runner(contender: Contender) -> Callable[[int], float | None]:
            def run(number: int) -> float | None:
                contender.run(self._batches[number % len(self._batches)])
                return getattr(contender, "own_seconds", None)

            return run

        if device.type == "cuda":
            torch.cuda.synchronize(device)
        runs = {name: runner(self._ready[name]) for name in names if self._ready[name]}
        budget, samples = self.budget, {name: self.measured[name].samples for name in runs}
        lost = interleaved(runs, samples, budget.seconds, budget.max_repeats, over=budget.over)
        for name in runs:
            contender, found = self._ready[name], self.measured[name]
            latency = quantile(found.samples.seconds, 50)
            if latency is None:
                _failed(found, lost[name])
                continue
            if name in lost:
                found.notes.append(f"no further samples: {_one_line(lost[name])}")
            if name in lost or isinstance(contender, OneAtATime) or device.type == "cpu":
                found.rate, found.rate_from = latency.inverse(self.workload.users), "median latency"
            else:
                found.rate, found.rate_from = self._overlapped_rate(contender, latency)
            if (statistics := getattr(contender, "statistics", None)) is not None:
                found.statistics = statistics()

    def _overlapped_rate(self, contender: Contender, latency: Estimate) -> tuple[Estimate, str]:
        """Batches in flight need buffers of their own; where these do not fit, the rate is that of one at a time."""
        try:
            return self._rate(contender, latency.value), "batches in flight"
        except Exception as error:
            reason = "no memory for batches in flight" if is_out_of_memory(error) else _one_line(error)
        free_memory(self.workload.model.device)
        return latency.inverse(self.workload.users), f"median latency: {reason}"

    def _rate(self, contender: Contender, latency: float) -> Estimate:
        """Users a second over runs of many batches; of few when the time is over."""
        late = self.budget.over()
        count = 3 if late else max(3, min(50, int(self.budget.seconds / _ROUNDS_OF_THROUGHPUT / latency)))
        batches = [self._batches[number % len(self._batches)] for number in range(count)]
        for _answer in contender.run_many(batches[:3]):  # the first overlap makes buffers and graphs
            pass
        rates = []
        for _ in range(1 if late else _ROUNDS_OF_THROUGHPUT):
            start = time.perf_counter()
            for _answer in contender.run_many(batches):
                pass
            rates.append(count * self.workload.users / (time.perf_counter() - start))
        estimate = quantile(rates, 50)
        assert estimate is not None
        return estimate

    def _release_all(self) -> None:
        for contender in self._ready.values():
            contender.release()
        self._ready.clear()
        free_memory(self.workload.model.device)

    # ---- the record -------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The row: what was asked for, the work it takes, and each contender's figures."""
        workload = self.workload
        return {
            **describe_workload(workload),
            "comparison": self._facts,
            "contenders": [self._contender_json(found) for found in self.measured.values()],
        }

    def _contender_json(self, found: Measured) -> dict[str, Any]:
        record: dict[str, Any] = {"name": found.name, "what": found.what, "status": found.status}
        if found.status != "ok":
            return {**record, "reason": found.reason}
        workload, parity = self.workload, found.parity
        latency = quantile(found.samples.seconds, 50)
        assert latency is not None and found.rate is not None
        users_s = found.rate
        tokens = workload.batch(0).tokens / workload.users
        work = prefill_work(workload, workload.users) + decode_work(workload, workload.users)
        on_gpu = workload.model.device.type == "cuda"
        shared_weights = 0 if found.own_weights else self._weights
        return {
            **record,
            "latency_ms": found.samples.summary(),
            "users_per_s": users_s.to_json(),
            "users_per_s_from": found.rate_from,
            "prompt_tokens_per_s": users_s.scaled(tokens).to_json(),
            "device_peak_bytes": shared_weights + (found.peak.device_own or 0) if on_gpu else None,
            "device_own_bytes": found.peak.device_own,
            "host_peak_bytes": found.peak.host,
            "host_own_bytes": found.peak.host_own,
            "tflops": work.flops / latency.value / 1e12,
            "tbs": work.bytes / latency.value / 1e12,
            "parity": parity and parity.to_json(),
            "interleaved": found.interleaved,
            "notes": found.notes,
            "statistics": found.statistics,
        }


def describe_workload(workload: Workload) -> dict[str, Any]:
    """What a row asks for, and the least work that it takes."""
    users = workload.users
    prefill, decode = prefill_work(workload, users), decode_work(workload, users)
    return {
        "model": workload.model.name,
        "dtype": workload.model.dtype,
        "catalog": workload.catalog.name,
        "items": workload.catalog.trie.num_items,
        "context": workload.context,
        "users": users,
        "beam": workload.search.beam,
        "top_k": workload.search.top_k,
        "score_over": workload.search.score_over,
        "shared_prefix": workload.shared_prefix,
        "prompts": "given" if workload.prompts else "synthetic",
        "rows_a_level": rows_a_level(workload),
        "work": {
            "prefill_flops": prefill.flops,
            "prefill_bytes": prefill.bytes,
            "decode_flops": decode.flops,
            "decode_bytes": decode.bytes,
        },
        "kv_cache_bytes": kv_cache_bytes(workload, users),
        "weight_bytes": workload.model.bytes,
    }


_LOADED: set[str] = set()


def _load(contender: Contender, workload: Workload) -> None:
    """Use a contender once on next to nothing: the libraries and kernels that a process loads with its first use would
    else count as memory of the first row."""
    if contender.name in _LOADED:
        return
    _LOADED.add(contender.name)
    search = replace(workload.search, beam=min(4, workload.search.beam), top_k=1)
    small = replace(workload, users=1, search=search)
    contender.prepare(small)
    contender.run(small.batch(0))
    contender.release()


def _failed(found: Measured, error: Exception) -> None:
    """Why a contender has no figures."""
    if isinstance(error, NotAvailableError):
        found.status, found.reason = "not run", ": ".join(part for part in (error.what, error.hint) if part)
    elif is_out_of_memory(error):
        found.status, found.reason = "out of memory", ""
    else:
        found.status, found.reason = "failed", _one_line(error)


def _one_line(error: BaseException) -> str:
    text = error.what if isinstance(error, XgrError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]

"""One row of the benchmark: every contender on one workload, answers first, then time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from xgr_engine.bench.baselines.base import Contender, NotAvailableError, make_contender
from xgr_engine.bench.measure import Budget
from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.parity import judge
from xgr_engine.bench.row_record import Measured, row_record
from xgr_engine.bench.row_timing import compared_batch, take_samples, warm_and_answer
from xgr_engine.bench.workloads import Workload
from xgr_engine.xschedule.engines import is_out_of_memory


class Row:
    """Measures the contenders named on one workload. :meth:`measure` does it all; nothing stays prepared."""

    def __init__(self, workload: Workload, names: Sequence[str], budget: Budget, note: Callable[[str], None]) -> None:
        self.workload = workload
        self.budget = budget
        self.note = note
        self.measured = {name: Measured(name) for name in names}
        self._ready: dict[str, Contender] = {}

    def measure(self) -> dict[str, Any]:
        """All contenders: an answer, warm-up, interleaved samples, rate; then the answers beside the definition's.

        Returns:
            The row as JSON.
        """
        free_memory(self.workload.model.device)
        try:
            for name in self.measured:
                self._prepare(name)
            take_samples(self._ready, self.measured, self.workload, self.budget)
        finally:
            self._release_all()
        comparison = self._judge()
        return row_record(self.workload, comparison, self.measured.values())

    def _prepare(self, name: str) -> None:
        """Prepare, warm up and answer. What does not fit beside the others is measured alone."""
        found = self.measured[name]
        try:
            contender = make_contender(name, self.budget.deadline)
            found.what = contender.what
            if reason := contender.available(self.workload):
                raise NotAvailableError(reason)
            if self._late(name):
                raise NotAvailableError("the time limit had passed")
            self._warm(contender, found)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                found.fail(error)
                return
        self._alone(name)  # outside the handler: the exception holds what the failed run had allocated

    def _alone(self, name: str) -> None:
        """Try again with nobody else in memory, and take the samples at once."""
        found, others = self.measured[name], list(self._ready)
        self._release_all()
        try:
            self._warm(make_contender(name, self.budget.deadline), found)
            found.interleaved = False
            found.notes.append("measured alone, because it did not fit in memory alongside the others")
            take_samples(self._ready, self.measured, self.workload, self.budget)
        except Exception as error:
            found.fail(error)
        self._release_all()
        for other in others:
            self._prepare_again(other)

    def _prepare_again(self, name: str) -> None:
        """Restore a contender that was ready and had to make room."""
        self._ready[name] = make_contender(name, self.budget.deadline)
        try:
            self._ready[name].prepare(self.workload)
            self._ready[name].run(self.workload.batch(0))
        except Exception as error:
            self._ready.pop(name).release()
            self.measured[name].fail(error)

    def _late(self, name: str) -> bool:
        """Whether the time limit rules it out. The first contender of a row is measured in any case."""
        return self.budget.over() and name != next(iter(self.measured))

    def _warm(self, contender: Contender, found: Measured) -> None:
        """Make it ready. What fails leaves nothing behind, no process either."""
        started = time.perf_counter()
        try:
            warm_and_answer(contender, found, self.workload, self.budget, lambda: self._late(found.name))
            self.note(f"  {contender.name}: ready after {time.perf_counter() - started:.1f} s")
        except BaseException:
            contender.release()
            raise
        self._ready[found.name] = contender

    def _release_all(self) -> None:
        for contender in self._ready.values():
            contender.release()
        self._ready.clear()
        free_memory(self.workload.model.device)

    def _judge(self) -> dict[str, Any]:
        """Compare all answers at once, after every contender was released.

        Returns:
            What the definition allowed for, or why there is none; empty where nobody answered.
        """
        answers = {name: found.answer for name, found in self.measured.items() if found.answer is not None}
        if not answers:
            return {}
        try:
            judged = judge(self.workload, compared_batch(self.workload), answers)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            comparison = {"reason": "the definition in float32 ran out of memory"}
        else:
            comparison = judged.facts
            for name, parity in judged.parity.items():
                self.measured[name].parity = parity
        free_memory(self.workload.model.device)
        return comparison

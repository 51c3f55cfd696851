"""Batches on an engine: prepared, launched, settled. One that fails is halved until it works or the bad row is found.

The beam width is never touched: a batch that needs too much memory becomes two of half the users. A batch that raises
anything else is halved too, so that only those rows are lost that make the engine raise, and they can be named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.errors import XgrError
from xgr_engine.options import Exclusion
from xgr_engine.xschedule.engines import (
    BatchOutcome,
    Engine,
    IntArray,
    Span,
    StagedEngine,
    describe,
    is_device_lost,
    is_out_of_memory,
    numbers,
    staged,
)
from xgr_engine.xschedule.latency import LatencyModel
from xgr_engine.xschedule.results import Distinct, Fault, Ranked, in_order, repeat
from xgr_engine.xschedule.scheduler import BatchLimits, Predict, form_batches, split_too_long
from xgr_engine.xschedule.trace import Trace

IN_FLIGHT = 2


class BatchError(XgrError):
    """The engine raised while it computed rows; ``prompts`` holds their numbers among the window's prompts."""

    def __init__(self, prompts: list[int], error: Exception, name: str) -> None:
        lost = is_device_lost(error)
        super().__init__(
            f"{name}: the computation raised {describe(error)}",
            why="after such an error the GPU computes nothing more for this process" if lost else "--on-error is fail",
            hint="start the run again; if it fails at the same rows, please report it"
            if lost
            else "with --on-error reject such rows are set aside and the run goes on",
        )
        self.prompts = prompts


@dataclass(frozen=True)
class Halving:
    """Memory was short in spite of the plan: a batch of ``users`` with ``tokens`` prompt tokens was cut in two."""

    users: int
    tokens: int
    detail: str


@dataclass(frozen=True)
class Batch:
    """Prompts that are computed together, as int64 ``numbers`` of prompts in ``window``, longest first."""

    window: Window
    numbers: NDArray[np.int64]

    @property
    def users(self) -> int:
        return len(self.numbers)

    @property
    def tokens(self) -> int:
        return int(self.window.lengths[self.numbers].sum())

    def halves(self) -> tuple[Batch, Batch]:
        """Two batches of half the users."""
        middle = (self.users + 1) // 2
        return Batch(self.window, self.numbers[:middle]), Batch(self.window, self.numbers[middle:])


class Window:
    """Prompts that are planned together, and what has become of them. Equal ones are computed once.

    Args:
        prompts: token ids of each prompt.
        excluded: what each must not get.
        limits: of a batch.
        name: (numbers of prompts) -> text that names them in an error.
    """

    def __init__(
        self,
        prompts: Sequence[IntArray],
        excluded: Sequence[Exclusion],
        limits: BatchLimits,
        name: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.total = len(prompts)
        self.name = name or (lambda prompts: f"prompt {numbers(prompts)}")
        self._distinct = Distinct.of(prompts, excluded)
        self.prompts = [prompts[number] for number in self._distinct.first]
        self.excluded = [excluded[number] for number in self._distinct.first]
        self.lengths = np.array([len(prompt) for prompt in self.prompts], np.int64)
        self._limits = limits
        self._order, too_long = split_too_long(self.lengths, limits)
        self._done: list[tuple[NDArray[np.int64], BatchOutcome]] = []
        self._batches = 0
        self._seconds: list[float] = []
        self._failed: dict[int, Fault] = {
            number: (
                "too-much-memory",
                f"{self.lengths[number]} prompt tokens, and memory was planned for {limits.longest_prompt}",
            )
            for number in too_long
        }

    def batches(self, predict: Predict | None = None, seconds: float = np.inf) -> Iterator[Batch]:
        """Batches, each cut when it is asked for; see :func:`form_batches`."""
        for cut in form_batches(self._order, self.lengths, self._limits, predict, seconds):
            yield Batch(self, cut)

    def nothing(self) -> Batch:
        """An empty batch, for a window that has nothing to compute."""
        return Batch(self, np.empty(0, np.int64))

    @property
    def planned(self) -> int:
        """How many prompts all batches hold together."""
        return len(self._order)

    def originals(self, batch: Batch) -> list[int]:
        """Numbers of a batch's prompts among all prompts given, ascending; of equal ones, the first."""
        return sorted(self._distinct.first[batch.numbers].tolist())

    def add(self, settled: Settled) -> None:
        """What became of one batch."""
        self._batches += 1
        self._done += settled.done
        self._failed.update(settled.failed)
        self._seconds += settled.seconds

    @property
    def complete(self) -> bool:
        """Whether every prompt has a result or a fault."""
        return sum(len(numbers) for numbers, _ in self._done) + len(self._failed) == len(self.prompts)

    def ranked(self) -> Ranked:
        """Results in the order of all prompts given."""
        ranked = in_order(len(self.prompts), self._done, self._failed, self._batches, self._seconds)
        return ranked if len(self.prompts) == self.total else repeat(ranked, self._distinct.kind)


@dataclass
class Flight:
    """A batch on its way through the engine's steps, with what each returned; ``error`` is what one of them raised."""

    batch: Batch
    ready: Any = None
    pending: Any = None
    error: Exception | None = None


@dataclass
class Settled:
    """What became of a batch.

    Attributes:
        done: (numbers of prompts, their results), one entry for the batch, or one for each part that was retried.
        failed: number of a prompt -> why it has no result.
        seconds: that the batch took; empty if it was halved.
    """

    done: list[tuple[NDArray[np.int64], BatchOutcome]] = field(default_factory=list)
    failed: dict[int, Fault] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


class BatchWorker:
    """Takes batches through the engine's three steps.

    Args:
        reject_errors: a row that makes the engine raise is recorded as failed; otherwise BatchError is raised.
        latency: learns from every batch computed as planned.

    Attributes:
        halvings: every time memory was short; batch_seconds: of each batch computed as planned.
    """

    def __init__(
        self,
        engine: Engine | StagedEngine,
        *,
        reject_errors: bool,
        latency: LatencyModel | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._engine = staged(engine)
        self._reject_errors = reject_errors
        self._latency = latency or LatencyModel()
        self._trace = trace or Trace()
        self._isolate = True
        self.halvings: list[Halving] = []
        self.batch_seconds: list[float] = []

    def prepare(self, batch: Batch) -> Flight:
        """Make and upload the batch's inputs. What it raises is kept for :meth:`settle`."""
        flight = Flight(batch)
        try:
            with self._trace.span("prepare", users=batch.users, tokens=batch.tokens):
                flight.ready = self._engine.prepare(*_inputs(batch))
        except Exception as error:
            flight.error = _without_frames(error)
        return flight

    def launch(self, flight: Flight) -> Flight:
        """Queue the batch (on a CPU: compute it). What it raises is kept for :meth:`settle`."""
        if flight.error is None and flight.batch.users:
            try:
                with self._trace.span("submit", users=flight.batch.users, tokens=flight.batch.tokens):
                    flight.pending = self._engine.launch(flight.ready)
            except Exception as error:
                flight.error = _without_frames(error)
        flight.ready = None
        return flight

    def settle(self, flight: Flight) -> Settled:
        """Wait for the batch's result; a batch that failed is halved and computed here.

        Raises:
            BatchError: a row makes the engine raise and errors are not to be rejected, or the device is lost.
        """
        found, batch, error = Settled(), flight.batch, flight.error
        if not batch.users:
            return found
        if error is None:
            try:
                with self._trace.span("fetch", users=batch.users):
                    outcome = self._engine.collect(flight.pending)
                found.seconds.append(self._measure(batch, self._engine.span(flight.pending)))
                found.done.append((batch.numbers, outcome))
            except Exception as problem:
                error = _without_frames(problem)
        flight.pending = None
        if error is not None:
            self._halve(batch, error, found)
            if batch.users > 1 and len(found.failed) == batch.users:
                self._isolate = False  # every row is bad: halving all later batches as well would take hours
        return found

    def _measure(self, batch: Batch, span: Span) -> float:
        seconds = span.end - span.start
        self.batch_seconds.append(seconds)
        self._latency.observe(batch.tokens, batch.users, seconds)
        track = "CPU" if span.lane is None else f"GPU lane {span.lane}"
        self._trace.add(track, "compute", span.start, span.end, users=batch.users, tokens=batch.tokens)
        return seconds

    def _halve(self, batch: Batch, error: Exception, found: Settled) -> None:
        memory = is_out_of_memory(error)
        if is_device_lost(error):
            raise _batch_error(batch, error)
        if batch.users == 1 or not (memory or self._isolate):
            if not self._reject_errors:
                raise _batch_error(batch, error)
            reason = "too-much-memory" if memory else "engine-error"
            found.failed.update((int(number), (reason, describe(error))) for number in batch.numbers)
            return
        if memory:
            self.halvings.append(Halving(batch.users, batch.tokens, describe(error)))
        for half in batch.halves():
            try:
                with self._trace.span("retry", users=half.users, tokens=half.tokens):
                    ready = self._engine.prepare(*_inputs(half))
                    found.done.append((half.numbers, self._engine.collect(self._engine.launch(ready))))
                continue
            except Exception as problem:
                again = _without_frames(problem)
            self._halve(half, again, found)


def _batch_error(batch: Batch, error: Exception) -> BatchError:
    prompts = batch.window.originals(batch)
    return BatchError(prompts, error, batch.window.name(prompts))


def _inputs(batch: Batch) -> tuple[list[IntArray], list[Exclusion]]:
    window = batch.window
    return [window.prompts[at] for at in batch.numbers], [window.excluded[at] for at in batch.numbers]


def _without_frames(error: Exception) -> Exception:
    """The error without its traceback: the frames hold the batch's tensors, whose memory the next try needs."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def compute_batches(
    engine: Engine | StagedEngine,
    prompts: Sequence[IntArray],
    excluded: Sequence[Exclusion],
    limits: BatchLimits,
    *,
    reject_errors: bool,
    in_flight: int = IN_FLIGHT,
) -> Ranked:
    """Computes prompts that are in memory, in the calling thread: planned batches, ``in_flight`` at a time.

    Args:
        reject_errors: as of :class:`BatchWorker`.

    Returns:
        Results in the order of the prompts.

    Raises:
        BatchError: as :meth:`BatchWorker.settle`.
    """
    window = Window(prompts, excluded, limits)
    worker = BatchWorker(engine, reject_errors=reject_errors)
    waiting: deque[Flight] = deque()

    def settle() -> None:
        window.add(worker.settle(waiting.popleft()))

    for batch in window.batches():
        flight = worker.prepare(batch)
        while len(waiting) >= in_flight:
            settle()
        waiting.append(worker.launch(flight))
        if flight.error is not None:  # memory may be short: nothing else is launched while it is tried in halves
            while waiting:
                settle()
    while waiting:
        settle()
    return window.ranked()

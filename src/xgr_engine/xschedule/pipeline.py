"""read | tokenise | plan and upload | compute | fetch | write: one thread per step, with bounded queues between them.

A *piece* is a run of input rows whose prompts are planned together. No batch holds rows of two pieces, and pieces are
written in order. Computing happens in the caller's thread; batches of the next piece follow those of this one without a
gap, with ``in_flight`` of them on the device at a time.

A step that fails takes nothing more. Everything that has already passed it is finished and written, and then the error
is raised in the caller's thread: so what is written is always a run of whole pieces from the first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from xgr_engine.options import Exclusion
from xgr_engine.xschedule.channel import CancelledError, Channel
from xgr_engine.xschedule.engines import Engine, IntArray, StagedEngine, numbers
from xgr_engine.xschedule.latency import LatencyModel
from xgr_engine.xschedule.results import Ranked, percentiles
from xgr_engine.xschedule.scheduler import BatchLimits
from xgr_engine.xschedule.trace import Trace
from xgr_engine.xschedule.worker import IN_FLIGHT, BatchWorker, Flight, Halving, Window


class Prompts(Protocol):
    """A prepared piece: what the engine needs of it."""

    @property
    def prompts(self) -> Sequence[IntArray]: ...
    @property
    def excluded(self) -> Sequence[Exclusion]: ...
    @property
    def rows(self) -> int:
        """Input rows of the piece, those without a prompt included."""


Work = TypeVar("Work")
Read = TypeVar("Read")
Ready = TypeVar("Ready", bound=Prompts)


def _nothing(work: object) -> None:
    """The safe point of a caller that wants none."""


def _name_prompts(work: object, ready: object, prompts: list[int]) -> str:
    return f"{work}: prompt {numbers(prompts)}"


@dataclass(frozen=True)
class Stages(Generic[Work, Read, Ready]):
    """The steps of a piece that the caller supplies. Each runs in a thread of its own, piece by piece.

    Attributes:
        read: reads the input rows of a piece.
        prepare: makes prompts and exclusions of them.
        write: takes the results, in the order of the prompts.
        name_rows: text that names some prompts of a piece (by number) in an error.
    """

    read: Callable[[Work], Read]
    prepare: Callable[[Work, Read], Ready]
    write: Callable[[Work, Ready, Ranked], None]
    name_rows: Callable[[Work, Ready, list[int]], str] = _name_prompts


@dataclass(frozen=True)
class Settings:
    """How a pipeline runs.

    Attributes:
        reject_errors: a row that makes the engine raise is recorded as failed; otherwise the run fails.
        slo_seconds: batches are closed before they are expected to take longer; None: by capacity alone.
        in_flight: batches on the device at a time.
        ahead: pieces between two steps, at most.
        stop: once set, no further batch is launched; what is in flight is finished, and whole pieces are written.
        on_rows: called in the caller's thread with the number of rows that are done since the last call.
        safe_point: called in the caller's thread before each batch, with its piece, and now and then with None while
            there is nothing to launch. What it raises ends the run as an error of a step does.
        trace: collects what each thread does.
    """

    reject_errors: bool = True
    slo_seconds: float | None = None
    in_flight: int = IN_FLIGHT
    ahead: int = 2
    stop: threading.Event = field(default_factory=threading.Event)
    on_rows: Callable[[int], None] = lambda rows: None
    safe_point: Callable[[Any], None] = _nothing
    trace: Trace = field(default_factory=Trace)


@dataclass
class Summary:
    """What a pipeline did.

    Attributes:
        pieces: how many were written.
        stopped: whether ``stop`` ended the run before the last piece.
        batches: how many were computed.
        repeats: prompts answered with the result of an equal one.
        seconds: from the first read to the last write.
        cpu_seconds: processor time of all threads of the process meanwhile.
        starved: seconds in which the caller's thread waited for a batch.
        batch_seconds: of each batch that was computed as planned.
        halvings: one for every time that memory was short.
        latency: the cost model's report.
    """

    pieces: int = 0
    stopped: bool = False
    batches: int = 0
    repeats: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    starved: float = 0.0
    batch_seconds: list[float] = field(default_factory=list)
    halvings: list[Halving] = field(default_factory=list)
    latency: dict[str, Any] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Seconds in which there was something to compute."""
        return max(0.0, self.seconds - self.starved)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "pieces": self.pieces,
            "batches": self.batches,
            "repeated_prompts": self.repeats,
            "batch_seconds": percentiles(self.batch_seconds),
            "starved_seconds": round(self.starved, 3),
            "out_of_memory": [vars(halving) for halving in self.halvings],
            "latency": self.latency,
        }


@dataclass
class _Piece(Generic[Work, Ready]):
    work: Work
    ready: Ready
    window: Window


@dataclass
class _Step(Generic[Work, Ready]):
    """A batch of a piece; without prompts where a piece has nothing to compute."""

    piece: _Piece[Work, Ready]
    flight: Flight


class Pipeline(Generic[Work, Read, Ready]):
    """Runs pieces through the stages; use once.

    Args:
        limits: of a batch.
    """

    def __init__(
        self,
        engine: Engine | StagedEngine,
        limits: BatchLimits,
        stages: Stages[Work, Read, Ready],
        settings: Settings | None = None,
    ) -> None:
        self._limits = limits
        self._stages = stages
        self._settings = settings or Settings()
        self._trace = self._settings.trace
        self._latency = LatencyModel(limits.level_rows)
        self._worker = BatchWorker(
            engine,
            reject_errors=self._settings.reject_errors,
            latency=self._latency,
            trace=self._trace,
        )
        self._finished: deque[int] = deque()
        self._summary = Summary(batch_seconds=self._worker.batch_seconds, halvings=self._worker.halvings)
        self._failure: BaseException | None = None
        ahead = self._settings.ahead
        self._rows: Channel[tuple[Work, Read]] = Channel(ahead)
        self._prompts: Channel[tuple[Work, Ready]] = Channel(ahead)
        self._batches: Channel[_Step[Work, Ready]] = Channel(self._settings.in_flight)
        self._flying: Channel[_Step[Work, Ready]] = Channel(self._settings.in_flight)
        self._results: Channel[tuple[Work, Ready, Ranked]] = Channel(ahead)

    def run(self, pieces: Iterable[Work]) -> Summary:
        """To the end, to a stop, or to an error.

        Raises:
            BaseException: the first error of any step, after everything before it was written.
        """
        start, start_cpu = time.perf_counter(), time.process_time()
        rows, prompts, batches, flying, results = (
            self._rows, self._prompts, self._batches, self._flying, self._results,
        )  # fmt: skip
        threads = [
            self._thread("read", self._until_stopped(pieces), self._read, None, rows),
            self._thread("tokenise", rows.take(), self._prepare, rows, prompts),
            self._thread("plan and upload", prompts.take(), self._plan, prompts, batches),
            self._thread("fetch", flying.take(), self._fetch, flying, results),
            self._thread("write", results.take(), self._write, results, None),
        ]
        for thread in threads:
            thread.start()
        _serve(self._next_batches(), self._launch, batches, flying, self._note_failure)
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                self._report()
        self._report()
        self._summary.seconds = time.perf_counter() - start
        self._summary.cpu_seconds = time.process_time() - start_cpu
        self._summary.latency = self._latency.report()
        if self._failure is not None:
            raise self._failure
        return self._summary

    @property
    def trace(self) -> Trace:
        """The trace of the settings."""
        return self._trace

    @property
    def summary(self) -> Summary:
        """What was done so far; complete after :meth:`run`, also where that raised."""
        return self._summary

    def _thread(
        self,
        name: str,
        source: Iterable[Any],
        work: Callable[[Any], Iterable[Any]],
        inbox: Channel[Any] | None,
        outbox: Channel[Any] | None,
    ) -> threading.Thread:
        given = (source, work, inbox, outbox, self._note_failure)
        # daemon: a second signal must be able to end the process at once
        return threading.Thread(target=_serve, args=given, name=name, daemon=True)

    def _note_failure(self, error: BaseException) -> None:
        """Keeps the first error that reaches the end of the pipeline."""
        if self._failure is None:
            self._failure = error

    # ---- one step each ----------------------------------------------------------------------------------------------

    def _until_stopped(self, pieces: Iterable[Work]) -> Iterator[Work]:
        for piece in pieces:
            if self._settings.stop.is_set():
                self._summary.stopped = True
                return
            yield piece

    def _read(self, work: Work) -> Iterator[tuple[Work, Read]]:
        with self._trace.span("read"):
            rows = self._stages.read(work)
        yield work, rows

    def _prepare(self, item: tuple[Work, Read]) -> Iterator[tuple[Work, Ready]]:
        with self._trace.span("tokenise"):
            ready = self._stages.prepare(*item)
        yield item[0], ready

    def _plan(self, item: tuple[Work, Ready]) -> Iterator[_Step[Work, Ready]]:
        work, ready = item
        with self._trace.span("plan"):
            name = partial(self._stages.name_rows, work, ready)
            window = Window(ready.prompts, ready.excluded, self._limits, name)
        piece = _Piece(work, ready, window)
        if window.complete:
            yield _Step(piece, Flight(window.nothing()))
        slo = self._settings.slo_seconds
        for batch in window.batches(self._latency.predict, np.inf if slo is None else slo):
            yield _Step(piece, self._worker.prepare(batch))

    def _next_batches(self) -> Iterator[_Step[Work, Ready]]:
        """Batches until the end or a stop, and the time spent waiting for them."""
        waiting = time.perf_counter()
        for step in self._batches.take(self._idle):
            self._summary.starved += time.perf_counter() - waiting
            if self._settings.stop.is_set():
                self._summary.stopped = True
                return
            self._settings.safe_point(step.piece.work)
            yield step
            waiting = time.perf_counter()

    def _launch(self, step: _Step[Work, Ready]) -> Iterator[_Step[Work, Ready]]:
        self._flying.wait_for_room(self._report)
        self._worker.launch(step.flight)
        yield step
        self._report()
        if step.flight.error is not None:
            # memory may be short: nothing else is launched while the batch is tried again in halves
            self._flying.wait_until_empty(self._report)

    def _fetch(self, step: _Step[Work, Ready]) -> Iterator[tuple[Work, Ready, Ranked]]:
        window = step.piece.window
        settled = self._worker.settle(step.flight)
        if step.flight.batch.users:
            window.add(settled)
            self._summary.batches += 1
            self._finished.append(step.flight.batch.users)
        if window.complete:
            ranked = window.ranked()
            self._summary.repeats += ranked.repeats
            self._finished.append(step.piece.ready.rows - window.planned)
            yield step.piece.work, step.piece.ready, ranked

    def _write(self, item: tuple[Work, Ready, Ranked]) -> Iterator[None]:
        with self._trace.span("write"):
            self._stages.write(*item)
        self._summary.pieces += 1
        return iter(())

    # ---- in the caller's thread -------------------------------------------------------------------------------------

    def _report(self) -> None:
        while self._finished:
            self._settings.on_rows(self._finished.popleft())

    def _idle(self) -> None:
        self._report()
        self._settings.safe_point(None)


def _serve(
    source: Iterable[Any],
    work: Callable[[Any], Iterable[Any]],
    inbox: Channel[Any] | None,
    outbox: Channel[Any] | None,
    fail: Callable[[BaseException], None],
) -> None:
    """Runs one step to the end of its source.

    An error travels down the pipeline behind everything that came before it; the steps above find that nothing more is
    taken from them.
    """
    error: BaseException | None = None
    try:
        for item in source:
            for result in work(item):
                if outbox is not None:
                    outbox.put(result)
    except CancelledError:
        pass  # the error that made somebody further down give up is on its way
    except BaseException as problem:
        error = problem
    if inbox is not None:
        inbox.cancel()
    if outbox is not None:
        outbox.close(error)
    elif error is not None:
        fail(error)

"""What the scheduler requires of an engine: a batch in three steps, or in one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xgr_engine.options import Exclusion

IntArray = NDArray[np.int32]


class BatchOutcome(Protocol):
    """Ranked items of a batch's users, back to back: what ``xbeam.ranking.BatchResult`` has."""

    @property
    def counts(self) -> IntArray: ...
    @property
    def item_rows(self) -> IntArray: ...
    @property
    def leaves(self) -> IntArray: ...
    @property
    def scores(self) -> NDArray[np.float32]: ...
    @property
    def short(self) -> NDArray[np.bool_]: ...


class Engine(Protocol):
    """Computes a batch in one call."""

    def run(self, prompts: list[IntArray], excluded: list[Exclusion]) -> BatchOutcome: ...
    def reserve(self, tokens: int, users: int) -> None: ...


class Span(Protocol):
    """When a batch was computed, in seconds of ``time.perf_counter``, and in which lane; None on a CPU."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def lane(self) -> int | None: ...


@dataclass(frozen=True)
class HostSpan:
    """A :class:`Span` of the calling thread."""

    start: float
    end: float
    lane: int | None = None


class StagedEngine(Protocol):
    """Computes a batch in three steps, which different threads may call: what ``recommender.Recommender`` does.

    ``prepare`` makes and uploads the batch's inputs; ``launch`` queues it (on a CPU: computes it); ``collect`` waits
    for the result and ranks it. ``span`` says, after ``collect``, when the device worked on it.
    """

    def prepare(self, prompts: list[IntArray], excluded: list[Exclusion]) -> Any: ...
    def launch(self, ready: Any) -> Any: ...
    def collect(self, pending: Any) -> BatchOutcome: ...
    def span(self, pending: Any) -> Span: ...


class OneStep:
    """Makes a :class:`StagedEngine` of a plain :class:`Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self, prompts: list[IntArray], excluded: list[Exclusion]) -> Any:
        """Nothing to prepare."""
        return prompts, excluded

    def launch(self, ready: Any) -> Any:
        """All of the work."""
        start = time.perf_counter()
        outcome = self._engine.run(*ready)
        return outcome, HostSpan(start, time.perf_counter())

    def collect(self, pending: Any) -> BatchOutcome:
        """What was computed."""
        outcome: BatchOutcome = pending[0]
        return outcome

    def span(self, pending: Any) -> Span:
        """When it was computed."""
        span: Span = pending[1]
        return span


def staged(engine: Engine | StagedEngine) -> StagedEngine:
    """The engine itself if it has the three steps, else in a :class:`OneStep`."""
    return engine if hasattr(engine, "launch") else OneStep(engine)  # type: ignore[return-value]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had too little memory. Works without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def is_device_lost(error: BaseException) -> bool:
    """Whether the device is of no more use to this process: after such an error every later call fails too."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error) and not is_out_of_memory(error)


def describe(error: BaseException) -> str:
    """One line for a reject's detail."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def numbers(values: Sequence[int], most: int = 8) -> str:
    """``3, 5, 8``, or ``3, 5 and 9 more`` beyond ``most``."""
    shown = ", ".join(str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"

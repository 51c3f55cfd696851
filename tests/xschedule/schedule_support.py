"""A stand-in engine with the three steps, that sleeps, records when it did what, and fails on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xgr_engine.xbeam.ranking import BatchResult
from xgr_engine.xschedule.engines import HostSpan
from xgr_engine.xschedule.pipeline import Stages
from xgr_engine.xschedule.results import Ranked
from xgr_engine.xschedule.scheduler import BatchLimits

LIMITS = BatchLimits(tokens=40, rows=8, rows_per_user=1, longest_prompt=30)


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@dataclass
class FakeEngine:
    """Answers prompt p with items ``sum(p) + 0, 1, ...`` (as many as p has tokens, at most 3), ``rank`` scores.

    A device works on one batch at a time, ``seconds`` each, while the host goes on; ``fails`` is asked at ``where``
    (prepare, launch or collect) with the prompts of a batch and may raise.
    """

    seconds: float = 0.0
    where: str = "launch"
    fails: Callable[[list[Any]], None] = lambda prompts: None
    log: list[tuple[str, str, float, float]] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    flying: int = 0
    most_flying: int = 0
    free_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self, prompts: list[Any], excluded: list[Any]) -> Any:
        self._at("prepare", prompts)
        return prompts, excluded

    def launch(self, ready: Any) -> Any:
        self._at("launch", ready[0])
        with self.lock:
            self.batches.append([len(prompt) for prompt in ready[0]])
            self.flying += 1
            self.most_flying = max(self.most_flying, self.flying)
            start = max(time.perf_counter(), self.free_at)
            self.free_at = start + self.seconds
            return ready, start, self.free_at

    def collect(self, pending: Any) -> BatchResult:
        (prompts, excluded), _, end = pending
        time.sleep(max(0.0, end - time.perf_counter()))
        with self.lock:
            self.flying -= 1
        self._at("collect", prompts)
        return answer(prompts, excluded)

    def span(self, pending: Any) -> HostSpan:
        return HostSpan(pending[1], pending[2], 0)

    def _at(self, step: str, prompts: list[Any]) -> None:
        now = time.perf_counter()
        with self.lock:
            self.log.append((step, threading.current_thread().name, now, now))
        if step == self.where:
            self.fails(prompts)


def answer(prompts: Sequence[Any], excluded: Sequence[Any]) -> BatchResult:
    """What the stand-in engine returns for a batch."""
    rows, counts = [], []
    for prompt, without in zip(prompts, excluded, strict=True):
        found = [int(prompt.sum()) + step for step in range(min(3, len(prompt)))]
        rows.append([item for item in found if item not in without])
        counts.append(len(rows[-1]))
    flat = np.array([item for row in rows for item in row], np.int32)
    scores = np.array([-float(rank) for count in counts for rank in range(count)], np.float32)
    short = np.array([count < 3 for count in counts])
    return BatchResult(np.array(counts, np.int32), flat, flat + 1, scores, short)


@dataclass(frozen=True)
class Piece:
    """A prepared piece: prompts and what each must not get."""

    prompts: list[np.ndarray]
    excluded: list[np.ndarray]

    @property
    def rows(self) -> int:
        return len(self.prompts)


def make_piece(seed: int, count: int, longest: int = 12) -> Piece:
    """Random prompts of 1 to ``longest`` tokens."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, 1000, generator.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]
    return Piece(prompts, [np.empty(0, np.int32)] * count)


def expected(piece: Piece) -> list[list[int]]:
    """Items of each prompt, computed one by one."""
    return [answer([p], [e]).item_rows.tolist() for p, e in zip(piece.prompts, piece.excluded, strict=True)]


def lists(ranked: Ranked) -> list[list[int]]:
    """Items of each prompt of a result."""
    return [part.tolist() for part in np.split(ranked.item_rows, ranked.offsets[1:-1])]


@dataclass
class Job:
    """Pieces with stages that take time and write down when; ``broken`` names a step and the piece it raises at."""

    pieces: list[Piece]
    seconds: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, int] | None = None
    log: list[tuple[str, int, float, float]] = field(default_factory=list)
    written: list[tuple[int, Ranked]] = field(default_factory=list)

    @property
    def stages(self) -> Stages[int, int, Piece]:
        return Stages(self.read, self.prepare, self.write)

    def read(self, number: int) -> int:
        self._step("read", number)
        return number

    def prepare(self, number: int, rows: int) -> Piece:
        self._step("prepare", number)
        return self.pieces[rows]

    def write(self, number: int, ready: Piece, ranked: Ranked) -> None:
        assert ready is self.pieces[number]
        self._step("write", number)
        self.written.append((number, ranked))

    def _step(self, name: str, number: int) -> None:
        start = time.perf_counter()
        time.sleep(self.seconds.get(name, 0.0))
        if self.broken == (name, number):
            raise ValueError(f"{name} of piece {number}")
        self.log.append((name, number, start, time.perf_counter()))

"""The overlapped pipeline with a stand-in engine: order, overlap, back-pressure, errors, stop, progress, trace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schedule_support import LIMITS, FakeEngine, Job, Piece, answer, expected, lists, make_piece

from xgr_engine.xschedule.engines import OneStep
from xgr_engine.xschedule.pipeline import Pipeline, Settings
from xgr_engine.xschedule.trace import Trace
from xgr_engine.xschedule.worker import BatchError, compute_batches


def run(job: Job, engine: Any, **settings: Any) -> Any:
    pipeline = Pipeline(engine, LIMITS, job.stages, Settings(**settings))
    return pipeline.run(range(len(job.pieces)))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_results_come_back_in_the_order_of_pieces_and_prompts() -> None:
    job = Job([make_piece(seed, count) for seed, count in enumerate([7, 0, 1, 30, 0, 13])])
    engine = FakeEngine()
    done: list[int] = []
    summary = run(job, engine, on_rows=done.append)
    assert [number for number, _ in job.written] == [0, 1, 2, 3, 4, 5]
    for number, ranked in job.written:
        assert lists(ranked) == expected(job.pieces[number]) or not job.pieces[number].prompts
    assert summary.pieces == 6 and summary.batches == len(engine.batches) == sum(r.batches for _, r in job.written)
    assert sum(done) == 51 and not summary.stopped
    assert engine.most_flying <= 2


def test_batches_hold_prompts_of_like_length_and_never_of_two_pieces() -> None:
    job = Job([make_piece(1, 21), make_piece(2, 17)])
    engine = FakeEngine()
    run(job, engine)
    sizes = sorted(len(prompt) for piece in job.pieces[:1] for prompt in piece.prompts)[::-1]
    first: list[int] = []
    while len(first) < 21:
        first += engine.batches.pop(0)
    assert first == sizes, "longest first, and the batches of the first piece end with its last prompt"


def test_a_plain_engine_gives_the_same_and_so_does_the_loop_in_memory() -> None:
    class Plain:
        def run(self, prompts: list[Any], excluded: list[Any]) -> Any:
            return answer(prompts, excluded)

        def reserve(self, tokens: int, users: int) -> None:
            pass

    piece = make_piece(5, 40)
    job = Job([piece])
    run(job, Plain())
    loop = compute_batches(FakeEngine(), piece.prompts, piece.excluded, LIMITS, reject_errors=False)
    assert lists(job.written[0][1]) == lists(loop) == expected(piece)
    assert isinstance(OneStep(Plain()).prepare([], []), tuple)


# ---- overlap -----------------------------------------------------------------------------------------------------


def test_every_step_works_while_the_device_computes() -> None:
    """Timeline: the run takes as long as its slowest step (the device), not the sum of all."""
    pieces = [make_piece(seed, 8) for seed in range(10)]
    job = Job(pieces, {"read": 0.03, "prepare": 0.03, "write": 0.03})
    engine = FakeEngine(seconds=0.05)
    start = time.perf_counter()
    run(job, engine)
    seconds = time.perf_counter() - start
    alone = 0.05 * len(engine.batches)
    one_after_the_other = sum(end - begin for _, _, begin, end in job.log) + alone
    assert seconds < 0.8 * one_after_the_other, "with overlap: filling and draining once, the device in between"
    spans = {(name, number): (begin, end) for name, number, begin, end in job.log}
    later = [number for number in range(3, 10) if spans["read", number][0] < spans["write", number - 2][1]]
    assert len(later) == 7, "a piece is read while the one two before it is still on its way"


def test_two_batches_are_in_flight_and_the_next_is_prepared_meanwhile() -> None:
    engine = FakeEngine(seconds=0.04)
    run(Job([make_piece(0, 64)]), engine)
    assert engine.most_flying == 2
    steps = [step for step, _, _, _ in engine.log]
    ahead = max(
        sum(step == "prepare" for step in steps[:at]) - sum(step == "collect" for step in steps[:at])
        for at in range(len(steps))
    )
    assert 3 <= ahead <= 2 + 2 + 2, "inputs of further batches stand ready, and not without bound"
    threads = {step: {name for s, name, _, _ in engine.log if s == step} for step in ("prepare", "launch", "collect")}
    assert threads == {"prepare": {"plan and upload"}, "launch": {"MainThread"}, "collect": {"fetch"}}


def test_a_slow_writer_holds_the_reader_back() -> None:
    """Host memory stays bounded: pieces read and not yet written are few, however many there are."""
    job = Job([make_piece(seed, 3) for seed in range(40)], {"write": 0.02})
    run(job, FakeEngine())
    events = sorted([(end, 1) for name, _, _, end in job.log if name == "read"]
                    + [(end, -1) for name, _, _, end in job.log if name == "write"])  # fmt: skip
    held = np.cumsum([change for _, change in events])
    assert held.max() <= 14, "two between each pair of steps, and one in each step"


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["read", "prepare"])
def test_an_error_reaches_the_caller_after_everything_before_it_was_written(step: str) -> None:
    job = Job([make_piece(seed, 5) for seed in range(9)], {"write": 0.01}, broken=(step, 4))
    with pytest.raises(ValueError, match=f"{step} of piece 4"):
        run(job, FakeEngine(seconds=0.005))
    assert [number for number, _ in job.written] == [0, 1, 2, 3]


def test_a_writer_that_fails_stops_everything_at_once() -> None:
    job = Job([make_piece(seed, 5) for seed in range(200)], broken=("write", 2))
    with pytest.raises(ValueError, match="write of piece 2"):
        run(job, FakeEngine(seconds=0.001))
    assert [number for number, _ in job.written] == [0, 1]
    assert max(number for name, number, _, _ in job.log if name == "read") < 20


@pytest.mark.parametrize("where", ["prepare", "launch", "collect"])
def test_a_row_that_makes_the_engine_raise_is_named(where: str) -> None:
    pieces = [make_piece(seed, 12) for seed in range(4)]
    pieces[2].prompts[7][:] = 5000
    bad = pieces[2].prompts[7]

    def fails(prompts: list[Any]) -> None:
        if any(prompt is bad for prompt in prompts):
            raise RuntimeError("cannot compute 5000")

    job = Job(pieces)
    with pytest.raises(BatchError, match="prompt 7: the computation raised RuntimeError: cannot compute 5000") as error:
        run(job, FakeEngine(where=where, fails=fails), reject_errors=False)
    assert error.value.prompts == [7]
    assert [number for number, _ in job.written] == [0, 1]


@pytest.mark.parametrize("where", ["prepare", "launch", "collect"])
def test_a_row_that_makes_the_engine_raise_is_the_only_one_rejected(where: str) -> None:
    pieces = [make_piece(seed, 12) for seed in range(3)]
    bad = pieces[1].prompts[7]

    def fails(prompts: list[Any]) -> None:
        if any(prompt is bad for prompt in prompts):
            raise RuntimeError("no")

    job = Job(pieces)
    run(job, FakeEngine(where=where, fails=fails))
    ranked = job.written[1][1]
    assert ranked.failed == {7: ("engine-error", "RuntimeError: no")}
    want = expected(pieces[1])
    want[7] = []
    assert lists(ranked) == want
    assert [lists(r) for n, r in job.written if n != 1] == [expected(pieces[0]), expected(pieces[2])]


def test_an_interruption_of_the_callers_thread_goes_up_and_ends_the_threads() -> None:
    class Interrupted(BaseException):
        pass

    seen = []

    def safe_point(work: int | None) -> None:
        if work == 3:
            seen.append(work)
            raise Interrupted

    job = Job([make_piece(seed, 5) for seed in range(9)])
    with pytest.raises(Interrupted):
        run(job, FakeEngine(seconds=0.005), safe_point=safe_point)
    assert [number for number, _ in job.written] == [0, 1, 2] and seen == [3]


def test_while_nothing_is_ready_the_caller_is_still_asked() -> None:
    asked: list[int | None] = []
    run(Job([make_piece(0, 2)], {"read": 0.35}), FakeEngine(), safe_point=asked.append)
    assert asked.count(None) >= 2 and asked.count(0) == 1


def test_a_stop_finishes_what_is_in_flight_and_writes_whole_pieces() -> None:
    stop = threading.Event()
    pieces = [make_piece(seed, 24) for seed in range(30)]
    job = Job(pieces)
    engine = FakeEngine(seconds=0.01)
    done: list[int] = []

    def on_rows(rows: int) -> None:
        done.append(rows)
        if sum(done) > 60:
            stop.set()

    summary = run(job, engine, stop=stop, on_rows=on_rows)
    assert summary.stopped
    assert engine.flying == 0, "nothing is left on the device"
    assert [number for number, _ in job.written] == list(range(summary.pieces)) and 1 <= summary.pieces < 6
    assert all(lists(ranked) == expected(pieces[number]) for number, ranked in job.written)


# ---- timeline ----------------------------------------------------------------------------------------------------


def test_the_trace_names_threads_and_lanes_and_covers_every_batch(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    job = Job([make_piece(seed, 10) for seed in range(3)])
    engine = FakeEngine(seconds=0.01)
    summary = run(job, engine, trace=trace)
    trace.write()
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(tracks[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert spans.count(("GPU lane 0", "compute")) == summary.batches == spans.count(("MainThread", "submit"))
    assert spans.count(("fetch", "fetch")) == spans.count(("plan and upload", "prepare")) == summary.batches
    for track, name in (("read", "read"), ("tokenise", "tokenise"), ("write", "write")):
        assert spans.count((track, name)) == 3
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert not path.with_name("trace.json.tmp").exists()


def test_without_a_path_nothing_is_collected() -> None:
    trace = Trace()
    with trace.span("read"):
        pass
    trace.write()
    assert trace.to_json()["traceEvents"] == []


def test_pieces_that_fail_to_compute_at_all_still_come_out() -> None:
    long = Piece([np.ones(31, np.int32)], [np.empty(0, np.int32)])
    job = Job([long, make_piece(0, 2)])
    run(job, FakeEngine())
    assert job.written[0][1].failed == {0: ("too-much-memory", "31 prompt tokens, and memory was planned for 30")}
    assert lists(job.written[1][1]) == expected(job.pieces[1])

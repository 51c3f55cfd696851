"""The real engine in three steps: from several threads, through the pipeline, and how lanes are chosen."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job_support import VOCAB_SIZE, make_model, make_vocabulary
from schedule_support import Piece

from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.job.engine import Device, LoadedEngine, load_engine, plan_memory
from xgr_engine.options import SearchOptions
from xgr_engine.search.lanes import Lanes
from xgr_engine.xschedule.pipeline import Pipeline, Stages
from xgr_engine.xschedule.results import Ranked
from xgr_engine.xschedule.scheduler import BatchLimits
from xgr_engine.xschedule.worker import compute_batches


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedEngine:
    root = tmp_path_factory.mktemp("steps")
    vocabulary, model = load_vocabulary(make_vocabulary(root / "vocab")), load_model_dir(make_model(Path(root / "m")))
    search, device = SearchOptions(beam=40, top_k=10), Device("cpu", "cpu")
    return load_engine(model, vocabulary, search, device, plan_memory(model, vocabulary, search, device, None))


def batch(seed: int, users: int = 5) -> tuple[list[np.ndarray], list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, VOCAB_SIZE, generator.integers(2, 20)).astype(np.int32) for _ in range(users)]
    return prompts, [np.unique(generator.integers(0, 40, 6)).astype(np.int32) for _ in range(users)]


def same(one: Any, other: Any) -> bool:
    names = ("item_rows", "scores", "leaves", "short")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_each_step_may_run_in_a_thread_of_its_own(loaded: LoadedEngine) -> None:
    """torch's inference mode belongs to a thread: no step may count on that of another."""
    engine: Any = loaded.engine
    inputs = batch(1)
    values: list[Any] = [None]
    for step in (lambda _: engine.prepare(*inputs), engine.launch, engine.collect):
        thread = threading.Thread(target=lambda step=step: values.append(step(values[-1])))
        thread.start()
        thread.join()
    assert len(values) == 4 and same(values[-1], engine.run(*inputs))
    span = engine.span(values[2])
    assert span.end > span.start and span.lane is None


def test_threads_that_run_batches_at_the_same_time_get_their_own_results(loaded: LoadedEngine) -> None:
    engine: Any = loaded.engine
    inputs = [batch(seed, users=3 + seed % 4) for seed in range(16)]
    alone = [engine.run(*given) for given in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda given: engine.run(*given), inputs))
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))


def test_the_pipeline_gives_the_bits_of_the_loop_in_memory(loaded: LoadedEngine) -> None:
    limits = BatchLimits(tokens=60, rows=400, rows_per_user=40, longest_prompt=60)
    pieces = [Piece(*batch(seed, users)) for seed, users in ((0, 23), (1, 1), (2, 40))]
    out: list[Ranked] = []
    stages = Stages(lambda n: n, lambda n, rows: pieces[rows], lambda n, ready, ranked: out.append(ranked))
    Pipeline(loaded.engine, limits, stages).run(range(3))
    again: list[Ranked] = []
    stages = Stages(lambda n: n, lambda n, rows: pieces[rows], lambda n, ready, ranked: again.append(ranked))
    Pipeline(loaded.engine, limits, stages).run(range(3))
    for piece, first, second in zip(pieces, out, again, strict=True):
        loop = compute_batches(loaded.engine, piece.prompts, piece.excluded, limits, reject_errors=False)
        assert same(first, loop) and same(second, loop)


# ---- lanes (of a GPU, with stand-ins) ----------------------------------------------------------------------------


class FakeLane:
    def __init__(self, tokens: int, users: int, number: int) -> None:
        self.cache = SimpleNamespace(tokens=tokens, users=users)
        self.number = number
        self.idle = True
        self.waited = False

    def holds(self, tokens: int, users: int) -> bool:
        return tokens <= self.cache.tokens and users <= self.cache.users

    def run(self, pack: Any, dead: Any, copied: Any) -> FakeLane:
        self.idle = False
        return self

    def wait(self) -> None:
        self.waited = True


def pack(tokens: int, users: int = 1) -> Any:
    return SimpleNamespace(cache_tokens=tokens, lengths=[1] * users)


def lanes_of(made: list[FakeLane], most: int = 2) -> Any:
    def make(*given: int) -> FakeLane:
        made.append(FakeLane(*given))
        return made[-1]

    return Lanes(most, make)  # type: ignore[arg-type]


def test_batches_one_after_the_other_stay_in_the_first_lane() -> None:
    made: list[FakeLane] = []
    lanes = lanes_of(made)
    lanes.reserve(100, 4)
    for _ in range(5):
        lanes.run(pack(90), None, None).idle = True
    assert len(made) == 1 and lanes.first is made[0]


def test_batches_that_overlap_take_turns_in_lanes_of_one_size() -> None:
    made: list[FakeLane] = []
    lanes = lanes_of(made)
    lanes.reserve(100, 4)
    used = [lanes.run(pack(10), None, None).number for _ in range(6)]
    assert used[:2] == [0, 1] and sorted(used[2:4]) == [0, 1] == sorted(used[4:])
    assert [(lane.cache.tokens, lane.cache.users) for lane in made] == [(100, 4), (100, 4)]
    made[1].idle = True
    assert lanes.run(pack(10), None, None).number == 1, "an idle lane comes first"


def test_a_lane_grows_only_when_its_work_has_ended() -> None:
    made: list[FakeLane] = []
    lanes = lanes_of(made, most=1)
    lanes.reserve(100, 4)
    lanes.run(pack(50), None, None)
    lanes.run(pack(150, users=2), None, None)
    assert made[0].waited and [(lane.cache.tokens, lane.cache.users) for lane in made] == [(100, 4), (150, 4)]

"""Which captured graphs are kept, and how they are recorded."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xgr_engine.search import capture
from xgr_engine.search.capture import RecentGraphs, capturing


def test_the_shapes_used_last_are_kept_and_room_is_made_before_another_is_recorded() -> None:
    graphs: RecentGraphs[int, str] = RecentGraphs(2)
    recorded: list[tuple[int, list[str]]] = []

    def get(shape: int) -> str:
        def record() -> str:
            recorded.append((shape, list(graphs.kept())))
            return str(shape)

        return graphs.get(shape, record)

    assert [get(shape) for shape in (1, 2, 1, 3, 1, 2)] == ["1", "2", "1", "3", "1", "2"]
    assert recorded == [(1, []), (2, ["1"]), (3, ["1"]), (2, ["1"])]


def test_one_graph_is_recorded_at_a_time_each_in_a_stream_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several recommenders in the threads of a process, on two GPUs: torch alone would mix them up."""
    current, recording = threading.local(), threading.Lock()
    streams: list[tuple[int, int]] = []

    @contextmanager
    def graph(name: int, *, stream: Any, **more: object) -> Iterator[None]:
        assert recording.acquire(blocking=False), "two recordings at once"
        streams.append((name, stream.gpu))
        yield
        recording.release()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.gpu)
    monkeypatch.setattr(torch.cuda, "Stream", lambda gpu: SimpleNamespace(gpu=gpu))
    capture._side_stream.cache_clear()

    def record(gpu: int) -> None:
        current.gpu = gpu
        for _ in range(20):
            with capturing(gpu):  # type: ignore[arg-type]
                time.sleep(1e-4)
                assert not gc.isenabled()

    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(record, (0, 1, 0, 1)))
    finally:
        capture._side_stream.cache_clear()
    assert gc.isenabled()
    assert sorted(streams) == [(0, 0)] * 40 + [(1, 1)] * 40

"""What every thread and lane did when, in the Chrome trace format (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xgr_engine.errors import UsageError
from xgr_engine.files import write_text

# Enough for hours of batches; no viewer opens a larger trace.
_MOST_EVENTS = 400_000


class Trace:
    """Collects spans of time, in seconds of ``time.perf_counter``. Without a path it collects nothing.

    Raises:
        UsageError: the path's directory does not exist.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--trace {path}: there is no directory {path.parent}")
        self.path = path
        self._zero = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._dropped = 0
        self._tracks: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, **facts: object) -> Iterator[None]:
        """Records what the current thread does inside the ``with``, on a track named after the thread."""
        if self.path is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(threading.current_thread().name, name, start, time.perf_counter(), **facts)

    def add(self, track: str, name: str, start: float, end: float, **facts: object) -> None:
        """Adds a span that was measured elsewhere, such as on a GPU."""
        if self.path is None:
            return
        with self._lock:
            if len(self._events) >= _MOST_EVENTS:
                self._dropped += 1
                return
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": os.getpid(),
                    "tid": self._tracks.setdefault(track, len(self._tracks)),
                    "ts": round((start - self._zero) * 1e6, 1),
                    "dur": round((end - start) * 1e6, 1),
                    "args": facts,
                }
            )

    def to_json(self) -> dict[str, Any]:
        """The whole trace."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": number, "args": {"name": track}}
            for track, number in self._tracks.items()
        ]
        return {
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": self._dropped},
            "traceEvents": names + self._events,
        }

    def write(self) -> None:
        """Writes the file, whole or not at all. Does nothing without a path."""
        if self.path is None:
            return
        write_text(self.path, json.dumps(self.to_json()))

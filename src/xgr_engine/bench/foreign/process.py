"""Our end of :mod:`xgr_engine.bench.foreign.worker`: starts an engine's process and talks to it through a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xgr_engine.bench.baselines.base import NotAvailableError
from xgr_engine.errors import XgrError

WORKER = Path(__file__).with_name("worker.py")
START_S = 1800.0  # an engine compiles kernels and captures graphs when it starts
ANSWER_S = 900.0
LATE_S = 60.0  # a batch that has begun may end this long after the time limit
_STOP_S = 20.0
_GONE_S = 5.0  # what was killed still has memory to give back
_SHOWN_LINES = 3
_LOG_BYTES = 4096
# No look-ups in the network and no telemetry while something is measured.
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Answer:
    """What the engine returned for a batch.

    Attributes:
        lists: per user (tokens, score), best first.
        seconds: of the engine alone, by the clock of its process.
        device_bytes: peak of its allocator during the batch, weights and pools included; None without a GPU.
        host_bytes: peak of its process; None where the system does not tell.
        notes: what the engine made do with.
    """

    lists: list[list[tuple[list[int], float]]]
    seconds: float
    device_bytes: int | None
    host_bytes: int | None
    notes: list[str] = field(default_factory=list)


def visible(gpu: int) -> str:
    """``CUDA_VISIBLE_DEVICES`` for a process that should see only this one of our GPUs."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ours[gpu].strip() if gpu < len(ours) and ours[gpu].strip() else str(gpu)


class _NoAnswerError(XgrError):
    """It took too long."""


_running: set[Process] = set()
_folders: set[Path] = set()


def new_folder() -> Path:
    """A temporary directory for a checkpoint; :func:`remove_folder` or :func:`end_all` takes it away."""
    folder = Path(tempfile.mkdtemp(prefix="xgr-bench-"))
    _folders.add(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """With all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    _folders.discard(folder)


def end_all() -> None:
    """For a run that was stopped wherever it was: no process and no checkpoint is left."""
    for process in tuple(_running):
        process.kill()
    for folder in tuple(_folders):
        remove_folder(folder)


class Process:
    """An engine in a process of its own, ready for batches.

    Args:
        python: interpreter that has the engine.
        engine, settings: as the worker knows them.
        gpu: number of the only GPU that it should see; None: whatever this process sees.
        deadline: of ``time.monotonic``: when it must have started.

    Raises:
        NotAvailableError: the deadline came first.
        torch.OutOfMemoryError: it did not fit into memory.
        XgrError: it did not start, with what it said.
    """

    def __init__(
        self,
        python: str,
        engine: str,
        settings: dict[str, Any],
        *,
        gpu: int | None = None,
        start_s: float = START_S,
        deadline: float = float("inf"),
    ) -> None:
        self._engine = engine
        self._deadline = deadline
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._pending = b""
        self._process = subprocess.Popen(
            [python, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_QUIET | dict(os.environ) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible(gpu)}),
            start_new_session=True,  # a Ctrl-C is ours to handle, and a group ends with all that it started
        )
        _running.add(self)
        try:
            ready = self._ask({"engine": engine, "settings": settings}, start_s, "while it started")
        except BaseException:
            self.stop()
            raise
        self.host_before: int | None = ready["host_before"]

    def run(self, prompts: list[list[int]]) -> Answer:
        """Compute one batch. Raises as the constructor; the deadline is later by LATE_S seconds."""
        return Answer(**self._ask({"prompts": prompts}, ANSWER_S, "before it answered", LATE_S))

    def stop(self) -> None:
        """End the process: its requests end, and where it does not leave then, it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            self._process.wait()
            self._wait_for_children()
            _running.discard(self)
        self._process.stdout.close()
        self._log.close()

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait_for_children(self) -> None:
        """Wait until what this engine started is gone: the next measurement must not share cores and memory with it."""
        until = time.monotonic() + _GONE_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < until:
                os.killpg(self._process.pid, 0)
                time.sleep(0.01)

    def _ask(self, request: dict[str, Any], most: float, when: str, late: float = 0.0) -> dict[str, Any]:
        """An answer within ``most`` seconds, and within ``late`` seconds after the deadline."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise XgrError(f"{self._engine}: its process has ended", why=self._last_words()) from error
        left = max(0.0, self._deadline - time.monotonic() + late)
        try:
            line = self._read_line(min(most, left))
        except _NoAnswerError as error:
            if left < most:
                raise NotAvailableError(f"the time limit passed {when}", why=error.why) from error
            raise
        except BaseException:
            self.kill()  # stopped in the middle: nobody waits for what it computes
            raise
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            if answer["out_of_memory"]:
                raise torch.OutOfMemoryError(f"{self._engine}: {answer['error']}")
            raise XgrError(f"{self._engine}: {' '.join(answer['error'].split())}")
        return answer

    def _read_line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                self.kill()  # a late answer must not be taken for that of another batch
                raise _NoAnswerError(f"{self._engine}: no answer in {seconds:,.0f} s", why=self._last_words())
            part = os.read(pipe, 1 << 20)
            if not part:
                raise XgrError(f"{self._engine}: its process has ended: {self._last_words()}")
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        # not by seek: the process writes at the same offset
        text = os.pread(descriptor, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode("utf-8", "replace")
        return " / ".join([line.strip() for line in text.split("\n") if line.strip()][-_SHOWN_LINES:])

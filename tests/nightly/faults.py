"""A real ``xgr recommend`` in a child process, and what is done to it. Also used by scripts/soak.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The signal's own death and the exit code after an orderly stop, as a shell or a container runtime would tell them.
_CODES = {signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGINT: 130, signal.SIGKILL: 137}


def default_signals() -> None:
    """In a child before it starts: the signals that are sent to it end it, also if this process ignores them.

    Children inherit ignored signals: SIGHUP under ``nohup``, SIGINT in the background of a script.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """The command line of one run, without its output.

    Args:
        root: directory with ``users.parquet``; users: rows a shard has.
    """

    def __init__(self, root: Path, vocab: Path, model: Path, shard_rows: int) -> None:
        self.root = root
        self.command = [
            sys.executable, "-m", "xgr_cli.main", "recommend", "--in", str(root / "users.parquet"),
            "--model", str(model), "--vocab", str(vocab), "--device", "cpu", "--threads", "1", "--beam", "16",
            "--top-k", "5", "--shard-rows", str(shard_rows),
        ]  # fmt: skip

    def start(self, out: Path, *more: str, env: Mapping[str, str] | None = None, **popen: Any) -> subprocess.Popen[str]:
        """The run as a child; its stderr is a pipe unless told otherwise."""
        given: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
            "preexec_fn": default_signals,
            **popen,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if env is None else dict(env)
        return subprocess.Popen([*self.command, "--out", str(out), *more], env=environment, **given)

    def finish(self, out: Path, *more: str, **popen: Any) -> tuple[int, str]:
        """Exit code and stderr of a run to its end."""
        process = self.start(out, *more, **popen)
        _, err = process.communicate(timeout=180)
        return process.returncode, err or ""


def wait_for_parts(process: subprocess.Popen[str], out: Path, parts: int = 1, seconds: float = 120) -> None:
    """Until so many part files are there, or the process has ended."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline and len(list(out.glob("part-*"))) < parts:
        time.sleep(0.005)


def stop(process: subprocess.Popen[str], number: signal.Signals, times: Sequence[float] = (0.0,)) -> tuple[float, int]:
    """Sends a signal, again after each further delay.

    Returns:
        Seconds from the first signal to the end, and the exit code as a shell tells it.
    """
    started = time.monotonic()
    for delay in times:
        time.sleep(delay)
        process.send_signal(number)
    code = process.wait(120)
    return time.monotonic() - started, code if code >= 0 else 128 - code


def manifest(out: Path) -> dict[str, Any]:
    """The output's manifest; empty where there is none yet."""
    path = out / "_xgr" / "manifest.json"
    record: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return record


def leftovers(out: Path) -> list[str]:
    """What a finished output must not hold: temporary files, the lock, the shards' states."""
    return [str(path) for path in out.rglob("*") if path.name.startswith(".xgr-tmp") or path.name in ("lock", "shards")]


def expected_code(number: signal.Signals) -> int:
    """Exit code of a run that a signal stopped."""
    return _CODES[number]

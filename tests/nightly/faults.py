"""A real ``xgr recommend`` in a child process, and what is done to it. Also used by scripts/soak.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gated import Gate

# For what takes a second on a quiet machine. Long, so that only a run that hangs fails a test.
PATIENCE = 600.0
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
        root: directory with ``users.parquet``; shard_rows: rows a shard has.
    """

    def __init__(self, root: Path, vocab: Path, model: Path, shard_rows: int) -> None:
        self.root = root
        self.arguments = [
            "recommend", "--in", str(root / "users.parquet"),
            "--model", str(model), "--vocab", str(vocab), "--device", "cpu", "--threads", "1", "--beam", "16",
            "--top-k", "5", "--shard-rows", str(shard_rows),
        ]  # fmt: skip

    def start(
        self, out: Path, *more: str, gate: Gate | None = None, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[str]:
        """The run as a child, held at ``gate``; its stderr is a pipe unless told otherwise."""
        given: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
            "preexec_fn": default_signals,
            **popen,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if env is None else dict(env)
        xgr = [sys.executable, "-m", "xgr_cli.main"] if gate is None else gate.command
        return subprocess.Popen([*xgr, *self.arguments, "--out", str(out), *more], env=environment, **given)

    def finish(self, out: Path, *more: str, **popen: Any) -> tuple[int, str]:
        """Exit code and stderr of a run to its end."""
        process = self.start(out, *more, **popen)
        _, err = process.communicate(timeout=PATIENCE)
        return process.returncode, err or ""


def wait_for_parts(process: subprocess.Popen[str], out: Path, parts: int = 1) -> None:
    """Until so many part files are there. Fails if the process ends before."""
    deadline = time.monotonic() + PATIENCE
    while len(list(out.glob("part-*"))) < parts:
        assert process.poll() is None, f"the run ended before it had written {parts} parts"
        assert time.monotonic() < deadline, f"no {parts} parts in {PATIENCE:g} s"
        time.sleep(0.005)


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    """What the run says on stderr up to the line that holds ``text``. Fails if it ends without it."""
    assert process.stderr is not None
    said = ""
    while text not in said:
        line = process.stderr.readline()
        assert line, f"the run ended and never said {text!r}: {said}"
        said += line
    return said


def end_of(process: subprocess.Popen[str]) -> int:
    """Waits; the exit code as a shell tells it."""
    code = process.wait(PATIENCE)
    return code if code >= 0 else 128 - code


def stop(process: subprocess.Popen[str], number: signal.Signals) -> tuple[float, int]:
    """Sends a signal.

    Returns:
        Seconds from the signal to the end, and the exit code as a shell tells it.
    """
    started = time.monotonic()
    process.send_signal(number)
    code = end_of(process)
    return time.monotonic() - started, code


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

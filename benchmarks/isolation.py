"""Run jobs in processes of their own, side by side: compilation in parallel, and a hang or a crash costs one job."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def _child(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sender.send((True, function(*args)))
    except Exception:
        sender.send((False, traceback.format_exc(limit=-3)))


def run_isolated(jobs: Mapping[str, Job], timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Results by name, and the reasons of the jobs that failed, died or outlasted ``timeout_s`` (those are killed).

    A job is a module-level function and its arguments; both are pickled.
    """
    context = multiprocessing.get_context("spawn")
    running = {}
    for name, (function, args) in jobs.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, function, args), daemon=True)
        process.start()
        sender.close()
        running[name] = (process, receiver)
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    deadline = time.monotonic() + timeout_s
    for name, (process, receiver) in running.items():
        try:
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                good, value = receiver.recv()
                (results if good else failures)[name] = value
            else:
                failures[name] = f"no answer after {timeout_s:.0f} s"
                process.kill()
        except EOFError:
            failures[name] = "the process died"
        process.join(5)
        if process.is_alive():
            process.kill()
    return results, failures

"""Signals of a long-running command: the first asks the job to stop; a second, or the end of the grace period, ends it.

Python runs signal handlers between two steps of the main thread, which may sit in one library call for minutes. So the
system writes each signal's number into a socket (the wakeup descriptor), and a thread that waits for it does the rest.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from xgr_cli.output import Output
from xgr_engine.job.stop import Stop

# SIGHUP (the terminal went away) is reported like SIGTERM: supervisors know 143.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
_LAST_WORDS_SECONDS = 1.0
_SHOW_CURSOR = "\x1b[?25h"


# What the handlers of end_on_signals raised, for what may come of it (see ``obeyed``).
_raised: list[SystemExit | KeyboardInterrupt] = []


def end_on_signals() -> None:
    """Have SIGTERM and SIGHUP end any command as Ctrl-C does, cleaning up on the way out, with exit code 143."""

    def leave(number: int, frame: FrameType | None) -> None:
        _raised.append(
            KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_CODES[signal.Signals(number)])
        )
        raise _raised[-1]

    for number in EXIT_CODES:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, leave)


@contextmanager
def obeyed() -> Iterator[None]:
    """A library that was in a callback (safetensors reads so) may put an error of its own in place of the end.

    Raises:
        SystemExit, KeyboardInterrupt: instead of such an error.
    """
    try:
        yield
    except Exception:
        if _raised:
            raise _raised[-1] from None
        raise


@contextmanager
def stop_on_signals(
    output: Output, grace: float, promise: str = "the same command resumes", patience: float = 0.0
) -> Iterator[Stop]:
    """While the block runs, SIGTERM, SIGINT and SIGHUP ask the yielded ``Stop`` to stop.

    A signal that was ignored when the command began (``nohup``, a background job of a shell) stays ignored.

    Args:
        grace: seconds from the first signal until the process ends by force.
        promise: what to tell the user about the work so far, at a signal and when the process is ended by force.
        patience: seconds from the first signal until that is said; a command that ends sooner says its own last line.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # handlers belong to the main thread; whoever runs a command elsewhere installs their own
        return
    watcher = _Watcher(output, stop, grace, promise, patience)
    ours = [number for number in EXIT_CODES if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, watcher.on_signal) for number in ours}
    previous = signal.set_wakeup_fd(watcher.socket.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        with stop.obeyed():
            yield stop
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        watcher.end()


class _Watcher:
    def __init__(self, output: Output, stop: Stop, grace: float, promise: str, patience: float) -> None:
        self._output = output
        self._stop = stop
        self._grace = grace
        self._promise = promise
        self._patience = patience
        # Saving the state takes a moment of the grace period too.
        self._forced_after = max(0.0, grace - min(_LAST_WORDS_SECONDS, grace / 10))
        self._reader, self.socket = socket.socketpair()
        self.socket.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="xgr-signals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        with suppress(OSError):
            self.socket.send(b"\0")
        self._thread.join(timeout=1.0)
        self.socket.close()
        self._reader.close()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler: if nothing is in flight, the main thread stops wherever it is."""
        self._request(signal.Signals(number))
        self._stop.interrupt()

    def _request(self, number: signal.Signals) -> None:
        # finished shards must be on disk, and the manifest written, before the process is ended by force
        self._stop.request(number.name, EXIT_CODES[number], self._forced_after * 0.9)

    def _watch(self) -> None:
        first = self._next_signal()
        if first is None:
            return
        self._request(first)
        try:
            if self._patience:
                self._reader.settimeout(self._patience)
                if self._next_signal() is None:
                    return
                self._leave(EXIT_CODES[first])
        except TimeoutError:
            pass
        self._say(f"{first.name}: stopping within {self._grace:g} s; {self._promise}; signal again to stop at once")
        self._reader.settimeout(max(0.1, self._forced_after - self._patience))
        try:
            if self._next_signal() is None:
                return
        except TimeoutError:
            self._say(f"the grace period of {self._grace:g} s is over; {self._promise}")
        self._leave(EXIT_CODES[first])

    def _next_signal(self) -> signal.Signals | None:
        """The next of our signals; None when the command has ended."""
        while True:
            number = self._reader.recv(1)
            if number in (b"", b"\0"):
                return None
            with suppress(ValueError):
                if (found := signal.Signals(number[0])) in EXIT_CODES:
                    return found

    def _say(self, text: str) -> None:
        with suppress(Exception):
            self._output.warn(text)

    def _leave(self, code: int) -> None:
        words = threading.Thread(target=self._stop.last_words, daemon=True)
        words.start()
        words.join(timeout=_LAST_WORDS_SECONDS)
        if self._output.interactive:
            with suppress(OSError):
                os.write(2, _SHOW_CURSOR.encode())
        os._exit(code)

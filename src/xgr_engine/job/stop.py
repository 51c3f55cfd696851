"""How a running job is asked to stop, and when it does.

Whoever runs the job (the command line's signal handlers, a test, a scheduler) holds a :class:`Stop` and may call
``request`` from any thread. The job asks it at its safe points. A shard that can be finished in the time left is
finished and committed; any other is given up, and the next run computes it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Stopped(BaseException):
    """The job stopped because it was asked to; like KeyboardInterrupt, nothing catches it by accident.

    Attributes:
        reason: such as ``SIGTERM``.
        exit_code: 128 + the signal's number.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason
        self.exit_code = exit_code


class Stop:
    """A request to stop, made at most once.

    Attributes:
        prompt: whether a request may interrupt the main thread wherever it is. While shards are in flight it may not
            (see :meth:`finishing`): they stop at their safe points.
        on_forced: what the job still wants to write when the process is ended by force.
    """

    def __init__(self) -> None:
        self.prompt = True
        self.on_forced: Callable[[Stopped], None] = lambda stopped: None
        self._request: tuple[Stopped, float] | None = None
        self._interrupted = False

    @property
    def requested(self) -> bool:
        return self._request is not None

    def request(self, reason: str, exit_code: int, grace: float) -> None:
        """Stop within ``grace`` seconds. A later request changes nothing."""
        if self._request is None:
            self._request = (Stopped(reason, exit_code), time.monotonic() + grace)

    def last_words(self) -> None:
        """Called from another thread than the job's, just before the process is ended by force."""
        if self._request is not None:
            with suppress(Exception):
                self.on_forced(self._request[0])

    def check(self, needed: float | None = None) -> None:
        """A safe point.

        Args:
            needed: seconds until the work at hand would be committed; None: nothing is at hand.

        Raises:
            Stopped: asked to stop, and the work at hand cannot be finished in time.
        """
        if self._request is None:
            return
        stopped, deadline = self._request
        if needed is None or time.monotonic() + needed > deadline:
            raise Stopped(stopped.reason, stopped.exit_code)

    def interrupt(self) -> None:
        """Called in the main thread after a request: stop it wherever it is, unless shards are in flight.

        Raises:
            Stopped: it does.
        """
        if self.prompt:
            self._interrupted = True
            self.check()

    @contextmanager
    def obeyed(self) -> Iterator[None]:
        """A library that was interrupted in a callback (safetensors, say) may raise its own error instead of the stop.

        Raises:
            Stopped: in place of such an error.
        """
        try:
            yield
        except Exception:
            if self._interrupted:
                self.check()
            raise

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """While shards are in flight: a request waits for their safe points. Afterwards it is obeyed.

        Raises:
            Stopped: asked to stop meanwhile.
        """
        self.prompt = False
        try:
            yield
        finally:
            self.prompt = True
        self.check()

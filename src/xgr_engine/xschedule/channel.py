"""Bounded hand-over between two threads, in order, with an end, an error and a way to give up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
Tick = Callable[[], None]

_POLL_SECONDS = 0.1  # how long a waiting thread sleeps before it calls its tick


class CancelledError(Exception):
    """The consumer gave up: it takes nothing more."""


class Channel(Generic[T]):
    """One producer, one consumer.

    An item keeps its place until the consumer asks for the next one, so ``capacity`` bounds the items that are waiting
    and the one being worked on together. Whatever was put before the channel was closed is delivered first, then the
    error.

    A ``tick`` is called now and then in a thread that waits, so that a main thread stays responsive; it may raise.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._cancelled = False
        self._error: BaseException | None = None

    def put(self, item: T) -> None:
        """Waits for room.

        Raises:
            CancelledError: the consumer gave up.
        """
        self.wait_for_room()
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def wait_for_room(self, tick: Tick | None = None) -> None:
        """Waits until :meth:`put` would not have to. Raises as :meth:`put`."""
        self._wait(lambda: len(self._items) < self._capacity, tick)

    def wait_until_empty(self, tick: Tick | None = None) -> None:
        """Waits until the consumer has finished everything that was put. Raises as :meth:`put`."""
        self._wait(lambda: not self._items, tick)

    def close(self, error: BaseException | None = None) -> None:
        """Called by the producer: nothing more comes. ``error`` is raised in the consumer after the last item."""
        with self._changed:
            self._closed, self._error = True, error
            self._changed.notify_all()

    def cancel(self) -> None:
        """Called by the consumer: it takes nothing more."""
        with self._changed:
            self._cancelled = True
            self._items.clear()
            self._changed.notify_all()

    def take(self, tick: Tick | None = None) -> Iterator[T]:
        """Items until the channel is closed.

        Raises:
            BaseException: what it was closed with.
        """
        while self._wait_for_item(tick):
            yield self._items[0]
            with self._changed:
                if self._items:
                    self._items.popleft()
                self._changed.notify_all()
        if self._error is not None:
            raise self._error

    def _wait_for_item(self, tick: Tick | None) -> bool:
        self._wait(lambda: bool(self._items) or self._closed, tick)
        return bool(self._items)

    def _wait(self, ready: Callable[[], bool], tick: Tick | None) -> None:
        while True:
            with self._changed:
                if self._cancelled:
                    raise CancelledError
                if ready() or (self._changed.wait(_POLL_SECONDS) and ready()):
                    if self._cancelled:
                        raise CancelledError
                    return
            if tick is not None:
                tick()

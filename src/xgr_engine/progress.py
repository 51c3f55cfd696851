"""How a long-running engine call tells its caller how far it is. The engine draws nothing itself."""

from __future__ import annotations

from typing import Protocol


class ProgressSink(Protocol):
    """Called from the thread that runs the job, in the order start, advance..., finish."""

    def start(self, total: int, unit: str) -> None:
        """``total`` pieces of ``unit`` (such as "users") are to be done."""

    def advance(self, n: int, **info: object) -> None:
        """``n`` more are done; ``info`` holds figures worth showing beside the bar."""

    def finish(self) -> None:
        """Nothing more will come, after success or failure."""


class NoProgress:
    """Shows nothing."""

    def start(self, total: int, unit: str) -> None:
        pass

    def advance(self, n: int, **info: object) -> None:
        pass

    def finish(self) -> None:
        pass

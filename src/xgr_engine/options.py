"""Options of a run: frozen dataclasses, made once by the command line (or a caller) and handed down unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from xgr_engine.errors import UsageError

if TYPE_CHECKING:  # the command line reads the choices below before it needs numpy
    import numpy as np
    from numpy.typing import NDArray

ScoreOver = Literal["vocab", "level", "allowed"]
Collisions = Literal["all", "first"]
HistoryFormat = Literal["items", "sids", "tokens", "prompt"]
ListText = Literal["json", "python"]
OnUnknown = Literal["drop", "reject", "fail"]
OnEmpty = Literal["template", "reject"]
OnError = Literal["reject", "fail"]
Layout = Literal["nested", "long"]

# Batches that a GPU works on side by side. One, with the next already queued behind it: two that compete for the card
# took 586 ms where one after the other took 541 (H200, Qwen3-1.7B, 64 x 1000 tokens, W 256).
LANES = 1

_MOST_THREADS = 1024


def check_whole(option: str, value: object) -> None:
    """Raises UsageError unless the value is an integer, Python's or numpy's."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{option} {value}: must be a whole number")


def check_threads(threads: int | None) -> None:
    """Raises UsageError unless that many CPU threads can compute; None leaves torch's choice."""
    if threads is None:
        return
    check_whole("--threads", threads)
    if threads < 1:
        raise UsageError(f"--threads {threads}: must be at least 1")
    if threads > _MOST_THREADS:  # OpenMP ends the process where the system gives it no more threads
        raise UsageError(f"--threads {threads}: must be at most {_MOST_THREADS}", hint="as many as there are cores")


def check_choice(option: str, value: object, choices: Any) -> None:
    """Raises UsageError unless the value is one of a ``Literal``'s."""
    if value not in get_args(choices):
        raise UsageError(f"{option} {value}: must be one of {', '.join(get_args(choices))}")


@dataclass(frozen=True)
class SearchOptions:
    """What the search returns. Everything in here changes results and belongs to the fingerprint.

    Attributes:
        beam: W, prefixes kept a level.
        top_k: K <= W, items returned a user.
        score_over: the set a level's softmax runs over (docs/architecture.md, "Score").
        collisions: which items of a SID that several items share are returned: ``all`` (best first) or ``first``
            (the first that this user may get).
    """

    beam: int = 512
    top_k: int = 50
    score_over: ScoreOver = "vocab"
    collisions: Collisions = "all"

    def __post_init__(self) -> None:
        check_whole("--beam", self.beam)
        check_whole("--top-k", self.top_k)
        if self.beam < 1 or self.top_k < 1:
            raise UsageError(f"--beam {self.beam} --top-k {self.top_k}: both must be at least 1")
        if self.top_k > self.beam:
            raise UsageError(
                f"--top-k {self.top_k} is larger than --beam {self.beam}",
                why="a search that keeps W prefixes can promise at most W results",
                hint=f"use --beam {self.top_k} or more, or a smaller --top-k",
            )
        check_choice("--score-over", self.score_over, ScoreOver)
        check_choice("--collisions", self.collisions, Collisions)


@dataclass(frozen=True)
class UserRules:
    """What one user may get, where a list of exclusions does not say it all.

    Attributes:
        excluded: int32 rows of ``items.parquet`` that must not be returned.
        tree: the tree of the :class:`xgr_engine.catalog.trie.ItemForest` that the user's items are in.
    """

    excluded: NDArray[np.int32]
    tree: int


# What one user may not get: rows of ``items.parquet``, or more.
Exclusion: TypeAlias = "NDArray[np.int32] | UserRules"

"""Options of a run: frozen dataclasses, made once by the command line (or a caller) and handed down unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

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

# Batches that a GPU computes side by side. One, with the next already queued behind it: two that compete for the GPU
# took 587 ms per batch where one after the other took 541 (H200, Qwen3-1.7B, 64 x 1000 tokens, W 256; see
# docs/performance.md).
LANES = 1

_MOST_THREADS = 1024

_UNIONS = (Union, UnionType)  # typing makes the former of what holds a Literal
# How a type is called in an error, one value and several.
_CALLED: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}


def check_types(options: Any) -> None:
    """The fields of a dataclass hold what they are declared to hold: ``exclude_seen="no"`` would count as true.

    Raises:
        UsageError: names the first field that does not, as a flag like all errors of options.
    """
    for name, kind in get_type_hints(type(options)).items():
        check_type(f"--{name.replace('_', '-')}", getattr(options, name), kind)


def check_type(option: str, value: object, kind: Any) -> None:
    """Raises UsageError unless the value is of the kind."""
    if not is_of(value, kind):
        said = value if isinstance(value, str) else repr(value)
        raise UsageError(f"{option} {said}: must be {_called(kind)}")


def is_of(value: object, kind: Any) -> bool:
    """Whether a value is of a kind, as a type is declared: a type, a union, a ``Literal`` or a tuple of one of them.

    Any integer will do for an int, and any number for a float, those of numpy among them.
    """
    if get_origin(kind) in _UNIONS:
        return any(is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(is_of(part, get_args(kind)[0]) for part in value)
    accepted = {int: Integral, float: Real}.get(kind, kind)
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


def _called(kind: Any) -> str:
    if get_origin(kind) in _UNIONS:
        return " or ".join(_called(one) for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return f"a tuple of {_CALLED[get_args(kind)[0]][1]}"
    return _CALLED[kind][0] if kind in _CALLED else f"a {kind.__name__}"


def check_threads(threads: int | None) -> None:
    """Raises UsageError unless that many CPU threads can compute; None leaves torch's choice."""
    if threads is None:
        return
    check_type("--threads", threads, int)
    if threads < 1:
        raise UsageError(f"--threads {threads}: must be at least 1")
    if threads > _MOST_THREADS:  # OpenMP ends the process where the system gives it no more threads
        raise UsageError(f"--threads {threads}: must be at most {_MOST_THREADS}", hint="as many as there are cores")


@dataclass(frozen=True)
class SearchOptions:
    """What the search returns. Everything in here changes results and belongs to the fingerprint.

    Attributes:
        beam: W, prefixes kept per level.
        top_k: K <= W, items returned per user.
        score_over: the set a level's softmax runs over (docs/architecture.md, "Score").
        collisions: which items of a SID that several items share are returned: ``all`` (best first) or ``first``
            (the first that this user may get).
    """

    beam: int = 512
    top_k: int = 50
    score_over: ScoreOver = "vocab"
    collisions: Collisions = "all"

    def __post_init__(self) -> None:
        check_types(self)
        if self.beam < 1 or self.top_k < 1:
            raise UsageError(f"--beam {self.beam} --top-k {self.top_k}: both must be at least 1")
        if self.top_k > self.beam:
            raise UsageError(
                f"--top-k {self.top_k} is larger than --beam {self.beam}",
                why="a search that keeps W prefixes can promise at most W results",
                hint=f"use --beam {self.top_k} or more, or a smaller --top-k",
            )


@dataclass(frozen=True)
class UserRules:
    """What one user may get, where a list of exclusions does not say it all.

    Attributes:
        excluded: int32 rows of ``items.parquet`` that must not be returned.
        tree: the tree of the :class:`xgr_engine.catalog.trie.ItemForest` that the user's items are in.
    """

    excluded: NDArray[np.int32]
    tree: int


# What one user may not get: rows of ``items.parquet``, or :class:`UserRules`.
Exclusion: TypeAlias = "NDArray[np.int32] | UserRules"

"""The files that a run writes beside its result, such as ``--metrics-file`` and ``--trace``: they must destroy nothing.

The files of a benchmark are checked here too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from xgr_engine.errors import UsageError, XgrError
from xgr_engine.files import destination
from xgr_engine.job.filesystems import InputPath, is_remote
from xgr_engine.job.inputs import find_files, would_find


def check_side_file(option: str, path: Path | None, others: Iterable[tuple[str, str]]) -> None:
    """Checks a file before anything is written to it. Whether it can be written is for whoever writes it to say.

    Args:
        option: names the file in errors.
        path: the file; None where none is wanted.
        others: option and path of everything else that the run reads or writes; a path may be a pattern or a URI.

    Raises:
        UsageError: it is one of these, lies in one or holds one, or a pattern would find it; or something other than a
            file has its name.
    """
    if path is None:
        return
    with suppress(OSError):
        destination(path, f"{option} {path}")
    target = Path(os.path.realpath(path))
    for name, given in others:
        relation, why = _relation(target, given), "one would be written over the other"
        if not relation and _would_find(given, path):
            relation, why = "would be found by", "once it is there, it would be read as input"
        if relation:
            raise UsageError(
                f"{option} {path} {relation} {name} {given}", why=why, hint=f"name a file outside it with {option}"
            )


def _relation(target: Path, given: str) -> str:
    for other in _places(given):
        if target == other:
            return "is"
        if other in target.parents:
            return "lies inside"
        if target in other.parents:
            return "is a directory above"
    return ""


def _places(given: str) -> Iterator[Path]:
    """What an option names, links followed: a pattern names the files that it finds now."""
    if not given or is_remote(given):
        return
    yield Path(os.path.realpath(given))
    for file in _found(given):
        yield Path(os.path.realpath(str(file)))


def _found(given: str) -> list[InputPath]:
    """The files that a pattern finds now."""
    if os.path.exists(given):  # noqa: PTH110 (Path.exists raises where a directory may not be looked into)
        return []
    with suppress(XgrError, OSError):
        return find_files((given,))
    return []


def _would_find(given: str, path: Path) -> bool:
    if not given or is_remote(given) or os.path.exists(given):  # noqa: PTH110
        return False
    return would_find(given, path, _found(given))

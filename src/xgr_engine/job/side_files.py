"""The files that a run writes beside its output: ``--metrics-file`` and ``--trace``. They must destroy nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from xgr_engine.errors import UsageError, XgrError
from xgr_engine.files import destination
from xgr_engine.job.filesystems import is_remote
from xgr_engine.job.inputs import find_files


def check_side_file(option: str, path: Path | None, others: Iterable[tuple[str, str]]) -> None:
    """Checks a file before anything is written to it. Whether it can be written is for whoever writes it to say.

    Args:
        option: names the file in errors.
        path: the file; None where none is wanted.
        others: option and path of everything else that the run reads or writes: a pattern or URI too, or nothing.

    Raises:
        UsageError: it is one of these, lies in one or holds one; or something other than a file has its name.
    """
    if path is None:
        return
    with suppress(OSError):
        destination(path, f"{option} {path}")
    target = Path(os.path.realpath(path))
    for name, given in others:
        for other in _places(given):
            relation = "is" if target == other else "lies inside" if other in target.parents else ""
            relation = "is a directory above" if target in other.parents else relation
            if relation:
                raise UsageError(
                    f"{option} {path} {relation} {name} {given}",
                    why="one would be written over the other",
                    hint=f"name a file outside it with {option}",
                )


def _places(given: str) -> Iterator[Path]:
    """What an option names, links followed: a pattern names the files that it finds now."""
    if not given or is_remote(given):
        return
    yield Path(os.path.realpath(given))
    if not Path(given).exists():
        with suppress(XgrError, OSError):
            for file in find_files((given,)):
                yield Path(os.path.realpath(str(file)))

"""Where a run may write its results."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from xgr_engine.bench.options import BenchOptions
from xgr_engine.errors import InputError, UsageError
from xgr_engine.files import destination
from xgr_engine.job.side_files import check_side_file


def check_places(places: Mapping[str, Path], options: BenchOptions) -> None:
    """Make the directories of the files that a run will write, so that what cannot be written fails before it.

    Args:
        places: file by option.

    Raises:
        UsageError: one is no file, is another, or belongs to what the run reads; or its place cannot be written.
        InputError: there is no model or vocabulary, and an older result is not to be replaced for a slip of the pen.
    """
    for flag, name in (("--model", options.model), ("--vocab", options.vocab)):
        if name is not None and not Path(name).is_dir():
            raise InputError(f"{flag} {name}: no such directory", hint=f"check {flag}")
    others = [("--model", options.model or ""), ("--vocab", options.vocab or "")]
    others += [("--in", name) for name in options.inputs]
    for flag, path in places.items():
        check_side_file(flag, path, others)
        for name in options.inputs:
            if fnmatch(str(path.absolute()), str(Path(name).absolute())):
                raise UsageError(
                    f"{flag} {path}: would be one of --in {name}",
                    why="the file is there before the histories are read",
                    hint=f"name a file outside it with {flag}",
                )
        check_place(flag, path)
        others.append((flag, str(path)))


def check_place(flag: str, path: Path) -> None:
    """Make the directory of a file that a run will write.

    Raises:
        UsageError: something other than a file has the name, or the place cannot be written.
    """
    try:
        target = destination(path, f"{flag} {path}:")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written: {error.strerror or error}") from error

"""Where a run may write its results."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
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
        InputError: there is no model or vocabulary.
    """
    directories = [(flag, name) for flag, name in (("--model", options.model), ("--vocab", options.vocab)) if name]
    for flag, name in directories:
        if not Path(name).is_dir():
            raise InputError(f"{flag} {name}: no such directory", hint=f"check {flag}")
    others = directories + [("--in", name) for name in options.inputs]
    for flag, path in places.items():
        check_side_file(flag, path, others)
        _make_directory(flag, path)
        others.append((flag, str(path)))


def _make_directory(flag: str, path: Path) -> None:
    try:
        directory = destination(path).parent
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag} {path} cannot be written", why=error.strerror or str(error), hint="name a file somewhere else"
        ) from error

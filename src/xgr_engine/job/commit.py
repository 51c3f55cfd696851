"""Writes a file of an output whole or not at all; an error of the system says what to do next."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from xgr_engine.errors import OutputWriteError
from xgr_engine.files import write_whole


def commit(path: Path, write: Callable[[Path], object]) -> None:
    """:func:`xgr_engine.files.write_whole` for a file of an output.

    Raises:
        UsageError: something other than a file has the name.
        OutputWriteError: the system does not let the file be written.
    """
    try:
        write_whole(path, write)
    except OSError as error:
        if error.errno is None:
            raise
        raise OutputWriteError(
            f"{path}: {os.strerror(error.errno)}",
            hint="fix that and run the same command: it continues with what is not finished",
        ) from error


def commit_text(path: Path, text: str) -> None:
    """:func:`commit` of UTF-8 text."""
    commit(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

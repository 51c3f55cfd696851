"""Files appear whole or not at all: temporary name beside the target, fsync, rename, fsync of the directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Hidden, so that readers of the directory skip it, and recognisable, so that --fresh may remove it.
TEMPORARY_PREFIX = ".xgr-tmp-"


def commit(path: Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a temporary file and gives it the name ``path``, replacing what had it.

    After a crash at any moment ``path`` is absent, old or complete. An exception of ``write`` leaves nothing behind.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def commit_text(path: Path, text: str) -> None:
    """:func:`commit` of UTF-8 text."""
    commit(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Waits until a file or a directory's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Files that appear whole or not at all, and what their bytes hash to."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Hidden, so that readers of the directory skip it, and recognisable, so that a later run may remove it. The end of the
# name is not the target's either: a collector of *.prom files takes hidden ones too.
TEMPORARY_PREFIX = ".xgr-tmp-"
_SUFFIX = ".tmp"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, and give it the name ``path``, replacing what had it.

    After a crash at any moment ``path`` is absent, old or complete. An exception of ``write`` leaves nothing behind.

    Raises:
        OSError: the system does not let the file be written.
    """
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{writer}-{path.name}{_SUFFIX}")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """:func:`write_whole` of UTF-8 text."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def sync(path: Path) -> None:
    """Wait until a file or a directory's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network file systems cannot sync a directory
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Files appear whole or not at all: temporary name beside the target, fsync, rename, fsync of the directory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from xgr_engine.errors import OutputWriteError

# Hidden, so that readers of the directory skip it, and recognisable, so that a later run may remove it. The end of the
# name is not the target's either: a collector of *.prom files takes hidden ones too.
TEMPORARY_PREFIX = ".xgr-tmp-"
_SUFFIX = ".tmp"


def commit(path: Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a temporary file and gives it the name ``path``, replacing what had it.

    After a crash at any moment ``path`` is absent, old or complete. An exception of ``write`` leaves nothing behind.

    Raises:
        OutputWriteError: the system does not let the file be written.
    """
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{writer}-{path.name}{_SUFFIX}")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OutputWriteError(
                f"{path}: {os.strerror(error.errno)}",
                hint="mend that and run the same command: it goes on with what is not finished",
            ) from error
        raise


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
    except OSError as error:
        # some network file systems cannot sync a directory
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)

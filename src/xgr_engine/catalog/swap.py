"""Replace a directory in one step, so that a reader or a crash meets the old one or the new one, never a mixture."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xgr_engine.errors import OutputExistsError
from xgr_engine.files import sync

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def refuse_foreign(target: Path, own: Collection[str]) -> None:
    """Raise an OutputExistsError if ``target`` holds more than files named ``own``: a replacement would delete it."""
    foreign = sorted(path.name for path in target.iterdir() if path.name not in own or path.is_dir())
    if foreign:
        raise OutputExistsError(
            f"{target} holds files that xgr did not write there: {', '.join(foreign[:5])}"
            + (", ..." if len(foreign) > 5 else ""),
            why="replacing the directory would delete them",
            hint="move them away, or name another directory with --out",
        )


@contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """A new directory beside ``target``; it takes the place of ``target`` when the block ends without an error.

    What was at ``target`` is deleted after the exchange. On an error the new directory is deleted and ``target`` stays
    as it was. Leftovers of a build that was killed are deleted too (a live build holds a lock on its directory).
    """
    target = target.resolve()  # a link stays a link: the directory it names is exchanged
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.build-"
    _delete_leftovers(target.parent, prefix)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    lock = os.open(staging, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then leftovers of others are left alone
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield staging
        staging.chmod(0o777 & ~_umask())
        for path in (*staging.iterdir(), staging):
            sync(path)
        _move_into_place(staging, target)
        sync(target.parent)
    finally:
        os.close(lock)
        shutil.rmtree(staging, ignore_errors=True)


def _move_into_place(staging: Path, target: Path) -> None:
    """Afterwards ``staging`` is the new ``target``; an old one is at ``staging``'s path."""
    try:
        staging.rename(target)  # nothing there, or an empty directory
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(staging, target):
        return
    # No exchange on this system: for a moment there is nothing at the target.
    old = staging.with_name(staging.name + ".old")
    target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories atomically (Linux renameat2); False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _delete_leftovers(parent: Path, prefix: str) -> None:
    for path in parent.iterdir():
        if not path.name.startswith(prefix) or not path.is_dir():
            continue
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # a build that is running, or a file system that cannot tell
        finally:
            os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _umask() -> int:
    # There is no way to read it without setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask

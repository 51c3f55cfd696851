"""One run at a time on an output directory: an operating system lock on ``_xgr/lock``.

The lock belongs to the open file, so it ends with the process, however that ends; a file left behind blocks nobody.
The file's text only says who holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from xgr_engine.errors import OutputLockedError

_POLL_SECONDS = 0.2
# What flock says on a file system without locks (some network and FUSE mounts).
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def hold(
    path: Path,
    wait: float = 0.0,
    *,
    output: str = "",
    note: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Holds the output whose lock file is ``path``; the directory must exist. The file is removed at the end.

    Args:
        wait: seconds to wait for the run that holds it.
        output: what messages call it; by default the directory in whose ``_xgr`` the file lies.
        note: called once if there is something to wait for, or if this file system has no locks.
        check: called while waiting; may raise.

    Raises:
        OutputLockedError: another run holds it, and still does when the wait is over.
    """
    handle = _acquire(path, wait, output or str(path.parent.parent), note, check)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened it before notices that it is no longer the file at this path.
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquire(path: Path, wait: float, output: str, note: Callable[[str], None], check: Callable[[], None]) -> int:
    deadline = time.monotonic() + wait
    told = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if _try_lock(handle, note) and _is_at(handle, path):
                _sign(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        holder = holder_of(path)
        os.close(handle)
        if time.monotonic() >= deadline:
            raise OutputLockedError(
                f"{output}: another run holds this output{holder}",
                hint="wait for it with --wait 10m, or name another --out",
            )
        if not told:
            note(f"waiting for the run that holds {output}{holder}")
            told = True
        check()
        time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def _try_lock(handle: int, note: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        note("this file system has no locks: make sure that only one run writes this output")
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether the locked file is still the one at the path: its holder may have removed it in between."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _sign(handle: int) -> None:
    record = {
        "pid": os.getpid(),
        "machine": platform.node(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    # On a full disk the lock holds all the same.
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(record).encode(), 0)


def holder_of(path: Path) -> str:
    """`` (process 17 on host a since ...)``, or nothing where the file does not say."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return f" (process {record['pid']} on {record['machine']} since {record['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def is_held(path: Path) -> bool:
    """Whether a run holds the output now. Writes nothing, so that it serves read-only outputs too."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False

"""Write a directory beside its place and put it there in one step, so that readers see the old one or the new one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """A fresh directory that becomes ``target`` when the block ends well, and vanishes when it does not.

    What was at ``target`` stays until then and is removed after. Leftovers of killed runs on this machine are removed.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.tmp-{socket.gethostname()}-"
    _clear_leftovers(target, prefix)
    stage = target.parent / f"{prefix}{os.getpid()}"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
        for file in stage.iterdir():
            _sync(file)
        _sync(stage)
        _replace(stage, target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _replace(stage: Path, target: Path) -> None:
    old = stage.with_name(f"{stage.name}.old")
    had = target.exists()
    if had:
        target.rename(old)
    try:
        stage.rename(target)
    except OSError:
        if had:
            old.rename(target)
        raise
    _sync(target.parent)
    if had:
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clear_leftovers(target: Path, prefix: str) -> None:
    for path in [path for path in target.parent.iterdir() if path.name.startswith(prefix)]:
        owner = path.name.removeprefix(prefix).split(".")[0]
        if not owner.isdecimal() or _runs(int(owner)):
            continue
        if path.name.endswith(".old") and not target.exists():
            path.rename(target)  # killed between the two renames: the old directory is the good one
        else:
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

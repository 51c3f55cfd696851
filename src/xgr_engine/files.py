"""Files that appear whole or not at all, what their bytes hash to, and JSON from anywhere."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgr_engine.errors import UsageError

# Hidden, so that readers of the directory skip it, and recognisable, so that a later run may remove it. The end of the
# name is not the target's either: a collector of *.prom files takes hidden ones too.
TEMPORARY_PREFIX = ".xgr-tmp-"
_SUFFIX = ".tmp"

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def destination(path: Path, named: str = "") -> Path:
    """Where a file that is called ``path`` lies: links are followed, so that replacing the file leaves them links.

    Args:
        named: how an error calls it, such as ``--trace trace.json``.

    Raises:
        UsageError: something other than a file has the name, or it is where the standard output or errors go: a new
            file would take its place, and nobody would get what was meant for it.
        OSError: a part of the path is no directory, or may not be looked into.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "")
    if not kind and any(_is_stream(number, found) for number in (1, 2)):
        kind = "where this command prints"
    if kind:
        raise UsageError(
            f"{named or path} is {kind}", why="it would be replaced by a file", hint="name a file, or a place for one"
        )
    return Path(os.path.realpath(path))


def _is_stream(number: int, found: os.stat_result) -> bool:
    with suppress(OSError):  # closed
        return os.path.samestat(os.fstat(number), found)
    return False


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, and give it the name ``path``, replacing the file there.

    After a crash at any moment ``path`` is absent, old or complete. An exception of ``write`` leaves nothing behind.

    Raises:
        UsageError: what is there must not be replaced, see :func:`destination`.
        OSError: the system does not let the file be written.
    """
    target = destination(path)
    # Not made from the target's name, which may be as long as the file system allows.
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(target)
        sync(target.parent)
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


def parse_json(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """``json.loads``, for which nesting too deep is bad JSON like any other.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def misfit(value: Any, shape: Any, place: str = "") -> str | None:
    """Where parsed JSON is not of a shape: the place of the first value that is missing or of another type.

    Args:
        shape: a type; None for null; a tuple of shapes any of which will do; a list with the shape of every entry; or a
            dictionary with the shapes of keys, which may be missing where the name ends in ``?``, and under ``str`` the
            shape of every key's value.
        place: of the value itself, such as ``level_reports[0]``; the whole document is ``.``.
    """
    here = place or "."
    if isinstance(shape, tuple):
        return here if all(misfit(value, one, place) is not None for one in shape) else None
    if isinstance(shape, list) and isinstance(value, list):
        inner = [(entry, shape[0], f"{place}[{number}]") for number, entry in enumerate(value)]
    elif isinstance(shape, dict) and isinstance(value, dict):
        dot = f"{place}." if place else ""
        needed = [key for key in shape if key is not str and not key.endswith("?")]
        if missing := [key for key in needed if key not in value]:
            return f"{dot}{missing[0]}"
        every = shape.get(str, object)
        kinds = {key: shape.get(key, shape.get(f"{key}?", every)) for key in value}
        inner = [(value[key], kind, f"{dot}{key}") for key, kind in kinds.items()]
    elif shape is None or isinstance(shape, list | dict):
        return None if value is shape else here
    else:  # true and false are no numbers
        fits = isinstance(value, shape) and (shape in (bool, object) or not isinstance(value, bool))
        return None if fits else here
    return next((wrong for part in inner if (wrong := misfit(*part)) is not None), None)


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

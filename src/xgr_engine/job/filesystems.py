"""Files of an object store (``s3://bucket/key``) through pyarrow.fs, with the few methods of ``pathlib.Path`` that the
job needs, so that the readers need not tell the two apart.

Credentials, region and endpoint come from the usual places: ``AWS_*`` variables, profiles, the instance's role; a
private endpoint from ``AWS_ENDPOINT_URL``, or from the URI (``s3://bucket/key?endpoint_override=host:9000``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa

from xgr_engine.errors import InputError

_SCHEME = "s3://"
_MAGIC = re.compile(r"[*?[]")
# options of the store behind a URI; any other question mark is a glob's
_QUERY = re.compile(r"\?((?:[a-z_]+=[^/?&]*&?)+)$")


@dataclass(frozen=True)
class RemoteStat:
    """Size in bytes and time of the last change in ns, under the names that ``os.stat`` uses."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemoteFile:
    """One object.

    Attributes:
        key: ``bucket/folder/name``.
    """

    key: str
    _filesystem: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.key}"

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.key).suffixes

    def resolve(self) -> RemoteFile:
        """Itself: objects have no links."""
        return self

    def open(self, mode: str = "rb") -> Any:
        """The object, for reading at any place."""
        assert mode == "rb"
        return self._filesystem.open_input_file(self.key)

    def stream(self) -> Any:
        """The object from its first byte, decompressed if its name says so."""
        return self._filesystem.open_input_stream(self.key, compression="detect")

    def stat(self) -> RemoteStat:
        """
        Raises:
            FileNotFoundError: there is no such object.
        """
        info = self._filesystem.get_file_info(self.key)
        if not info.is_file:
            raise FileNotFoundError(f"no such object: {self}")
        return RemoteStat(info.size, info.mtime_ns or 0)


InputPath: TypeAlias = "Path | RemoteFile"


def is_remote(text: str) -> bool:
    """Whether a name is the URI of an object store."""
    return text.startswith(_SCHEME)


@dataclass(frozen=True)
class Remote:
    """A place in an object store: ``filesystem`` and ``bucket/key`` in it."""

    filesystem: Any
    key: str

    def file(self, key: str) -> RemoteFile:
        return RemoteFile(key, self.filesystem)


def open_remote(text: str) -> Remote:
    """The file system behind a URI.

    Raises:
        InputError: not a usable URI.
    """
    from pyarrow import fs

    options = _QUERY.search(text)
    place = (text[: options.start()] if options else text).removeprefix(_SCHEME).rstrip("/")
    query = dict(parse_qsl(options[1])) if options else {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and "endpoint_override" not in query:
        scheme, _, host = endpoint.rpartition("://")
        query |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        query.setdefault("region", region)
    elif "endpoint_override" in query:
        query.setdefault("region", "us-east-1")  # signatures need one; a private store has no regions
    asked = f"{_SCHEME}{place.partition('/')[0]}" + (f"?{urlencode(query)}" if query else "")
    try:
        filesystem, _ = fs.FileSystem.from_uri(asked)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"{text}: cannot be opened: {error}", hint="check the URI, AWS_REGION and credentials"
        ) from error
    return Remote(filesystem, place)


def list_remote(text: str) -> tuple[str, list[RemoteFile]]:
    """Objects behind a URI: one object, all below a prefix, or those that match a glob.

    Returns:
        The key below which partition names count (empty for one object that was named itself), and the objects in the
        order of their keys. Names starting with ``_`` or ``.`` are left out, as on disk.

    Raises:
        InputError: the store does not answer.
    """
    from pyarrow import fs

    remote = open_remote(text)
    segments = remote.key.split("/")
    fixed = next((i for i, segment in enumerate(segments) if _MAGIC.search(segment)), len(segments))
    base = "/".join(segments[:fixed])
    try:
        if fixed == len(segments):
            info = remote.filesystem.get_file_info(remote.key)
            if info.is_file:
                return "", [remote.file(remote.key)]
        selector = fs.FileSelector(base, recursive=True, allow_not_found=True)
        infos = remote.filesystem.get_file_info(selector)
    except OSError as error:
        raise InputError(
            f"{text}: the store does not answer: {error}", hint="check the endpoint and the credentials"
        ) from error
    wanted = re.compile("/".join(map(_segment_pattern, segments[fixed:])).replace("(?:.*/)?/", "(?:.*/)?"))
    keys = sorted(info.path for info in infos if info.is_file and _is_data(info.path[len(base) :]))
    if fixed < len(segments):
        below = {key: key[len(base) + 1 :] for key in keys}
        named = [key for key in keys if wanted.fullmatch(below[key])]
        # a pattern of folders, such as dt=2026-11-*, means all that is in them
        keys = named or [key for key in keys if any(wanted.fullmatch(folder) for folder in _folders(below[key]))]
    # a folder counts with its own name, a glob with the names that it matched
    top = base.rpartition("/")[0] if fixed == len(segments) else base
    return top, [remote.file(key) for key in keys]


def _folders(key: str) -> list[str]:
    return [str(folder) for folder in PurePosixPath(key).parents][:-1]


def _segment_pattern(segment: str) -> str:
    if segment == "**":
        return "(?:.*/)?"
    return translate(segment).replace(".*", "[^/]*").removeprefix("(?s:").removesuffix(r")\Z")


def _is_data(below: str) -> bool:
    return not any(name.startswith(("_", ".")) for name in below.split("/") if name)


def parquet_source(path: InputPath) -> Any:
    """What ``pq.ParquetFile`` opens."""
    return path.open() if isinstance(path, RemoteFile) else path


@contextmanager
def text_stream(path: InputPath) -> Iterator[IO[bytes]]:
    """The bytes of a text file, decompressed if its name says so."""
    with path.stream() if isinstance(path, RemoteFile) else pa.input_stream(str(path), compression="detect") as stream:
        yield stream

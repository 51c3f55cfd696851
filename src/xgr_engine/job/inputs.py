"""The users' files: which ones, what is in them, and their rows in order.

``open_inputs`` looks at every file once (columns, row groups, SHA-256); ``RowReader`` then hands out ranges of rows.
Ranges asked for in order are read in one pass; any other range costs a new start of its file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path

import pyarrow as pa

from xgr_engine.catalog.arrow_types import is_text
from xgr_engine.errors import HistoryError, UnreadableRowsError
from xgr_engine.job.filesystems import InputPath, is_remote, list_remote
from xgr_engine.job.filter_options import parse_matches
from xgr_engine.job.input_formats import FORMATS, Columns, Rows, concat_rows
from xgr_engine.job.options import HistoryOptions
from xgr_engine.job.partitions import (
    Partition,
    fields_of,
    partition_below,
    partition_of,
    with_partition,
    without,
)

_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".parq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_COMPRESSED = {".gz", ".bz2", ".zst"}


@dataclass(frozen=True)
class InputFile:
    """One file, looked at.

    Attributes:
        groups: rows of each row group; text files have one group.
        stamp: size in bytes and modification time in ns, to notice a file that changes during the run.
        partition: columns and values in the names of its directories.
    """

    path: InputPath
    format: str
    groups: tuple[int, ...]
    sha256: str
    stamp: tuple[int, int]
    partition: Partition = ()

    @property
    def rows(self) -> int:
        return sum(self.groups)


@dataclass(frozen=True)
class Inputs:
    """All files of a run, in the order of their rows in the output, and the one schema of the copied columns."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    columns: Columns

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


def find_files(paths: tuple[str, ...]) -> list[InputPath]:
    """Files behind names, globs and directories: as given, and sorted by name inside a glob or directory.

    In a glob, and in a directory and below it, names starting with ``_`` or ``.`` are skipped, as every reader of such
    directories does. ``s3://`` names objects, prefixes and globs of an object store in the same way.

    Raises:
        HistoryError: nothing there, or a file named twice.
    """
    return [path for path, _ in find_partitioned(paths)]


def find_partitioned(paths: tuple[str, ...]) -> list[tuple[InputPath, Partition]]:
    """:func:`find_files`, and what the directories of each file say of it.

    Directories count from the one that was named, its own name included, or from the first part of a glob that is a
    pattern. A file that is named itself has no partition.
    """
    found: list[tuple[InputPath, Partition]] = []
    for text in paths:
        here = _find(text)
        if not here:
            raise HistoryError(f"no input file in {text}", why="names starting with '_' or '.' are skipped")
        found.extend(here)
    seen: set[InputPath] = set()
    for path, _ in found:
        if path.resolve() in seen:
            raise HistoryError(f"{path} is named twice by --in", why="each of its rows would count twice")
        seen.add(path.resolve())
    return found


def _find(text: str) -> list[tuple[InputPath, Partition]]:
    if is_remote(text):
        base, objects = list_remote(text)
        return [(found, partition_below(found, base) if base else ()) for found in objects]
    path = Path(text)
    if path.is_dir():
        top = Path(path.name) if path.name else Path()
        return [(file, partition_of((top / file.relative_to(path)).parts[:-1])) for file in _walk(path)]
    if path.exists():
        return [(path, ())]
    if not has_magic(text):
        raise HistoryError(f"no such file: {text}", hint="check --in")
    fixed = next(place for place, part in enumerate(path.parts) if has_magic(part))
    matches = map(Path, sorted(glob(text, recursive=True)))  # noqa: PTH207 (Path.glob takes no absolute pattern)
    checked = _skipping(path.parts, fixed)
    folders_and_files = [match for match in matches if not any(map(_is_skipped, match.parts[checked]))]
    files = [file for found in folders_and_files for file in ([found] if found.is_file() else [])]
    if not files:  # the pattern matches directories: 'users/dt=2026-11-*'
        files = [file for found in folders_and_files if found.is_dir() for file in _walk(found)]
    return [(file, partition_of(file.parts[fixed:-1])) for file in files]


def would_find(pattern: str, path: Path, files: Sequence[InputPath]) -> bool:
    """Whether a glob would find a file, once it is there.

    Args:
        files: what it finds now. If these stand below directories that it finds, any other file there is found too.
    """
    names, wanted = _parts(path), _parts(pattern)
    finds_files = any(_fits(_parts(file), wanted) for file in files if isinstance(file, Path))
    checked = _skipping(wanted, next((place for place, part in enumerate(wanted) if has_magic(part)), len(wanted)))
    return any(
        _fits(names[:depth], wanted) and not any(map(_is_skipped, (*names[:depth][checked], *names[depth:])))
        for depth in ([len(names)] if finds_files else range(1, len(names) + 1))
    )


def _skipping(pattern: Sequence[str], fixed: int) -> slice:
    """The parts of what a glob matches in which no name may be one that is skipped.

    ``users/*/*.parquet`` skips what lies in ``users/_temporary``; who writes ``users/_old*/*.parquet`` means it.

    Args:
        pattern: the glob's parts; those from ``fixed`` on are matched, not spelled out.
    """
    return slice(-1 if any(map(_is_skipped, pattern[fixed:])) else fixed, None)


def _is_skipped(name: str) -> bool:
    return name.startswith(("_", ".")) and name != ".."


def _parts(path: str | Path) -> tuple[str, ...]:
    return Path(os.path.abspath(path)).parts  # noqa: PTH100 (links keep their own names, as a glob sees them)


def _fits(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a path is one that a glob finds, part by part: ``*`` stays in its directory, ``**`` is any number."""
    if not wanted:
        return not names
    many = wanted[0] == "**"
    if many and _fits(names, wanted[1:]):
        return True
    if not names or (names[0].startswith(".") and not wanted[0].startswith(".")):  # hidden from wildcards
        return False
    return fnmatchcase(names[0], wanted[0]) and _fits(names[1:], wanted if many else wanted[1:])


def _walk(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if _is_skipped(path.name):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def detect_format(path: InputPath) -> str:
    """``parquet``, ``csv`` or ``jsonl`` by name, or Parquet by its first bytes.

    Raises:
        HistoryError: none of them.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    raise HistoryError(
        f"{path}: its name says neither Parquet, CSV nor JSON Lines",
        hint="rename it to .parquet, .csv, .jsonl or .ndjson, or name the wanted files with a glob",
    )


def wanted_columns(options: HistoryOptions) -> Columns:
    """The user column first, then --keep in the given order; the interpreted columns apart."""
    lists = [options.history_col] + ([options.exclude_col] if options.exclude_col else [])
    lists += [match.user_col for match in parse_matches(options.match)]
    copied = None if options.keep == ("*",) else tuple(dict.fromkeys((options.user_col, *options.keep)))
    return Columns(copied, tuple(dict.fromkeys(lists)))


def open_inputs(options: HistoryOptions) -> Inputs:
    """Looks at every file.

    Raises:
        HistoryError: unreadable, a column missing, or copied columns whose types differ between files.
    """
    columns = wanted_columns(options)
    files: list[InputFile] = []
    schema: pa.Schema | None = None
    for path, partition in find_partitioned(options.paths):
        format_name = detect_format(path)
        try:
            status = path.stat()
            description = FORMATS[format_name].describe(path, without(columns, partition))
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise HistoryError(f"{path}: cannot be read as {format_name}: {error}") from error
        stamp = (status.st_size, status.st_mtime_ns)
        files.append(InputFile(path, format_name, description.groups, digest, stamp, partition))
        own = _with_partition_columns(description.schema, partition, columns)
        schema = own if schema is None else _common_schema(schema, own, files)
    assert schema is not None  # find_files never returns an empty list
    if columns.copied is None:
        names = [options.user_col, *(name for name in schema.names if name != options.user_col)]
        if options.user_col not in schema.names:
            raise HistoryError(f"{files[0].path}: no column {options.user_col!r}", hint="name it with --user-col")
        schema = pa.schema([schema.field(name) for name in names])
    return Inputs(tuple(files), schema, columns)


def _with_partition_columns(schema: pa.Schema, partition: Partition, columns: Columns) -> pa.Schema:
    """The copied columns of a file: those it holds and those of its directories' names, in the order asked for."""
    fields = {field.name: field for field in schema} | {field.name: field for field in fields_of(partition)}
    wanted = [name for name in columns.copied or () if name in fields]
    return pa.schema([fields[name] for name in dict.fromkeys((*wanted, *fields))])


def _common_schema(first: pa.Schema, other: pa.Schema, files: list[InputFile]) -> pa.Schema:
    """One type per copied column over all files: equal, or both text, or null on one side."""
    fields = []
    if set(first.names) != set(other.names):
        odd = sorted(set(first.names) ^ set(other.names))[0]
        in_directory = odd in dict((*files[0].partition, *files[-1].partition))
        raise HistoryError(
            f"column {odd!r} is not in every input file ({files[0].path}, {files[-1].path})",
            why="it comes from the name of a directory, and is copied with --keep or without" if in_directory else "",
            hint="run files with other partition columns by themselves"
            if in_directory
            else "name the columns that all files share with --keep",
        )
    for mine in first:
        theirs = other.field(mine.name)
        if mine.type == theirs.type or pa.types.is_null(theirs.type):
            fields.append(mine)
        elif pa.types.is_null(mine.type):
            fields.append(theirs)
        elif is_text(mine.type) and is_text(theirs.type):
            fields.append(mine if pa.types.is_large_string(mine.type) else pa.field(mine.name, pa.large_string()))
        else:
            raise HistoryError(
                f"column {mine.name!r} is {mine.type} in {files[0].path} and {theirs.type} in {files[-1].path}",
                why="a copied column has one type",
                hint="write the files with one type, or run them as separate jobs",
            )
    return pa.schema(fields)


class RowReader:
    """Reads row ranges of the inputs; cheap if they are asked for in order."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._file = -1
        self._next_row = 0
        self._stream: Iterator[Rows] = iter(())
        self._left: Rows | None = None

    def read(self, file: int, start: int, stop: int) -> Rows:
        """Rows ``start:stop`` of input file number ``file``.

        Raises:
            UnreadableRowsError: the file is damaged there; other ranges may be read.
            HistoryError: it is not the file that was looked at when the run began.
        """
        if (file, start) != (self._file, self._next_row):
            self._open(file, start)
        source = self._inputs.files[file]
        pieces: list[Rows] = []
        missing = stop - start
        try:
            while missing > 0:
                rows = self._left if self._left is not None else next(self._stream)
                self._left = rows.slice(missing, rows.length) if rows.length > missing else None
                pieces.append(rows.slice(0, missing) if rows.length > missing else rows)
                missing -= pieces[-1].length
        except StopIteration:
            raise self._changed(source) from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            self._file = -1
            self._check_stamp(source)
            raise UnreadableRowsError(f"{source.path}: rows {start}..{stop - 1} cannot be read: {error}") from error
        self._next_row = stop
        return concat_rows(pieces) if pieces else self._no_rows()

    def check_unchanged(self, file: int | None = None) -> None:
        """Raises HistoryError if an input (all, or number ``file``) is not the file that the run began with."""
        for source in self._inputs.files if file is None else [self._inputs.files[file]]:
            self._check_stamp(source)

    def _open(self, file: int, start: int) -> None:
        source = self._inputs.files[file]
        self._check_stamp(source)
        self._file, self._next_row, self._left = file, start, None
        names = [name for name, _ in source.partition]
        schema = pa.schema([field for field in self._inputs.schema if field.name not in names])
        columns = self._inputs.columns
        rows = FORMATS[source.format].batches(source.path, without(columns, source.partition), schema, start)
        self._stream = (with_partition(piece, source.partition, columns, self._inputs.schema) for piece in rows)

    def _check_stamp(self, source: InputFile) -> None:
        try:
            status = source.path.stat()
        except OSError as error:
            raise HistoryError(f"{source.path} disappeared during the run: {error}") from error
        if (status.st_size, status.st_mtime_ns) != source.stamp:
            raise self._changed(source)

    def _changed(self, source: InputFile) -> HistoryError:
        self._file = -1
        return HistoryError(
            f"{source.path} changed during the run",
            why="its size, modification time or rows differ from when the run began",
            hint="give the job a copy that nobody writes to",
        )

    def _no_rows(self) -> Rows:
        lists: dict[str, pa.Array | list[object]] = {
            name: pa.array([], pa.list_(pa.null())) for name in self._inputs.columns.lists
        }
        return Rows(self._inputs.schema.empty_table(), lists, 0)

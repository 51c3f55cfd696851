"""Directories partitioned by column values, ``dt=2026-11-29/country=AT/part.parquet``: values of columns that the
files themselves do not hold, read from the names of directories and written into them.

A value is text, never taken for a number or a date: hour ``05`` stays ``05``, as a CSV cell does. Names are
percent-encoded as Hive, Spark, Arrow and polars write them; ``__HIVE_DEFAULT_PARTITION__`` is null.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa

from xgr_engine.errors import HistoryError, UsageError
from xgr_engine.job.filesystems import InputPath
from xgr_engine.job.input_formats import Columns, ListColumn, Rows

NULL = "__HIVE_DEFAULT_PARTITION__"

# Column and value of each partitioned directory above a file, outermost first.
Partition = tuple[tuple[str, str | None], ...]


def partition_of(folders: Iterable[str]) -> Partition:
    """The columns in the names of directories; other names are skipped.

    Raises:
        HistoryError: two directories of one path name the same column.
    """
    found: dict[str, str | None] = {}
    for folder in folders:
        name, equals, value = folder.partition("=")
        name = unquote(name)
        if not equals or not name:
            continue
        if name in found:
            raise HistoryError(f"two directories of one path name the column {name!r}: {'/'.join(folders)}")
        found[name] = None if value == NULL else unquote(value)
    return tuple(found.items())


def partition_below(path: InputPath, base: str | Path) -> Partition:
    """Of a file found below ``base``."""
    below = str(path).removeprefix("s3://")[len(str(base)) :] if str(base) not in ("", ".") else str(path)
    return partition_of(below.strip("/").split("/")[:-1])


def folder_of(partition: Partition) -> str:
    """``dt=2026-11-29/country=AT``."""
    return "/".join(
        f"{quote(name, safe='')}={NULL if value is None else quote(value, safe=' ')}" for name, value in partition
    )


def without(columns: Columns, partition: Partition) -> Columns:
    """The columns that the file itself must have: where a directory names the same column, its value counts."""
    names = {name for name, _ in partition}
    copied = None if columns.copied is None else tuple(name for name in columns.copied if name not in names)
    return Columns(copied, tuple(name for name in columns.lists if name not in names))


def fields_of(partition: Partition) -> list[pa.Field]:
    return [pa.field(name, pa.string()) for name, _ in partition]


def with_partition(rows: Rows, partition: Partition, columns: Columns, schema: pa.Schema) -> Rows:
    """The rows of a file with its partition's values, columns in the order of ``schema``."""
    if not partition:
        return rows
    values = {name: pa.repeat(pa.scalar(value, pa.string()), rows.length) for name, value in partition}
    table = dict(zip(rows.table.column_names, rows.table.columns, strict=True)) | values
    lists: dict[str, ListColumn] = rows.lists | {name: values[name] for name in columns.lists if name in values}
    # the row count is passed separately: a table without columns does not know it
    return Rows(pa.table({name: table[name] for name in schema.names}, schema=schema), lists, rows.length)


def check_partition_by(names: tuple[str, ...], partitions: Iterable[Partition], user_col: str) -> None:
    """
    Raises:
        UsageError: ``--partition-by`` names a column that is not in the names of the input's directories.
    """
    for name in names:
        if name == user_col:
            raise UsageError(f"--partition-by {name}: the user column stays in the files")
        for partition in partitions:
            if name not in dict(partition):
                known = ", ".join(dict(partition)) or "none"
                raise UsageError(
                    f"--partition-by {name}: not a partition column of the input",
                    why="a part file holds rows of one input file, so the column must be in the names of "
                    f"the input's directories, such as {name}=...; they name: {known}",
                    hint="partition the input by it, or leave the column in the files with --keep",
                )


def chosen(partition: Partition, names: tuple[str, ...]) -> Partition:
    """The columns of ``--partition-by`` with a file's values, in the order asked for."""
    values = dict(partition)
    return tuple((name, values[name]) for name in names)

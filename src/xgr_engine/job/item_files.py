"""``--allow-items`` and ``--deny-items``: files of item ids, as text with one id per line, Parquet or CSV."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from xgr_engine.catalog.distinct import distinct
from xgr_engine.catalog.ids import canonical
from xgr_engine.catalog.readers.csv_quotes import check_quotes
from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import InputError

_SHOWN = 3
_JSON = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class ItemList:
    """What the files of one option name.

    Attributes:
        rows: int32 rows of ``items.parquet``, ascending, without repeats.
        ids: how many ids the files hold; unknown: how many of them no item of the catalog has.
        examples: a few of the unknown ones.
        sha256: of the contents of the files, in their order.
    """

    rows: NDArray[np.int32]
    ids: int
    unknown: int
    examples: tuple[str, ...]
    sha256: str

    @classmethod
    def of(cls, ids: pa.Array, sha256: str, vocabulary: Vocabulary) -> ItemList:
        """The items that ``ids`` (without nulls) name, matched by canonical text."""
        rows = vocabulary.rows_of(ids)
        missing = np.flatnonzero(rows < 0)
        examples = tuple(str(ids[int(at)].as_py()) for at in missing[:_SHOWN])
        return cls(distinct(rows[rows >= 0]), len(ids), len(missing), examples, sha256)


def read_item_list(option: str, paths: tuple[str, ...], column: str, vocabulary: Vocabulary) -> ItemList:
    """The items that the files name.

    Raises:
        InputError: a file is missing, unreadable, without the column, or holds no id at all: an empty list of allowed
            items is more often a failed export than intended.
    """
    digest = hashlib.sha256()
    ids: list[pa.Array] = []
    for text in paths:
        path = Path(text)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{option} {path}: cannot be read: {error.strerror or error}") from error
        digest.update(hashlib.sha256(content).digest())
        found = _texts_of(f"{option} {path}", _ids(option, path, content, column, vocabulary))
        if len(found) == 0:
            raise InputError(
                f"{option} {path}: the file names no item",
                why="an empty file is more often a failed export than intended",
                hint=f"leave {option} out for no such filter",
            )
        ids.append(found)
    return ItemList.of(pa.concat_arrays(ids), digest.hexdigest(), vocabulary)


def _texts_of(place: str, ids: pa.Array) -> pa.Array:
    """Canonical texts of the ids in a file; null and NaN name nothing."""
    try:
        return canonical(ids).drop_null()
    except InputError as error:
        raise InputError(f"{place}: {error.what}", why=error.why, hint=error.hint) from error


def _ids(option: str, path: Path, content: bytes, column: str, vocabulary: Vocabulary) -> pa.Array:
    """Ids without nulls, in the order of the file."""
    suffix = path.suffix.lower()
    if suffix in _JSON:
        raise InputError(f"{option} {path}: is JSON", hint="give text with one id per line, CSV or Parquet")
    try:
        if content[:4] == b"PAR1":
            return _table_column(option, path, pq.read_table(io.BytesIO(content)), column)
        if suffix in (".csv", ".tsv"):
            table = _read_csv(option, content, path)
            _check_header(option, path, table, column, vocabulary)
            return _table_column(option, path, table, column)
        # not splitlines(), for which a line ends at characters that an id may hold
        lines = content.decode("utf-8-sig").replace("\r", "\n").split("\n")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{option} {path}: cannot be read: {error}") from error
    return pa.array([line.strip() for line in lines if line.strip()], pa.large_string())


def _read_csv(option: str, content: bytes, path: Path) -> pa.Table:
    """Cells stay text: item 007 is not item 7."""
    if not content.strip():
        return None
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    check_quotes(f"{option} {path}", lambda: io.BytesIO(content), InputError, delimiter)
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter)
    header = pyarrow.csv.read_csv(io.BytesIO(content), parse_options=parse).column_names
    convert = pyarrow.csv.ConvertOptions(
        column_types={name: pa.large_string() for name in header}, null_values=[""], strings_can_be_null=True
    )
    return pyarrow.csv.read_csv(io.BytesIO(content), parse_options=parse, convert_options=convert)


def _check_header(option: str, path: Path, table: pa.Table | None, column: str, vocabulary: Vocabulary) -> None:
    """Raises InputError where the first line of a file with one column is no header: that item would be lost."""
    if table is None or table.num_columns != 1 or table.column_names == [column]:
        return
    if (vocabulary.rows_of(pa.array(table.column_names, pa.large_string())) >= 0).any():
        raise InputError(
            f"{option} {path}: the first line is the item {table.column_names[0]}, not the name of a column",
            hint=f"begin the file with the line {column}, or call it .txt: text with one id per line",
        )


def _table_column(option: str, path: Path, table: pa.Table | None, column: str) -> pa.Array:
    if table is None:
        return pa.array([], pa.large_string())
    if table.column_names.count(column) > 1:
        raise InputError(f"{option} {path}: two columns are named {column!r}", hint="rename one of them")
    if column not in table.column_names:
        if table.num_columns != 1:
            raise InputError(
                f"{option} {path}: no column {column!r}",
                why=f"the file has: {', '.join(table.column_names)}",
                hint="name the column of item ids with --items-col",
            )
        column = table.column_names[0]
    return table.column(column).combine_chunks().drop_null()

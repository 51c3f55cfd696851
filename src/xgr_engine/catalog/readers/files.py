"""One table file to an Arrow table: Parquet, CSV, TSV, JSON lines; the text formats may be compressed (.gz, .zst)."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from xgr_engine.catalog.arrow_types import is_text
from xgr_engine.catalog.readers.base import ReadOptions
from xgr_engine.catalog.readers.csv_quotes import check_quotes
from xgr_engine.errors import CatalogError
from xgr_engine.files import parse_json

PARQUET = (".parquet", ".pq")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
_COMPRESSION = (".gz", ".bz2", ".zst")
_JSON_SAMPLE_LINES = 1000
_JSON_BLOCK = 16 << 20
# Integers up to here have a float64 of their own.
_FLOAT_EXACT = float(2**53)


def table_suffix(path: Path) -> str:
    """The suffix that tells the kind of file: ``.csv`` for ``a.csv`` and for ``a.csv.gz``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSION:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_table(path: Path, head: bytes) -> bool:
    """Whether the name or the first bytes say that this is one of the table formats."""
    return head[:4] == b"PAR1" or table_suffix(path) in (*PARQUET, *DELIMITERS, *JSON_LINES)


class TableFile:
    """A file whose schema is known before its columns are read, so that only the columns needed are."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        """
        Raises:
            CatalogError: the file cannot be read as what it seems to be.
        """
        self.path = path
        suffix = table_suffix(path)
        try:
            with path.open("rb") as file:
                parquet = file.read(4) == b"PAR1"
            if parquet or suffix in PARQUET:
                import pyarrow.parquet as pq

                self._parquet = pq.ParquetFile(path, memory_map=True)
                self.schema: pa.Schema = self._parquet.schema_arrow
                return
            self._parquet = None
            if suffix in DELIMITERS:
                self._table = _read_csv(path, DELIMITERS[suffix], options)
            else:
                self._table = _read_json_lines(path, options)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise CatalogError(f"{path} cannot be read", why=str(error)) from error
        self.schema = self._table.schema

    def columns(self, names: Sequence[str]) -> pa.Table:
        """The columns ``names``, in that order."""
        if self._parquet is None:
            return self._table.select(names)
        try:
            # Group by group: Arrow cannot join the dictionaries that groups have for the values of a list.
            groups = range(self._parquet.num_row_groups)
            pieces = [self._parquet.read_row_group(group, columns=list(names)).select(names) for group in groups]
            return pa.concat_tables([self.schema.empty_table().select(names), *pieces])
        except (pa.ArrowException, OSError) as error:
            raise CatalogError(f"{self.path} cannot be read", why=str(error)) from error


def _read_csv(path: Path, delimiter: str, options: ReadOptions) -> pa.Table:
    import pyarrow.csv as csv

    check_quotes(path, lambda: pa.input_stream(str(path)), CatalogError, delimiter)
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with pa.input_stream(str(path)) as stream:
        header = csv.open_csv(stream, parse_options=parse).schema.names
    # Ids and SIDs are read as text first: "007" is not 7. SIDs one column a level are numbers or tokens.
    kinds = {name: pa.string() for name in (options.item_col, options.sid_col) if name in header}
    with pa.input_stream(str(path)) as stream:
        table = csv.read_csv(stream, parse_options=parse, convert_options=csv.ConvertOptions(column_types=kinds))
    if options.item_col in header:
        at = table.schema.get_field_index(options.item_col)
        table = table.set_column(at, options.item_col, _ids_of_text(table[options.item_col]))
    return table


def _ids_of_text(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Ids of a CSV file: int64 if every one of them is written as an int64 is, else the text unchanged."""
    present = pc.if_else(pc.equal(texts, ""), None, texts)
    if pc.all(pc.match_substring_regex(present, r"^(0|-?[1-9][0-9]{0,17})$")).as_py():
        return present.cast(pa.int64())
    return present


def _read_json_lines(path: Path, options: ReadOptions) -> pa.Table:
    import pyarrow.json as json_reader

    schema = _sampled_schema(path, options.item_col)
    parse = json_reader.ParseOptions(explicit_schema=schema)
    read = json_reader.ReadOptions(block_size=_JSON_BLOCK)
    try:
        with pa.input_stream(str(path)) as stream:
            table = json_reader.read_json(stream, read_options=read, parse_options=parse)
    except pa.ArrowInvalid as error:
        changed = re.search(r"Column\(/(.*?)\) changed from (\w+) to (\w+)", str(error))
        if changed and changed[1] == options.item_col:
            raise mixed_ids(path, f"{changed[2]}s", f"{changed[3]}s") from error
        if changed:
            raise _mixed_values(path, *changed.groups()) from error
        raise
    if options.item_col in table.schema.names:
        _refuse_rounded_ids(table[options.item_col], path)
    return table


def _mixed_values(path: Path, place: str, one: str, other: str) -> CatalogError:
    """The error for a column of two types; ``place`` is Arrow's, with ``[]`` for what a list holds: ``sid/[]``."""
    column, _, inner = place.partition("/")
    where = f"values inside column {column}" if inner else f"values of column {column}"
    return CatalogError(
        f"{path}: some {where} are of type {one}, others of type {other}",
        why="a column has one type in all rows",
        hint=f'write {column} in one way in every row, such as [12, 3, 7] or "<a_12><b_3><c_7>"',
    )


def _refuse_rounded_ids(ids: pa.ChunkedArray, path: Path) -> None:
    """Arrow reads a column of numbers as floats once one does not fit an int64, and then rounds ids beyond 2**53."""
    if pa.types.is_floating(ids.type) and pc.any(pc.greater_equal(pc.abs(ids), _FLOAT_EXACT)).as_py():
        raise CatalogError(
            f"{path}: some item ids are numbers too large to be read exactly",
            why="one of them does not fit a 64-bit integer, and as floating-point numbers two ids could become one",
            hint="write the ids as text, or the catalog as Parquet",
        )


def _sampled_schema(path: Path, item_col: str) -> pa.Schema | None:
    """Types that must not be guessed: text stays text (Arrow would take "2024-01-01" for a date), as do ids.

    Raises:
        CatalogError: ids of two types.
    """
    fields: dict[str, pa.DataType] = {}
    id_kinds: dict[type, object] = {}
    numbers: list[int] = []
    with pa.input_stream(str(path)) as stream, io.BufferedReader(stream) as file:
        lines = itertools.islice(file, _JSON_SAMPLE_LINES)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise CatalogError(f"{path}, line {number}: not JSON", why=str(error)) from error
            if not isinstance(record, dict):
                raise CatalogError(f"{path}, line {number}: not a JSON object", hint="write one object per line")
            fields.update((name, pa.string()) for name, value in record.items() if isinstance(value, str))
            if isinstance(record.get(item_col), str | int | float):
                id_kinds.setdefault(type(record[item_col]), record[item_col])
            if type(record.get(item_col)) is int:
                numbers.append(record[item_col])
    if str in id_kinds and len(id_kinds) > 1:
        number_kind = next(kind for kind in id_kinds if kind is not str)
        raise mixed_ids(path, f"numbers ({id_kinds[number_kind]})", f'text ("{id_kinds[str]}")')
    if set(id_kinds) == {int} and min(numbers) >= 0 and 2**63 <= max(numbers) < 2**64:
        fields[item_col] = pa.uint64()
    return pa.schema(list(fields.items())) if fields else None


def mixed_ids(where: object, one: str, other: str) -> CatalogError:
    """The error for ids of two types: 5 and "5" would be one item."""
    return CatalogError(
        f"{where}: some item ids are {one}, others are {other}",
        why='ids are matched by their text, so 5 and "5" are the same item; a catalog must hold one type',
        hint="write all ids as numbers, or all as text",
    )


def id_kind(kind: pa.DataType) -> str:
    """Number, text or the type's own name: ids of one catalog must agree in it."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numbers"
    return "text" if is_text(kind) else str(kind)

"""Parquet, CSV and JSON Lines as streams of row batches: only the named columns, a few thousand rows in memory.

List columns of JSON Lines stay Python objects until ``job.lists`` has looked at them, because one odd cell must
reject one row and not fail Arrow's conversion of a whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from xgr_engine.catalog.readers.csv_quotes import check_quotes
from xgr_engine.errors import HistoryError
from xgr_engine.job.filesystems import InputPath, parquet_source, text_stream

BATCH_ROWS = 4096
_CSV_BLOCK = 16 << 20  # a row must fit into one block: 16 MiB hold a history of a million ids

# An Arrow array, or a Python list of cells. pyarrow has no types of its own for mypy to see.
ListColumn: TypeAlias = "pa.Array | list[Any]"


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one file.

    Attributes:
        table: the columns that are copied to the output, in their own types.
        lists: the interpreted columns, as Arrow arrays or (JSON Lines) as Python objects.
    """

    table: pa.Table
    lists: dict[str, ListColumn]
    length: int

    def slice(self, start: int, stop: int) -> Rows:
        lists = {
            name: column[start:stop] if isinstance(column, list) else column.slice(start, stop - start)
            for name, column in self.lists.items()
        }
        return Rows(self.table.slice(start, stop - start), lists, stop - start)


def concat_rows(pieces: list[Rows]) -> Rows:
    """One ``Rows`` of at least one piece; all pieces come from one file."""
    if len(pieces) == 1:
        return pieces[0]
    lists: dict[str, ListColumn] = {}
    for name, first in pieces[0].lists.items():
        columns = [piece.lists[name] for piece in pieces]
        if isinstance(first, list):
            lists[name] = [cell for column in columns for cell in column]
        else:
            lists[name] = pa.chunked_array(columns).combine_chunks()
    return Rows(pa.concat_tables([piece.table for piece in pieces]), lists, sum(piece.length for piece in pieces))


@dataclass(frozen=True)
class Columns:
    """What to read: ``copied`` columns go to the output as they are (None: every column), ``lists`` are interpreted.

    The latter are the columns with lists of ids, and those of ``--match``.
    """

    copied: tuple[str, ...] | None
    lists: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """One input file: rows of each row group (one group for text files) and the types of the copied columns."""

    groups: tuple[int, ...]
    schema: pa.Schema


class _Format:
    def describe(self, path: InputPath, columns: Columns) -> Description:
        """One look at the file: its row groups, and that it has the columns. Raises HistoryError."""
        raise NotImplementedError

    def batches(self, path: InputPath, columns: Columns, schema: pa.Schema, start: int) -> Iterator[Rows]:
        """The rows from ``start`` on."""
        raise NotImplementedError


def _check_columns(path: InputPath, present: list[str], columns: Columns) -> tuple[str, ...]:
    """The copied columns by name.

    Raises:
        HistoryError: a column is missing or not unique.
    """
    copied = tuple(present) if columns.copied is None else columns.copied
    for name in dict.fromkeys((*copied, *columns.lists)):
        if name not in present:
            shown = ", ".join(present[:20]) or "none"
            raise HistoryError(
                f"{path}: no column {name!r}",
                why=f"the file has: {shown}",
                hint="name the columns with --user-col, --history-col, --exclude-col, --keep, --match attribute=column",
            )
        if present.count(name) > 1:
            raise HistoryError(f"{path}: two columns are named {name!r}", hint="rename one of them")
    return copied


def _drop_rows(batches: Iterator[Rows], skip: int) -> Iterator[Rows]:
    for rows in batches:
        if skip >= rows.length:
            skip -= rows.length
            continue
        yield rows.slice(skip, rows.length) if skip else rows
        skip = 0


def _from_arrow(batch: pa.RecordBatch, schema: pa.Schema, columns: Columns) -> Rows:
    table = pa.Table.from_batches([batch.select(schema.names)]).cast(schema)
    return Rows(table, {name: batch.column(name) for name in columns.lists}, batch.num_rows)


def parquet_batches(
    file: pq.ParquetFile, rows: int, columns: Sequence[str], first_group: int = 0
) -> Iterator[pa.RecordBatch]:
    """Batches of at most ``rows`` rows, row group by row group: each group has dictionaries of its own, and Arrow
    cannot join those of the values of a list."""
    for group in range(first_group, file.num_row_groups):
        yield from file.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """View types, nested ones too, replaced by the plain types of the same values: Arrow cannot take rows of views."""
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type), kind.keys_sorted)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        value = kind.value_field.with_type(_without_views(kind.value_type))
        if types.is_fixed_size_list(kind):
            return pa.list_(value, kind.list_size)
        return pa.list_(value) if types.is_list(kind) else pa.large_list(value)
    return kind


class ParquetFormat(_Format):
    """Row groups before the first wanted row are skipped, not read."""

    def describe(self, path: InputPath, columns: Columns) -> Description:
        with pq.ParquetFile(parquet_source(path)) as file:
            schema = file.schema_arrow.remove_metadata()
            copied = _check_columns(path, schema.names, columns)
            groups = tuple(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))
        return Description(groups, pa.schema([(name, _without_views(schema.field(name).type)) for name in copied]))

    def batches(self, path: InputPath, columns: Columns, schema: pa.Schema, start: int) -> Iterator[Rows]:
        # Without pre_buffer and with a small buffer a huge row group is streamed page by page.
        # A damaged page must be an error, not other ids: writers that add checksums have them checked.
        with pq.ParquetFile(
            parquet_source(path), pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as file:
            first, skip = 0, start
            while first < file.metadata.num_row_groups and file.metadata.row_group(first).num_rows <= skip:
                skip -= file.metadata.row_group(first).num_rows
                first += 1
            names = list(dict.fromkeys((*schema.names, *columns.lists)))
            stream = parquet_batches(file, BATCH_ROWS, names, first)
            yield from _drop_rows((_from_arrow(batch, schema, columns) for batch in stream), skip)


class CsvFormat(_Format):
    """Every cell stays the text it is: a CSV file has no types, and a guess would turn user 007 into 7."""

    def describe(self, path: InputPath, columns: Columns) -> Description:
        check_quotes(path, lambda: text_stream(path), HistoryError)
        names = self._header(path)
        copied = _check_columns(path, names, columns)
        counted = Columns(copied[:1] or columns.lists[:1], ())
        schema = pa.schema([(name, pa.string()) for name in copied])
        one = pa.schema([(name, pa.string()) for name in counted.copied or ()])
        rows = sum(batch.length for batch in self.batches(path, counted, one, 0))
        return Description((rows,), schema)

    def _header(self, path: InputPath) -> list[str]:
        with text_stream(path) as stream, pyarrow.csv.open_csv(stream, *self._options(None)[:2]) as reader:
            return list(reader.schema.names)

    def _options(self, names: list[str] | None) -> tuple[Any, Any, Any]:
        convert = pyarrow.csv.ConvertOptions(
            include_columns=names,
            column_types={name: pa.string() for name in names or []},
            strings_can_be_null=False,
        )
        return (
            pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False),
            pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert,
        )

    def batches(self, path: InputPath, columns: Columns, schema: pa.Schema, start: int) -> Iterator[Rows]:
        names = list(dict.fromkeys((*schema.names, *columns.lists)))
        with text_stream(path) as stream, pyarrow.csv.open_csv(stream, *self._options(names)) as reader:
            yield from _drop_rows((_from_arrow(batch, schema, columns) for batch in reader), start)


class JsonLinesFormat(_Format):
    """One object per line; a key that a line lacks is null. Blank lines are skipped and do not count as rows."""

    def describe(self, path: InputPath, columns: Columns) -> Description:
        present: dict[str, pa.DataType] = {}
        wanted = columns.copied
        rows = 0
        for objects in self._objects(path, 0):
            names = dict.fromkeys(key for entry in objects for key in entry)
            present.update({name: pa.null() for name in names if name not in present})
            for name in names if wanted is None else [name for name in wanted if name in names]:
                present[name] = self._widen(path, name, present[name], [entry.get(name) for entry in objects])
            rows += len(objects)
        copied = _check_columns(path, list(present), columns) if rows else (columns.copied or columns.lists[:1])
        return Description((rows,), pa.schema([(name, present.get(name, pa.null())) for name in copied]))

    def _widen(self, path: InputPath, name: str, known: pa.DataType, cells: list[Any]) -> pa.DataType:
        try:
            # pa.array and not pa.infer_type, which accepts [1, "a"]
            fields = [pa.schema([(name, kind)]) for kind in (known, pa.array(cells).type)]
            return pa.unify_schemas(fields, promote_options="permissive").field(0).type
        except (pa.ArrowException, OverflowError) as error:
            raise HistoryError(
                f"{path}: column {name!r} mixes types: {error}",
                hint="a copied column needs one type: clean it, or leave it out of --keep",
            ) from error

    def _objects(self, path: InputPath, start: int) -> Iterator[list[dict[str, Any]]]:
        batch: list[dict[str, Any]] = []
        row = 0
        with text_stream(path) as stream:
            for number, line in enumerate(_lines(stream), start=1):
                if not line.strip():
                    continue
                row += 1
                if row <= start:
                    continue
                batch.append(_parse_line(path, number, line))
                if len(batch) == BATCH_ROWS:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def batches(self, path: InputPath, columns: Columns, schema: pa.Schema, start: int) -> Iterator[Rows]:
        for objects in self._objects(path, start):
            try:
                arrays = [pa.array([entry.get(field.name) for entry in objects], field.type) for field in schema]
            except (pa.ArrowException, OverflowError, TypeError) as error:
                raise HistoryError(f"{path}: a copied column cannot be kept unchanged: {error}") from error
            lists: dict[str, ListColumn] = {name: [entry.get(name) for entry in objects] for name in columns.lists}
            yield Rows(pa.Table.from_arrays(arrays, schema=schema), lists, len(objects))


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of a binary stream. pyarrow's own line reader loads the whole stream first."""
    rest = b""
    while block := stream.read(1 << 20):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _parse_line(path: InputPath, number: int, line: bytes) -> dict[str, Any]:
    try:
        # utf-8-sig: some writers put a byte order mark before the first line.
        entry = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():  # a surrogate pair is a character; half of one is not, and no output could hold it
            json.dumps(entry, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HistoryError(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise HistoryError(f"{path}: line {number} is not a JSON object", hint='write one {"user_id": ...} per line')
    return entry


FORMATS: dict[str, _Format] = {"parquet": ParquetFormat(), "csv": CsvFormat(), "jsonl": JsonLinesFormat()}

"""``table``: Parquet, CSV, TSV and JSON lines with an item id column and a SID as list, one column a level, or text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import is_list
from xgr_engine.catalog.ids import first_fraction, plain
from xgr_engine.catalog.readers.base import (
    Catalog,
    ReadOptions,
    assemble,
    kept_attributes,
    no_columns,
    require_column,
)
from xgr_engine.catalog.readers.files import TableFile, id_kind, is_table, mixed_ids
from xgr_engine.catalog.readers.sid_columns import (
    SidSource,
    Templates,
    find_sid_columns,
    read_level_columns,
    read_sid_column,
)
from xgr_engine.errors import CatalogError

IntArray = NDArray[np.int32]


def detect(path: Path, head: bytes) -> bool:
    """By the name of the file, or Parquet's first bytes."""
    return is_table(path, head)


def read(paths: Sequence[Path], options: ReadOptions) -> Catalog:
    """Several files are one catalog; an attribute that a file lacks is null there."""
    parts = [_read_file(path, options) for path in paths]
    kinds: dict[str, Path] = {}
    for path, part in zip(paths, parts, strict=True):
        if not pa.types.is_null(part.item_id.type):
            kinds.setdefault(id_kind(part.item_id.type), path)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise mixed_ids(f"{first} and {second}", one, other)
    if len(parts) == 1:
        return parts[0]
    return Catalog(
        item_id=_joined_ids(parts),
        codes=_stacked([part.codes for part in parts]),
        attributes=_joined_attributes(parts, paths),
        sid_templates=_joined_templates(parts, paths),
        null_ids=sum(part.null_ids for part in parts),
        null_sids=sum(part.null_sids for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _read_file(path: Path, options: ReadOptions) -> Catalog:
    file = TableFile(path, options)
    names = file.schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise CatalogError(f"{path}: the column {repeated[0]} occurs twice")
    require_column(names, options.item_col, "item id", hint="name it with --item-col")
    sid_columns = find_sid_columns(names, options.sid_col)
    if not sid_columns:
        require_column(
            names, options.sid_col, "SID", hint=f"name it with --sid-col ({options.sid_col}_0, ... works too)"
        )
    if options.item_col in sid_columns or options.item_col == options.sid_col:
        raise CatalogError(
            f"column {options.item_col!r} cannot be both the item id and the SID",
            hint="name two columns with --item-col and --sid-col",
        )
    kept, notes = kept_attributes(file.schema, options, [options.item_col, *sid_columns])
    table = file.columns([options.item_col, *sid_columns, *kept])
    item_id = plain(table[options.item_col])
    _check_ids(item_id, path, options.item_col)
    source = SidSource(path, item_id, sid_columns[0])
    if len(sid_columns) == 1 and not _is_one_level(table[sid_columns[0]].type, sid_columns[0], options.sid_col):
        codes, templates = read_sid_column(table[sid_columns[0]], source)
    else:
        codes, templates = read_level_columns([table[name] for name in sid_columns], source)
    attributes = pa.table({name: _plain_column(table[name]) for name in kept}) if kept else no_columns(len(item_id))
    return assemble(item_id, codes, attributes, templates, notes)


def _check_ids(ids: pa.Array, path: Path, column: str) -> None:
    """Raises CatalogError for ids that no history could name: dates, times, fractions and what is no single value."""
    kind = ids.type
    if pa.types.is_temporal(kind) or pa.types.is_boolean(kind) or pa.types.is_nested(kind):
        raise CatalogError(
            f"{path}: the item ids in column {column!r} are of type {kind}",
            why="histories name items by whole numbers or text",
            hint="write the ids as integers or text, or name another column with --item-col",
        )
    row = first_fraction(ids)
    if row is not None:
        raise CatalogError(
            f"{path}, row {row}: the item id {ids[row].as_py()} is not a whole number",
            why="histories name items by whole numbers or text",
            hint="write the ids as text, or name another column with --item-col",
        )


def _is_one_level(kind: pa.DataType, found: str, sid_col: str) -> bool:
    """A lone ``sid_0`` of numbers is a catalog of one level."""
    return found != sid_col and not is_list(kind)


def _plain_column(column: pa.ChunkedArray) -> pa.Array:
    """Dictionaries decoded, also inside lists, so that equal values are equal bytes."""
    kind = column.type
    if is_list(kind) and pa.types.is_dictionary(kind.value_type):
        column = column.cast(pa.large_list(kind.value_type.value_type))
    return plain(column)


def _joined_ids(parts: Sequence[Catalog]) -> pa.Array:
    tables = [pa.table({"item_id": part.item_id}) for part in parts]
    return plain(pa.concat_tables(tables, promote_options="permissive")["item_id"])


def _joined_attributes(parts: Sequence[Catalog], paths: Sequence[Path]) -> pa.Table:
    names = list(dict.fromkeys(name for part in parts for name in part.attributes.column_names))
    if not names:
        return no_columns(sum(len(part.item_id) for part in parts))
    try:
        whole = [
            part.attributes if part.attributes.num_columns else pa.table({names[0]: pa.nulls(len(part.item_id))})
            for part in parts
        ]
        return pa.concat_tables(whole, promote_options="permissive").combine_chunks()
    except pa.ArrowException as error:
        raise CatalogError(
            f"the attribute columns of {paths[0]} and the other files have incompatible types",
            why=str(error),
            hint="write the files with one schema, or choose columns with --attributes",
        ) from error


def _joined_templates(parts: Sequence[Catalog], paths: Sequence[Path]) -> Templates:
    longest: Templates = None
    bare = None
    for part, path in zip(parts, paths, strict=True):
        if part.sid_templates is None:
            bare = path if len(part.item_id) else bare
            continue
        shared = min(len(part.sid_templates), len(longest or ()))
        if longest is not None and part.sid_templates[:shared] != longest[:shared]:
            raise CatalogError(f"{path} spells its SID tokens {part.sid_templates}, other files {longest}")
        if longest is None or len(part.sid_templates) > len(longest):
            longest = part.sid_templates
    if longest is not None and bare is not None:
        raise CatalogError(f"{bare} holds bare codes, other files hold tokens such as {longest[0]}")
    return longest


def _stacked(tables: Sequence[IntArray]) -> IntArray:
    width = max(table.shape[1] for table in tables)
    padded = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1) for table in tables]
    return np.concatenate(padded)

"""One row per item, and the order of the items that share a SID."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.ids import IdIndex, canonical, has_duplicates, is_decimal_text, plain
from xgr_engine.catalog.readers import Catalog
from xgr_engine.catalog.sid_text import sid_text
from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import CatalogError

Rows = NDArray[np.intp]


def without_duplicates(catalog: Catalog) -> tuple[Catalog, int]:
    """The catalog without rows that repeat an item exactly, and their number.

    Raises:
        CatalogError: rows of one item contradict each other in SID or attributes.
    """
    if not has_duplicates(catalog.item_id):
        return catalog, 0
    first, again = IdIndex(catalog.item_id).duplicates.T
    moved = np.flatnonzero((catalog.codes[first] != catalog.codes[again]).any(axis=1))
    if len(moved):
        at = int(moved[0])
        raise CatalogError(
            f"item {catalog.item_id[int(first[at])].as_py()} has two SIDs: "
            f"{_shown_sid(catalog, first[at])} and {_shown_sid(catalog, again[at])}",
            why=f'{len(moved)} rows repeat an item with another SID (ids match by their text: 5 and "5" are one item)',
            hint="keep one row per item",
        )
    for name in catalog.attributes.column_names:
        column = plain(catalog.attributes[name])
        differs = _first_difference(column.take(pa.array(first)), column.take(pa.array(again)))
        if differs is not None:
            one, two = (column[int(rows[differs])].as_py() for rows in (first, again))
            raise CatalogError(
                f"item {catalog.item_id[int(first[differs])].as_py()} occurs twice, with {name} {one!r} and {two!r}",
                why="which of the two counts would depend on the order of the rows",
                hint="keep one row per item, or leave the column out with --attributes",
            )
    keep = np.ones(len(catalog.item_id), np.bool_)
    keep[again] = False
    return catalog.take(np.flatnonzero(keep)), len(again)


def refuse_collisions(catalog: Catalog, trie: ItemTrie, order: Rows) -> None:
    """Raise a CatalogError that names the items of the first shared SID, if there is one."""
    sizes = np.diff(trie.item_start)
    shared = np.flatnonzero(sizes > 1)
    if len(shared) == 0:
        return
    rows = order[trie.item_start[shared[0]] : trie.item_start[shared[0] + 1]]
    names = ", ".join(str(item) for item in catalog.item_id.take(pa.array(rows[:5])).to_pylist())
    raise CatalogError(
        f"{len(shared)} SIDs are shared by several items; {_shown_sid(catalog, rows[0])} by {names}"
        + (", ..." if len(rows) > 5 else ""),
        why="--collisions error was asked for",
        hint="give these items SIDs of their own, or build with --collisions keep",
    )


def ranked_within_sids(
    order: Rows, trie: ItemTrie, catalog: Catalog, rank_column: str | None, descending: bool
) -> Rows:
    """``order`` with the items of each SID by rank (nulls last), then by item id; best first.

    'By item id' orders numbers and decimal text by value, and other text by its bytes after them.
    """
    sizes = np.diff(trie.item_start)
    places = np.flatnonzero(np.repeat(sizes > 1, sizes))
    if len(places) == 0:
        return order
    rows = order[places]
    columns: dict[str, pa.Array] = {"leaf": pa.array(trie.leaf_of_item[places])}
    directions = [("leaf", "ascending")]
    if rank_column is not None:
        columns["rank"] = plain(catalog.attributes[rank_column]).take(pa.array(rows))
        directions.append(("rank", "descending" if descending else "ascending"))
    keys = _id_keys(catalog.item_id.take(pa.array(rows)))
    columns |= keys
    directions += [(name, "ascending") for name in keys]
    try:
        ranked = pc.sort_indices(pa.table(columns), sort_keys=directions)  # nulls come last
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise CatalogError(f"the rank column {rank_column!r} cannot be sorted", why=str(error)) from error
    result = order.copy()
    result[places] = rows[ranked.to_numpy()]
    return result


def _id_keys(ids: pa.Array) -> dict[str, pa.Array]:
    """Sort keys of 'by item id'."""
    kind = ids.type
    if pa.types.is_float16(kind):
        ids = ids.cast(pa.float32())  # Arrow does not sort half floats
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return {"id": ids}
    texts = canonical(ids)
    decimal = is_decimal_text(texts)
    # Without leading zeros the longer number is the larger one.
    digits = pc.if_else(decimal, pc.binary_length(texts), 0)
    return {"other": pc.invert(decimal).cast(pa.uint8()), "digits": digits, "text": texts}


def _first_difference(one: pa.Array, two: pa.Array) -> int | None:
    if one.equals(two):
        return None
    for at, (a, b) in enumerate(zip(one.to_pylist(), two.to_pylist(), strict=True)):
        both_nan = a != a and b != b
        if a != b and not both_nan:
            return at
    return None


def _shown_sid(catalog: Catalog, row: np.intp) -> str:
    codes = catalog.codes[row]
    return sid_text(tuple(codes[codes >= 0].tolist()), catalog.sid_templates)

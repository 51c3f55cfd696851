"""What every catalog reader takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import is_list, is_text
from xgr_engine.catalog.ids import plain
from xgr_engine.errors import CatalogError
from xgr_engine.options import check_types

IntArray = NDArray[np.int32]

# Columns of items.parquet that an attribute must not shadow.
RESERVED = ("item_id", "sid", "leaf")


@dataclass(frozen=True)
class ReadOptions:
    """How to read a catalog.

    Attributes:
        format: name of a reader, or None to detect it.
        item_col: column of item ids (``table`` only).
        sid_col: column of SIDs, or the common beginning of ``sid_0``, ``sid_1``... (``table`` only).
        attributes: columns kept beside each item; None for all that a filter can use, empty for none.
        rank_column: column that orders the items of one SID, read whether it is kept or not.
    """

    format: str | None = None
    item_col: str = "item_id"
    sid_col: str = "sid"
    attributes: tuple[str, ...] | None = None
    rank_column: str | None = None

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def named_columns(self) -> tuple[str, ...] | None:
        """Columns asked for by name, the rank column among them; None for all."""
        if self.attributes is None:
            return None
        extra = (self.rank_column,) if self.rank_column and self.rank_column not in self.attributes else ()
        return (*self.attributes, *extra)


@dataclass(frozen=True)
class Catalog:
    """Items and their SIDs, in file order.

    Attributes:
        item_id: [N] ids in their own type, no nulls.
        codes: int32 [N, L], padded with -1 at the end; at least one code a row.
        attributes: [N] rows of attribute columns.
        sid_templates: per level the token text with ``{}`` for the code, or None where the catalog holds bare codes.
        null_ids: rows left out because they have no item id.
        null_sids: rows left out because they have no SID.
        notes: what else the reader left out or assumed, for the report.
    """

    item_id: pa.Array
    codes: IntArray
    attributes: pa.Table
    sid_templates: tuple[str, ...] | None = None
    null_ids: int = 0
    null_sids: int = 0
    notes: tuple[str, ...] = ()

    def take(self, rows: NDArray[np.intp]) -> Catalog:
        """The catalog with only ``rows``, in that order."""
        indices = pa.array(rows)
        return Catalog(
            self.item_id.take(indices),
            self.codes.take(rows, axis=0),
            self.attributes.take(indices) if self.attributes.num_columns else no_columns(len(rows)),
            self.sid_templates,
            self.null_ids,
            self.null_sids,
            self.notes,
        )


class Reader(Protocol):
    """One catalog format: a module with these two functions."""

    def detect(self, path: Path, head: bytes) -> bool:
        """Whether ``path``, whose first bytes are ``head``, is of this format."""

    def read(self, paths: Sequence[Path], options: ReadOptions) -> Catalog:
        """Read the files as one catalog.

        Raises:
            CatalogError: names the file, and the row, item or column.
        """


def assemble(
    item_id: pa.Array | pa.ChunkedArray,
    codes: IntArray,
    attributes: pa.Table,
    templates: tuple[str, ...] | None,
    notes: Sequence[str] = (),
) -> Catalog:
    """A catalog of the rows that have both an item id and a SID (a row of ``codes`` that is all -1 has none)."""
    item_id = plain(item_id)
    missing_id = pc.is_null(item_id, nan_is_null=True).to_numpy(zero_copy_only=False)
    missing_sid = codes[:, 0] < 0 if codes.shape[1] else np.ones(len(codes), np.bool_)
    catalog = Catalog(
        item_id,
        codes,
        attributes,
        templates,
        int(missing_id.sum()),
        int((missing_sid & ~missing_id).sum()),
        tuple(notes),
    )
    if missing_id.any() or missing_sid.any():
        catalog = catalog.take(np.flatnonzero(~(missing_id | missing_sid)))
    return _without_unused_levels(catalog)


def _without_unused_levels(catalog: Catalog) -> Catalog:
    """A level column that is null in every row, or is used by left out rows alone, is no level of the catalog."""
    levels = catalog.codes.shape[1]
    while levels and not (catalog.codes[:, levels - 1] >= 0).any():
        levels -= 1
    if levels == catalog.codes.shape[1]:
        return catalog
    templates = None if catalog.sid_templates is None else catalog.sid_templates[:levels] or None
    return replace(catalog, codes=np.ascontiguousarray(catalog.codes[:, :levels]), sid_templates=templates)


def kept_attributes(schema: pa.Schema, options: ReadOptions, taken: Sequence[str]) -> tuple[list[str], list[str]]:
    """Columns of ``schema`` to keep as attributes, and notes on those left out.

    Args:
        schema: columns of the source.
        options: says which columns are wanted.
        taken: columns that are the item id or the SID.

    Raises:
        CatalogError: a column asked for by name is not there, or bears a reserved name.
    """
    named = options.named_columns
    if named is not None:
        for name in named:
            require_column(schema.names, name, "attribute")
            if name in RESERVED and name not in taken:
                raise CatalogError(f"column {name} cannot be kept: the vocabulary uses this name itself")
        return [name for name in named if name not in taken], []
    kept, reserved, unusable = [], [], []
    for field in schema:
        if field.name in taken:
            continue
        if field.name in RESERVED:
            reserved.append(field.name)
        elif not usable_in_filters(field.type) and field.name != options.rank_column:
            unusable.append(f"{field.name} ({field.type})")
        else:
            kept.append(field.name)
    notes = []
    if reserved:
        notes.append(f"not kept, because the vocabulary uses the name itself: {', '.join(reserved)}")
    if unusable:
        notes.append(
            f"not kept, because no filter can use it (name it in --attributes to keep it): {', '.join(unusable)}"
        )
    return kept, notes


def no_columns(rows: int) -> pa.Table:
    """A table of ``rows`` rows and no columns."""
    return pa.table({"none": pa.nulls(rows)}).select([])


def require_column(names: Sequence[str], name: str, role: str, hint: str = "") -> None:
    """Raise a CatalogError that lists the columns unless ``name`` is one of ``names``."""
    if name not in names:
        shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise CatalogError(f"the catalog has no {role} column {name!r}", why=f"its columns are: {shown}", hint=hint)


def usable_in_filters(kind: pa.DataType) -> bool:
    """Scalars and lists of texts or integers; no embeddings, no blobs."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_list(kind):
        value = kind.value_type.value_type if pa.types.is_dictionary(kind.value_type) else kind.value_type
        return not pa.types.is_fixed_size_list(kind) and (is_text(value) or pa.types.is_integer(value))
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return not (pa.types.is_nested(kind) or binary)

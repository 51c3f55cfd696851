"""Kinds of Arrow types, whatever their layout in memory."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def is_list(kind: pa.DataType) -> bool:
    """list, large_list, fixed_size_list, list_view and large_list_view."""
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    """string, large_string and string_view."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def flat_values(lists: pa.Array) -> pa.Array:
    """``lists.flatten()``, also where no list holds a value: there Arrow fails for structs with UUIDs in them."""
    return lists.flatten() if pc.max(pc.list_value_length(lists)).as_py() else lists.values[:0]

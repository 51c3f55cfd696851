"""Kinds of Arrow types, whatever their layout in memory."""

from __future__ import annotations

import pyarrow as pa


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

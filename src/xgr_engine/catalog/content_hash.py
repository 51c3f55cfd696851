"""SHA-256 over the meaning of a catalog in leaf order, whatever its source, row order, chunks or encodings were."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import is_list, is_text
from xgr_engine.errors import CatalogError

_VERSION = 1


def content_hash(
    item_id: pa.Array, codes: NDArray[np.int32], attributes: pa.Table, sid_templates: tuple[str, ...] | None
) -> str:
    """Hash of a catalog whose rows are in leaf order (items of one SID in their ranked order).

    Args:
        item_id: [N] in its own type: 5 and "5" hash differently.
        codes: int32 [N, L], padded with -1.
        attributes: [N] rows.
        sid_templates: token spelling a level.

    Returns:
        ``sha256:`` and 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    header = {
        "version": _VERSION,
        "items": len(item_id),
        "levels": codes.shape[1],
        "item_id": _type_name(item_id.type),
        "sid_templates": sid_templates,
        "attributes": [[field.name, _type_name(field.type)] for field in attributes.schema],
    }
    digest.update(json.dumps(header, sort_keys=True).encode())
    _update(digest, item_id, "item_id")
    digest.update(np.ascontiguousarray(codes, "<i4").data)
    for name in attributes.column_names:
        column = attributes[name].combine_chunks()
        for part in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            _update(digest, part, name)
    return f"sha256:{digest.hexdigest()}"


def _type_name(kind: pa.DataType) -> str:
    """The logical type: how long the offsets are says nothing about the content."""
    if is_text(kind):
        return "string"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "binary"
    if is_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    return str(kind)


def _update(digest: hashlib._Hash, values: pa.Array, name: str) -> None:
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return _update(digest, values.storage, name)
    if values.null_count:
        digest.update(np.packbits(values.is_valid().to_numpy(zero_copy_only=False)).data)
    else:
        digest.update(b"no nulls")
    if pa.types.is_null(kind):
        return None
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _update_texts(digest, values)
    if pa.types.is_fixed_size_binary(kind):  # UUIDs are stored so
        return _update_texts(digest, values.cast(pa.binary(), safe=True))
    if is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        digest.update(np.ascontiguousarray(lengths, "<i8").data)
        return _update(digest, (values.drop_null() if values.null_count else values).flatten(), name)
    if pa.types.is_struct(kind):
        for field in values.flatten():
            _update(digest, field, name)
        return None
    return _update_scalars(digest, values, name)


def _update_texts(digest: hashlib._Hash, values: pa.Array) -> None:
    wide = pa.large_string() if is_text(values.type) else pa.large_binary()
    texts = pc.fill_null(values, b"" if pa.types.is_large_binary(wide) else "").cast(wide)
    _, offset_buffer, data = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    digest.update(np.diff(offsets).data)
    if data is not None and len(offsets):
        digest.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])


def _update_scalars(digest: hashlib._Hash, values: pa.Array, name: str) -> None:
    kind = values.type
    try:
        if pa.types.is_boolean(kind):
            values = values.cast(pa.uint8())
        elif pa.types.is_temporal(kind):
            values = values.view(pa.int64() if kind.bit_width == 64 else pa.int32())
        elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            return _update_texts(digest, values.cast(pa.large_string()))
        numbers = pc.fill_null(values, pa.scalar(0).cast(values.type)).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CatalogError(
            f"attribute {name} has type {kind}, which a vocabulary cannot keep",
            why=str(error),
            hint="leave it out with --attributes",
        ) from error
    digest.update(np.ascontiguousarray(numbers).data)
    return None

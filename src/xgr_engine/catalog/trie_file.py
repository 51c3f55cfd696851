"""``trie.safetensors``: the arrays of an ``ItemTrie``, read through a memory map."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import CatalogError

_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "U8": np.dtype("u1")}
_PER_LEVEL = ("codes", "child_start", "leaf_start")


def save_trie(trie: ItemTrie, path: Path) -> str:
    """Write the arrays of ``trie`` and return the SHA-256 of the file."""
    from safetensors.numpy import save

    arrays = {f"{name}.{depth}": array for name in _PER_LEVEL for depth, array in enumerate(getattr(trie, name))}
    arrays |= {"leaf_depth": trie.leaf_depth, "item_start": trie.item_start, "items": trie.items}
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, {"format": "xgr.trie"})
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def load_trie(path: Path, levels: int, sha256: str | None = None) -> ItemTrie:
    """Map the arrays of the file; nothing is copied.

    Args:
        levels: levels the vocabulary says it has.
        sha256: what ``save_trie`` returned; None leaves the check out.

    Raises:
        CatalogError: the file is missing, cut short, changed, or its arrays contradict each other.
    """
    arrays = _map_arrays(path, sha256)
    try:
        per_level = {name: tuple(arrays[f"{name}.{depth}"] for depth in range(levels)) for name in _PER_LEVEL}
        trie = ItemTrie(
            codes=per_level["codes"],
            child_start=per_level["child_start"],
            leaf_start=per_level["leaf_start"],
            leaf_depth=arrays["leaf_depth"],
            item_start=arrays["item_start"],
            items=arrays["items"],
        )
    except KeyError as error:
        raise damaged(path, f"it lacks the array {error}") from error
    try:
        trie.validate()
    except CatalogError as error:
        raise damaged(path, error.what) from error
    return trie


def _map_arrays(path: Path, sha256: str | None) -> dict[str, NDArray[Any]]:
    # The safetensors package copies into numpy arrays; mapping lets processes share the pages.
    try:
        # Copy on write, because torch refuses to wrap read-only arrays without a warning; nobody writes.
        raw = np.asarray(np.memmap(path, np.uint8, "c"))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise damaged(path, str(error)) from error
    if sha256 is not None and hashlib.sha256(raw.data).hexdigest() != sha256:
        raise damaged(path, "its content is not what was written (checksum)")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    try:
        header = json.loads(raw[8:start].tobytes()) if start <= len(raw) else {}
        header.pop("__metadata__", None)
        arrays: dict[str, NDArray[Any]] = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            values = raw[start + first : start + last].view(_DTYPES[entry["dtype"]])
            if values.shape != tuple(entry["shape"]):
                raise ValueError(f"the array {name} is cut short")
            arrays[name] = values
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"its header cannot be read: {error}") from error
    return arrays


def damaged(path: Path, why: str) -> CatalogError:
    """The error for a file of a vocabulary that cannot be used."""
    return CatalogError(f"{path} is damaged", why=why, hint="build the vocabulary again with xgr build-vocab")

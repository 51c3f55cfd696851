"""The vocabulary directory: ``vocab.json``, ``trie.safetensors``, ``items.parquet``; see docs/formats.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from xgr_engine.catalog.ids import IdIndex, plain
from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.catalog.trie_file import damaged, load_trie
from xgr_engine.errors import CatalogError
from xgr_engine.files import file_sha256, misfit, parse_json

IntArray = NDArray[np.int32]

KIND = "xgr.vocabulary"
SCHEMA_VERSION = 1
DESCRIPTION, TRIE, ITEMS = "vocab.json", "trie.safetensors", "items.parquet"

_FILE = {"bytes": int, "sha256": str}
# As xgr_engine.files.misfit reads it.
_SHAPE: dict[str, Any] = {
    "written_by": str,
    "content_hash": str,
    "levels": int,
    "codebook": [int],
    "num_items": int,
    "num_sids": int,
    "sid_lengths": {str: int},
    "item_id_type": str,
    "sid_templates": (None, [str]),
    "attributes": {str: str},
    "rank": (None, {"column": str, "descending": bool}),
    "collisions": {"groups": int, "items": int, "largest": int},
    "level_reports": [
        {
            **dict.fromkeys(("codebook_size", "codes_used", "largest_code", "nodes", "branching_max"), int),
            "branching_mean": (int, float),
        }
    ],
    "warnings": [str],
    "files": {TRIE: _FILE, ITEMS: _FILE},
}


@dataclass(frozen=True)
class Vocabulary:
    """A catalog ready for the search. Rows are the rows of ``items.parquet``, which are in leaf order.

    Attributes:
        path: the directory.
        description: the content of ``vocab.json``.
        trie: SIDs and items, memory-mapped.
    """

    path: Path
    description: dict[str, Any]
    trie: ItemTrie

    @property
    def levels(self) -> int:
        """Length of the longest SID."""
        return int(self.description["levels"])

    @property
    def codebook(self) -> tuple[int, ...]:
        """Codes per level: as declared, else the largest code + 1."""
        return tuple(self.description["codebook"])

    @property
    def content_hash(self) -> str:
        """``sha256:...`` of the catalog, independent of its row order."""
        return str(self.description["content_hash"])

    @property
    def num_items(self) -> int:
        return int(self.description["num_items"])

    @property
    def num_sids(self) -> int:
        return int(self.description["num_sids"])

    @property
    def sid_templates(self) -> tuple[str, ...] | None:
        """Token text of each level with ``{}`` for the code, or None where the catalog holds bare codes."""
        templates = self.description.get("sid_templates")
        return None if templates is None else tuple(templates)

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Columns of the catalog kept beside id and SID."""
        return tuple(self.description["attributes"])

    @cached_property
    def item_ids(self) -> pa.Array:
        """[items] the id of each row in its own type."""
        return plain(self._read(["item_id"])["item_id"])

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Attribute columns, one row per item.

        Raises:
            CatalogError: a column that the vocabulary does not have.
        """
        for name in names:
            if name not in self.attribute_names:
                known = ", ".join(self.attribute_names) or "none"
                raise CatalogError(f"{self.path} has no attribute column {name!r}", why=f"its attributes: {known}")
        return self._read(list(names))

    def rows_of(self, ids: pa.Array | pa.ChunkedArray) -> IntArray:
        """[n] row of each id of any type, matched by canonical text (5 and "5" are one item); -1 if null or unknown."""
        return self._index.rows_of(ids)

    @cached_property
    def _index(self) -> IdIndex:
        return IdIndex(self.item_ids)

    @cached_property
    def _sids(self) -> IntArray:
        return self.trie.leaf_codes()

    def sids(self) -> tuple[IntArray, NDArray[np.uint8]]:
        """Codes [leaves, L] as the catalog numbers them, padded with -1, and lengths [leaves]."""
        return self._sids, self.trie.leaf_depth

    def leaves_of_codes(self, codes: IntArray) -> IntArray:
        """[n] leaf of each row of ``codes`` [n, any width] (padded with -1), or -1 where it is no SID here."""
        return self.trie.leaves_of_codes(codes)

    @property
    def leaf_of_row(self) -> IntArray:
        """[items] leaf of each row."""
        return self.trie.leaf_of_item

    def _read(self, names: list[str]) -> pa.Table:
        path = self.path / ITEMS
        try:
            file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            table = file.read(columns=names).select(names)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise damaged(path, str(error)) from error
        if table.num_rows != self.num_items:
            raise damaged(path, f"it has {table.num_rows} rows, but {DESCRIPTION} says {self.num_items}")
        return table


def load_vocabulary(path: str | Path) -> Vocabulary:
    """Open a vocabulary directory. The trie is mapped and checked; columns of items are read when they are asked for.

    Raises:
        CatalogError: no vocabulary there, one of another schema version, or a damaged one; names the file.
    """
    directory = Path(path)
    description = read_description(directory)
    files = description["files"]
    trie = load_trie(directory / TRIE, description["levels"], files[TRIE]["sha256"])
    if (trie.num_items, trie.num_leaves) != (description["num_items"], description["num_sids"]):
        raise damaged(directory / TRIE, f"it holds {trie.num_items} items on {trie.num_leaves} SIDs")
    _check_size(directory / ITEMS, files[ITEMS]["bytes"])
    return Vocabulary(directory, description, trie)


def read_description(directory: Path) -> dict[str, Any]:
    """The checked content of ``vocab.json``.

    Raises:
        CatalogError: missing, not a vocabulary, or written by a version that this one cannot read.
    """
    path = directory / DESCRIPTION
    if not directory.is_dir() or not path.is_file():
        missing = "there is no such directory" if not directory.is_dir() else f"it has no {DESCRIPTION}"
        raise CatalogError(f"{directory} is not a vocabulary", why=missing, hint="xgr build-vocab CATALOG makes one")
    try:
        description = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(description, dict) or description.get("kind") != KIND:
        raise CatalogError(
            f"{path} does not describe a vocabulary",
            why=f'its "kind" is not "{KIND}"',
            hint="give a directory that xgr build-vocab wrote",
        )
    version = description.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CatalogError(
            f"{directory} has schema version {version}, but this xgr reads version {SCHEMA_VERSION}",
            hint="build the vocabulary again with xgr build-vocab",
        )
    if wrong := misfit(description, _SHAPE):
        raise damaged(path, f'"{wrong}" is missing or has the wrong type')
    return description


def describe(path: str | Path) -> dict[str, Any]:
    """What ``xgr inspect`` and ``xgr build-vocab`` show: the description with the place and its size on disk.

    Raises:
        CatalogError: as ``read_description``.
    """
    directory = Path(path)
    description = read_description(directory)
    on_disk = sum(child.stat().st_size for child in directory.iterdir() if child.is_file())
    return {"path": str(directory), **description, "bytes_on_disk": on_disk}


def verify_files(path: str | Path) -> None:
    """Compare every file with the checksum recorded when it was written.

    Raises:
        CatalogError: names the file that is missing, cut short or changed.
    """
    directory = Path(path)
    files = read_description(directory)["files"]
    for name, entry in ((name, files[name]) for name in (TRIE, ITEMS)):
        _check_size(directory / name, entry["bytes"])
        if file_sha256(directory / name) != entry["sha256"]:
            raise damaged(directory / name, "its content is not what was written (checksum)")


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise damaged(path, "the file is missing")
    size = path.stat().st_size
    if size != expected:
        raise damaged(path, f"it has {size} bytes, but {expected} were written")

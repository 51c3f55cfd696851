"""``xgr build-vocab``: from catalog files to the vocabulary directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from xgr_engine import __version__
from xgr_engine.catalog.arrow_types import is_text
from xgr_engine.catalog.content_hash import content_hash
from xgr_engine.catalog.ordering import ranked_within_sids, refuse_collisions, without_duplicates
from xgr_engine.catalog.readers import Catalog, ReadOptions, read_catalog
from xgr_engine.catalog.report import collision_report, level_reports, structure_warnings
from xgr_engine.catalog.sid_text import MAX_CODE
from xgr_engine.catalog.swap import refuse_foreign, replacement
from xgr_engine.catalog.trie import ItemTrie, sid_order, trie_of_sorted
from xgr_engine.catalog.trie_file import save_trie
from xgr_engine.catalog.vocabulary import (
    DESCRIPTION,
    ITEMS,
    KIND,
    SCHEMA_VERSION,
    TRIE,
    Vocabulary,
    describe,
    load_vocabulary,
    verify_files,
)
from xgr_engine.errors import CatalogError, OutputExistsError, UsageError
from xgr_engine.files import file_sha256
from xgr_engine.options import check_types

IntArray = NDArray[np.int32]

_ROW_GROUP = 1 << 20
_EXAMPLES = 5
_MOST_LEVELS = 1000


@dataclass(frozen=True)
class BuildOptions:
    """What the vocabulary holds, and what may happen to one that is there already.

    Attributes:
        rank_desc: the largest rank first (default: the smallest); items without a rank come last either way.
        codebook: codes per level, for the report; None takes the largest code + 1.
        collisions: ``keep`` items that share a SID, or ``error``.
        update: replace another vocabulary at the output.
    """

    rank_desc: bool = False
    codebook: tuple[int, ...] | None = None
    collisions: Literal["keep", "error"] = "keep"
    update: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.codebook is not None and any(not 1 <= size <= MAX_CODE + 1 for size in self.codebook):
            raise UsageError(f"--codebook {self.codebook}: every size must be at least 1 and at most {MAX_CODE + 1}")


@dataclass(frozen=True)
class Changes:
    """How the new catalog differs from the vocabulary it replaces. ``moved`` items have another SID.

    ``examples`` holds up to five ids of each kind.
    """

    added: int
    removed: int
    moved: int
    kept: int
    examples: dict[str, list[Any]]


@dataclass(frozen=True)
class BuildResult:
    """What was done (``built``, ``updated``, or ``unchanged``: nothing written), and what the vocabulary is now.

    Attributes:
        description: as ``vocabulary.describe``.
        changes: against what was there; None if there was nothing.
    """

    action: Literal["built", "updated", "unchanged"]
    description: dict[str, Any]
    changes: Changes | None


def parse_codebook(text: str) -> tuple[int, ...]:
    """``256,256,256`` or ``8192x3`` as sizes."""
    try:
        size, times, levels = text.partition("x")
        if times and int(levels) > _MOST_LEVELS:
            raise UsageError(f"--codebook {text}: more than {_MOST_LEVELS} levels")
        return (int(size),) * int(levels) if times else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--codebook {text}: must be sizes such as 256,256,256 or 8192x3") from error


def parse_attributes(text: str) -> tuple[str, ...] | None:
    """``all``, ``none`` or ``a,b`` as ``ReadOptions.attributes``."""
    if text in ("all", "none"):
        return None if text == "all" else ()
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def build_vocabulary(
    paths: Sequence[str | Path], out: str | Path, read: ReadOptions, options: BuildOptions
) -> BuildResult:
    """Read the catalog ``paths`` and make ``out`` its vocabulary. ``out`` changes in one step, at the end.

    Raises:
        CatalogError: the catalog cannot become a vocabulary.
        OutputExistsError: ``out`` holds another vocabulary (and ``update`` is not set), or something else.
        UsageError: options that contradict the catalog.
    """
    if options.rank_desc and read.rank_column is None:
        raise UsageError(
            "--rank-desc needs --rank-column", hint="name the column that orders the items of a shared SID"
        )
    target = Path(out)
    present = _present(target, options)
    content = _prepare(read_catalog(paths, read), read, options)
    changes = None
    if present is not None:
        different = _differences(present.description, content.description)
        if different and not options.update:
            raise OutputExistsError(
                f"{target} holds another vocabulary",
                why=f"they differ in {', '.join(different)}",
                hint="--update replaces it; --out names another place",
            )
        same_writer = present.description["written_by"] == content.description["written_by"]
        if not different and (same_writer or not options.update):
            nothing: dict[str, list[Any]] = {"added": [], "removed": [], "moved": []}
            return BuildResult("unchanged", describe(target), Changes(0, 0, 0, present.num_items, nothing))
        changes = _changes(present, content)
    with replacement(target) as staging:
        _write(content, staging)
    return BuildResult("built" if present is None else "updated", describe(target), changes)


@dataclass(frozen=True)
class _Content:
    """A catalog in leaf order with everything that will be written, but for the checksums of the files."""

    catalog: Catalog
    trie: ItemTrie
    description: dict[str, Any]


def _present(target: Path, options: BuildOptions) -> Vocabulary | None:
    """The vocabulary at ``target``; None if there is nothing, or a damaged one that ``--update`` may replace.

    Raises:
        OutputExistsError: something that is not a vocabulary, or holds more than that.
        CatalogError: a damaged vocabulary, without ``--update``.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / DESCRIPTION).is_file():
        raise OutputExistsError(
            f"{target} exists and is not a vocabulary",
            why="it would be overwritten",
            hint="name another place with --out",
        )
    try:
        present = load_vocabulary(target)
        verify_files(target)
    except CatalogError as error:
        if not options.update:
            raise CatalogError(error.what, why=error.why, hint="--update builds it anew") from error
        present = None
    if options.update:
        refuse_foreign(target, (DESCRIPTION, TRIE, ITEMS))
    return present


def _differences(present: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys in which two descriptions differ, but for those that say nothing about the catalog."""
    keys = dict.fromkeys([*new, *present])
    return [key for key in keys if key not in ("files", "written_by") and present.get(key) != new.get(key)]


def _prepare(catalog: Catalog, read: ReadOptions, options: BuildOptions) -> _Content:
    if catalog.codes.size >= 2**31:
        raise CatalogError(f"the catalog holds {catalog.codes.size:,} codes, but a vocabulary can hold {2**31 - 1:,}")
    catalog, duplicates = without_duplicates(catalog)
    order = sid_order(catalog.codes)
    # Gathered once: the SIDs do not change when items of one SID swap places.
    codes = catalog.codes.take(order, axis=0)
    trie = trie_of_sorted(codes)
    if options.collisions == "error":
        refuse_collisions(catalog, trie, order)
    order = ranked_within_sids(order, trie, catalog, read.rank_column, options.rank_desc)
    indices = pa.array(order)
    kept = [name for name in catalog.attributes.column_names if read.attributes is None or name in read.attributes]
    attributes = catalog.attributes.select(kept)
    ordered = Catalog(
        item_id=catalog.item_id.take(indices),
        codes=codes,
        attributes=attributes.take(indices) if kept else attributes,
        sid_templates=catalog.sid_templates,
        null_ids=catalog.null_ids,
        null_sids=catalog.null_sids,
        notes=catalog.notes,
    )
    return _Content(ordered, trie, _description(ordered, trie, read, options, duplicates))


def _description(
    catalog: Catalog, trie: ItemTrie, read: ReadOptions, options: BuildOptions, duplicates: int
) -> dict[str, Any]:
    """The content of ``vocab.json``. Nothing in it depends on file names, row order or the time."""
    levels = level_reports(trie, options.codebook)
    depths, sids = np.unique(trie.leaf_depth, return_counts=True)
    left_out = {"null_ids": catalog.null_ids, "null_sids": catalog.null_sids, "duplicate_rows": duplicates}
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "written_by": f"xgr {__version__}",
        "content_hash": content_hash(catalog.item_id, catalog.codes, catalog.attributes, catalog.sid_templates),
        "levels": trie.levels,
        "codebook": [level.codebook_size for level in levels],
        "codebook_declared": options.codebook is not None,
        "num_items": trie.num_items,
        "num_sids": trie.num_leaves,
        "sid_lengths": {str(depth): count for depth, count in zip(depths.tolist(), sids.tolist(), strict=True)},
        "item_id_type": str(catalog.item_id.type),
        "sid_templates": None if catalog.sid_templates is None else list(catalog.sid_templates),
        "attributes": {field.name: str(field.type) for field in catalog.attributes.schema},
        "rank": None if read.rank_column is None else {"column": read.rank_column, "descending": options.rank_desc},
        "collisions": asdict(collision_report(trie)),
        "level_reports": [asdict(level) for level in levels],
        "left_out": left_out,
        "warnings": [*_left_out_warnings(left_out), *catalog.notes, *structure_warnings(trie, levels)],
    }


def _left_out_warnings(left_out: dict[str, int]) -> list[str]:
    reasons = {
        "null_ids": "rows without an item id were left out",
        "null_sids": "items without a SID were left out: they cannot be recommended",
        "duplicate_rows": "rows that repeat an item were left out",
    }
    return [f"{left_out[key]:,} {reason}" for key, reason in reasons.items() if left_out[key]]


def _write(content: _Content, directory: Path) -> None:
    """The three files, ``vocab.json`` last."""
    catalog, attributes = content.catalog, content.catalog.attributes
    present = catalog.codes >= 0
    offsets = np.zeros(len(catalog.codes) + 1, np.int32)
    np.cumsum(present.sum(axis=1, dtype=np.int32), out=offsets[1:])
    values = catalog.codes.reshape(-1) if present.all() else catalog.codes[present]
    columns = {
        "item_id": catalog.item_id,
        "sid": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
        "leaf": pa.array(content.trie.leaf_of_item),
        **{name: attributes[name] for name in attributes.column_names},
    }
    texts = [field.name for field in attributes.schema if is_text(field.type)]
    pq.write_table(
        pa.table(columns),
        directory / ITEMS,
        row_group_size=_ROW_GROUP,
        compression="zstd",
        compression_level=1,
        use_dictionary=["sid.list.element", *texts],
        column_encoding={"leaf": "DELTA_BINARY_PACKED"},
        write_page_checksum=True,
    )
    checksums = {TRIE: save_trie(content.trie, directory / TRIE), ITEMS: file_sha256(directory / ITEMS)}
    files = {
        name: {"bytes": (directory / name).stat().st_size, "sha256": checksum} for name, checksum in checksums.items()
    }
    text = json.dumps({**content.description, "files": files}, indent=1, ensure_ascii=False)
    (directory / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _changes(present: Vocabulary, new: _Content) -> Changes:
    old_rows = present.rows_of(new.catalog.item_id)
    known = old_rows >= 0
    gone = np.ones(present.num_items, np.bool_)
    gone[old_rows[known]] = False
    old_codes = present.sids()[0][present.leaf_of_row[old_rows[known]]]
    new_codes = new.catalog.codes[known]
    width = min(old_codes.shape[1], new_codes.shape[1])
    differs = (old_codes[:, :width] != new_codes[:, :width]).any(axis=1)
    differs |= (old_codes[:, width:] >= 0).any(axis=1) | (new_codes[:, width:] >= 0).any(axis=1)
    kinds = {
        "added": (new.catalog.item_id, np.flatnonzero(~known)),
        "removed": (present.item_ids, np.flatnonzero(gone)),
        "moved": (new.catalog.item_id, np.flatnonzero(known)[differs]),
    }
    counts = {kind: len(rows) for kind, (_, rows) in kinds.items()}
    return Changes(
        **counts,
        kept=int(known.sum()) - counts["moved"],
        examples={kind: ids.take(pa.array(rows[:_EXAMPLES])).to_pylist() for kind, (ids, rows) in kinds.items()},
    )

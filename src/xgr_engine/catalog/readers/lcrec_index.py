"""``lcrec-index``: ``<name>.index.json`` of LC-Rec, LETTER and MiniOneRec, and ``<name>.item.json`` if there is one.

The index is one object, item -> list of tokens (``["<a_236>", "<b_231>"]``) or of bare codes. The item file is one
object, item -> attributes. Both may be named; the item file that lies beside an index is read without being named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from xgr_engine.catalog.ids import IdIndex
from xgr_engine.catalog.readers.base import Catalog, ReadOptions, assemble, kept_attributes, no_columns
from xgr_engine.catalog.readers.sid_columns import SidSource, read_sid_column
from xgr_engine.errors import CatalogError
from xgr_engine.files import parse_json

Pairs = list[tuple[str, Any]]

# {"0": [... , {"0": "<a_1>... , {"0": {... , {"0": null... or {}
_HEAD = re.compile(rb'\s*\{\s*(?:"(?:[^"\\]|\\.)*"\s*:\s*(?:[\[{"]|null\b)|\}\s*\Z)')


def detect(path: Path, head: bytes) -> bool:
    """A JSON object of lists (an index) or of objects (an item file)."""
    return path.suffix.lower() == ".json" and _HEAD.match(head.removeprefix(b"\xef\xbb\xbf")) is not None


def read(paths: Sequence[Path], options: ReadOptions) -> Catalog:
    """Several indexes are one catalog."""
    index: Pairs = []
    items: Pairs = []
    notes = []
    index_path: Path | None = None
    for path in _with_item_files(paths):
        pairs = _load(path)
        _refuse_tokenizers({key for key, _ in pairs}, path)
        if pairs and all(isinstance(value, dict) for _, value in pairs):
            items += pairs
        else:
            index_path = index_path or path
            index += pairs
    if index_path is None:
        raise CatalogError(f"{paths[0]} holds only item attributes", hint="name the index file too (item -> tokens)")
    if not any(value for _, value in index):
        what = "every item of it is null or an empty list" if index else "an object without items"
        raise CatalogError(f"{index_path} holds no semantic ID: {what}", hint="was the export cut short?")
    item_id = pa.array([key for key, _ in index], pa.string())
    column = _sid_array([value for _, value in index], item_id, index_path)
    codes, templates = read_sid_column(pa.chunked_array([column]), SidSource(index_path, item_id, "index"))
    attributes, left_over = _attributes(items, item_id)
    if left_over:
        notes.append(f"{left_over} items of the item file have no SID in the index")
    kept, more = kept_attributes(attributes.schema, options, [])
    return assemble(item_id, codes, attributes.select(kept), templates, [*notes, *more])


def _with_item_files(paths: Sequence[Path]) -> list[Path]:
    """``paths`` and the item files beside them."""
    found = list(paths)
    if len(paths) == 1 and paths[0].name.endswith(".index.json"):
        beside = paths[0].with_name(paths[0].name.removesuffix(".index.json") + ".item.json")
        if beside.is_file():
            found.append(beside)
    return found


def _load(path: Path) -> Pairs:
    """The pairs of the file's one object. Repeated keys stay; a dict would silently drop all but the last."""
    try:
        document = parse_json(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=_Object)
    except ValueError as error:
        raise CatalogError(f"{path} is not valid JSON", why=str(error)) from error
    if not isinstance(document, _Object):
        raise CatalogError(f"{path} is not one JSON object", hint="name another format with --format")
    return document.pairs


def _refuse_tokenizers(keys: set[str], path: Path) -> None:
    """A checkpoint's ``tokenizer.json`` is the other JSON file at hand, and tells nothing of items."""
    if {"model", "added_tokens"} <= keys:
        raise CatalogError(
            f"{path} is not an LC-Rec index but a tokenizer",
            why="an index is a JSON object that maps every item id to its list of tokens",
            hint="name the catalog, such as the data set's .index.json; xgr convert is what reads a tokenizer",
        )


class _Object(dict[str, Any]):
    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def _sid_array(values: list[Any], item_id: pa.Array, path: Path) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        # Name the first value that is unlike the others, or that no SID can be.
        sorts = [_sort_of(value) for value in values]
        usual = next((sort for sort in sorts if sort not in ("nothing", "odd")), "nothing")
        row = next((row for row, sort in enumerate(sorts) if sort not in (usual, "nothing")), 0)
        raise CatalogError(
            f"{path}, item {item_id[row].as_py()}: {json.dumps(values[row], default=str)[:80]} is not a SID",
            why=str(error),
            hint="every item needs a list of tokens, or every item a list of codes",
        ) from error


def _sort_of(value: Any) -> str:
    if value is None or value == []:
        return "nothing"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "tokens"
    if isinstance(value, list) and all(isinstance(part, int) and not isinstance(part, bool) for part in value):
        return "codes"
    return "odd"


def _attributes(items: Pairs, item_id: pa.Array) -> tuple[pa.Table, int]:
    """Attributes in the order of ``item_id``, and how many items of the file are not in the index."""
    names = list(dict.fromkeys(name for _, record in items for name in record))
    if not items:
        return no_columns(len(item_id)), 0
    records = dict(items)
    columns = {}
    for name in names:
        columns[name] = _column([records.get(key, {}).get(name) for key in item_id.to_pylist()])
    known = IdIndex(item_id).rows_of(pa.array(list(records), pa.string()))
    return pa.table(columns), int((known < 0).sum())


def _column(values: list[Any]) -> pa.Array:
    """A typed column if the values agree in type, else their JSON text."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        return pa.array(texts, pa.string())

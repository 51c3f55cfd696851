"""``minionerec-info``: MiniOneRec's ``info/*.txt``, one ``SID TAB title TAB item`` a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from xgr_engine.catalog.readers.base import Catalog, ReadOptions, assemble, kept_attributes
from xgr_engine.catalog.readers.sid_columns import SidSource, read_sid_column
from xgr_engine.errors import CatalogError


def detect(path: Path, head: bytes) -> bool:
    """A text file whose first line has at least two TABs."""
    return path.suffix.lower() == ".txt" and head.split(b"\n", 1)[0].count(b"\t") >= 2


def read(paths: Sequence[Path], options: ReadOptions) -> Catalog:
    """Item ids stay text. A title may hold anything but a line end, TABs included."""
    lines = [line for path in paths for line in _lines(path)]
    sids, titles, items = zip(*lines, strict=True) if lines else ((), (), ())
    item_id = pa.array([item or None for item in items], pa.string())
    source = SidSource(paths[0] if len(paths) == 1 else "info files", item_id, "SID")
    codes, templates = read_sid_column(pa.chunked_array([pa.array(sids, pa.large_string())]), source)
    attributes = pa.table({"title": pa.array(titles, pa.string())})
    kept, notes = kept_attributes(attributes.schema, options, [])
    return assemble(item_id, np.asarray(codes), attributes.select(kept), templates, notes)


def _lines(path: Path) -> list[tuple[str, str, str]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path} is not UTF-8", why=str(error)) from error
    found = []
    # Not splitlines(): titles may hold the other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line:
            continue
        sid, tab, rest = line.partition("\t")
        title, second_tab, item = rest.rpartition("\t")
        if not tab or not second_tab:
            raise CatalogError(f"{path}, line {number}: not SID, title and item between TABs", why=repr(line[:80]))
        found.append((sid, title, item))
    return found

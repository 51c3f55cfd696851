"""Catalog formats. A further format is one module with ``detect`` and ``read``, and one line in ``FORMATS``."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from xgr_engine.catalog.readers.base import Catalog, Reader, ReadOptions
from xgr_engine.catalog.readers.files import is_table
from xgr_engine.errors import CatalogError, UsageError

__all__ = ["FORMATS", "Catalog", "ReadOptions", "Reader", "detect_format", "expand_paths", "read_catalog"]

# Asked in this order when the format is not named.
FORMATS = {
    "table": "xgr_engine.catalog.readers.table",
    "lcrec-index": "xgr_engine.catalog.readers.lcrec_index",
    "minionerec-info": "xgr_engine.catalog.readers.minionerec_info",
}

_HEAD_BYTES = 1 << 16


def read_catalog(paths: Sequence[str | Path], options: ReadOptions) -> Catalog:
    """Read the files, directories of table files, and patterns ``paths`` as one catalog.

    Raises:
        CatalogError: a file is missing, of an unknown format, or cannot be used; names the file and what is in it.
        UsageError: ``options.format`` is no format.
    """
    files = expand_paths(paths)
    catalog = reader(options.format or detect_format(files)).read(files, options)
    if len(catalog.item_id) == 0:
        left_out = f"{catalog.null_ids} rows have no item id, {catalog.null_sids} have no SID"
        raise CatalogError(f"the catalog {', '.join(map(str, paths))} holds no items", why=left_out)
    if options.rank_column is not None and options.rank_column not in catalog.attributes.column_names:
        names = ", ".join(catalog.attributes.column_names) or "none"
        raise CatalogError(f"the catalog has no rank column {options.rank_column!r}", why=f"its attributes: {names}")
    return catalog


def reader(name: str) -> Reader:
    """The reader called ``name``."""
    if name not in FORMATS:
        raise UsageError(f"--format {name}: unknown", hint=f"one of {', '.join(FORMATS)}")
    return cast(Reader, import_module(FORMATS[name]))


def detect_format(files: Sequence[Path]) -> str:
    """The one format that all files have."""
    found: dict[str, Path] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise CatalogError(f"{path} cannot be read", why=str(error.strerror)) from error
        name = next((name for name in FORMATS if reader(name).detect(path, head)), None)
        if name is None:
            why = "the file is empty" if not head else "neither its name nor its first bytes say"
            raise CatalogError(
                f"cannot tell the catalog format of {path}", why=why, hint=f"name it: --format {'|'.join(FORMATS)}"
            )
        found.setdefault(name, path)
    if len(found) > 1:
        described = ", ".join(f"{path} is {name}" for name, path in found.items())
        raise CatalogError("the catalog files have different formats", why=described, hint="build from one format")
    return next(iter(found))


def expand_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Files named by ``paths``: a directory stands for the table files in it, a pattern for what it matches."""
    files: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(child for child in path.iterdir() if child.is_file() and child.name[0] not in "._")
            inside = [child for child in inside if is_table(child, b"")]
            if not inside:
                raise CatalogError(f"the directory {path} holds no Parquet, CSV or JSON lines file")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            # Path.glob takes no absolute patterns.
            matched = sorted(Path(name) for name in glob.glob(str(given), recursive=True))  # noqa: PTH207
            if not matched:
                raise CatalogError(f"catalog file not found: {given}")
            files += matched
    return list(dict.fromkeys(files))

"""``--where``: an SQL expression over the catalog's attributes, one boolean per item. Nothing else imports polars."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import UsageError


def where_mask(text: str, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """[items] whether each item satisfies the expression; null counts as false.

    Columns are the attributes of the vocabulary and ``item_id``; only those that the expression names are read.

    Raises:
        UsageError: not an expression, an unknown column (named, with the nearest known ones), types that do not fit,
            or a result that is not one boolean an item.
    """
    import polars

    if (bad := re.search("[\ud800-\udfff]", text)) is not None:
        raise UsageError(f"--where: character {bad.start() + 1} is half of a surrogate pair", hint="give valid Unicode")
    try:
        expression = polars.sql_expr(text)
        names = list(dict.fromkeys(expression.meta.root_names()))
    except polars.exceptions.PolarsError as error:
        raise UsageError(
            f"--where {text!r} is not an SQL expression: {_first_line(error)}",
            hint="for example --where \"category = 'books' and price < 20\"",
        ) from error
    for name in names:
        if name != "item_id":
            check_attribute("--where", name, vocabulary)
    columns = {name: _column(vocabulary, name) for name in names}
    try:
        result = polars.DataFrame(polars.from_arrow(pa.table(columns))).select(expression) if columns else None
    except polars.exceptions.PolarsError as error:
        types = ", ".join(f"{name} is {column.type}" for name, column in columns.items())
        raise UsageError(
            f"--where {text!r} cannot be computed: {_first_line(error)}", why=f"in the catalog {types}"
        ) from error
    return _one_boolean_per_item(text, result, vocabulary.num_items)


def _one_boolean_per_item(text: str, result: Any, items: int) -> NDArray[np.bool_]:
    import polars

    if result is None:
        raise UsageError(f"--where {text!r} names no attribute", why="it must decide about each item")
    if result.width != 1 or result.dtypes[0] != polars.Boolean:
        kind = result.dtypes[0] if result.width == 1 else f"{result.width} columns"
        raise UsageError(
            f"--where {text!r} gives {kind}, not true or false",
            hint="compare it with something, for example --where \"category = 'books'\"",
        )
    if result.height != items:
        raise UsageError(
            f"--where {text!r} gives {result.height} values for {items} items",
            why="an aggregate gives one value for all items together",
            hint='compare an attribute with it, for example --where "price < avg(price)"',
        )
    mask: NDArray[np.bool_] = result.to_series().fill_null(False).to_numpy()
    return mask


def _column(vocabulary: Vocabulary, name: str) -> pa.ChunkedArray:
    if name == "item_id":
        return pa.chunked_array([vocabulary.item_ids])
    return vocabulary.columns([name]).column(name)


def check_attribute(option: str, name: str, vocabulary: Vocabulary) -> None:
    """
    Raises:
        UsageError: the catalog has no such attribute; names those that look alike.
    """
    known = vocabulary.attribute_names
    if name in known:
        return
    by_folded = {other.casefold(): other for other in known}
    near = [by_folded[match] for match in get_close_matches(name.casefold(), list(by_folded), n=3, cutoff=0.6)]
    shown = ", ".join(known) or "none"
    raise UsageError(
        f"{option}: the catalog has no attribute {name!r}",
        why=f"its attributes: {shown}",
        hint=f"did you mean {' or '.join(near)}?" if near else "build the vocabulary from a catalog that has it",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""List columns in every form that writers produce -> one ragged form, with a verdict on each row.

One policy for broken cells: a row whose list holds a null, a NaN or a number that is not whole is rejected
(``null-in-list``, ``not-integral``), and so is text that is not a list (``bad-list-text``). A null cell counts as an
empty list. A *column* of the wrong type fails the run, since no row of it can be right.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import is_list, is_text
from xgr_engine.catalog.ids import canonical
from xgr_engine.errors import HistoryError
from xgr_engine.job.input_formats import ListColumn

Fault = tuple[str, str]  # reason code, detail

# Largest integers that a float type holds without gaps: beyond them two ids may already have become one.
_EXACT_BITS = {pa.float16(): 11, pa.float32(): 24, pa.float64(): 53}


# 18 digits always fit an int64.
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Lists:
    """n lists back to back.

    Attributes:
        values: integers, strings or binary, without nulls.
        offsets: int64 [n + 1]; list i is ``values[offsets[i] : offsets[i + 1]]``. Faulty rows are empty.
        faults: row -> why it cannot be used.
    """

    values: pa.Array
    offsets: NDArray[np.int64]
    faults: dict[int, Fault]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """[n + 1] where each of n lists that lie back to back begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def is_text_type(kind: pa.DataType) -> bool:
    """string, large_string, string_view, and a dictionary of these."""
    return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


def read_lists(column: ListColumn, name: str, list_text: str | None) -> Lists:
    """Normalises one column.

    Args:
        column: an Arrow array, or Python objects (JSON Lines).
        name: for messages.
        list_text: ``json`` or ``python`` when lists may be stored as text.

    Raises:
        HistoryError: a type that cannot hold lists of ids, or text without ``list_text``.
    """
    if isinstance(column, list):
        return _from_objects(column, name, list_text)
    if pa.types.is_null(column.type):
        return Lists(pa.array([], pa.int64()), np.zeros(len(column) + 1, np.int64), {})
    if is_text_type(column.type):
        return _from_objects(_plain_text(column).to_pylist(), name, list_text)
    if not is_list(column.type):
        raise HistoryError(
            f"column {name!r} is {column.type}, not a list",
            hint="give one list of ids per user; see docs/recommend.md, 'Histories'",
        )
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return _checked(column.flatten(), lengths, name, {})


def _plain_text(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _checked(values: pa.Array, lengths: NDArray[np.int64], name: str, faults: dict[int, Fault]) -> Lists:
    """Empties the rows with bad elements, and adds them to ``faults``."""
    values, bad = _clean_elements(values, name)
    offsets = offsets_of(lengths)
    null = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else np.zeros(len(values), np.bool_)
    if null.any() or bad.any():
        owner = np.repeat(np.arange(len(lengths)), lengths)
        for row in np.unique(owner[bad]):
            faults[int(row)] = ("not-integral", f"{name} holds a number that is not whole, or too large")
        for row in np.unique(owner[null]):
            faults[int(row)] = ("null-in-list", f"{name} holds a null or NaN")
        faulty = np.zeros(len(lengths), np.bool_)
        faulty[list(faults)] = True
        values = values.filter(pa.array(~faulty[owner]))
        offsets = offsets_of(np.where(faulty, 0, lengths))
    return Lists(values, offsets, faults)


def _clean_elements(values: pa.Array, name: str) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Elements as integers, text or binary (NaN becomes null), and which of them are numbers that are not whole."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    none_bad = np.zeros(len(values), np.bool_)
    if pa.types.is_null(kind):
        return values.cast(pa.int64()), none_bad
    if pa.types.is_string_view(kind):
        return values.cast(pa.large_string()), none_bad
    if pa.types.is_integer(kind) or is_text_type(kind) or _is_binary(kind):
        return values, none_bad
    if pa.types.is_floating(kind):
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
        missing = np.isnan(numbers)
        whole = np.isfinite(numbers) & (np.abs(numbers) <= 2.0 ** _EXACT_BITS[kind])
        whole &= np.floor(np.where(whole, numbers, 0.0)) == np.where(whole, numbers, 0.0)
        return pa.array(np.where(whole, numbers, 0).astype(np.int64), mask=missing), ~whole & ~missing
    if pa.types.is_decimal(kind):  # wider than int64, so by their text
        texts = canonical(values)
        return texts, ~pc.fill_null(pc.match_substring_regex(texts, r"^-?[0-9]+$"), True).to_numpy(zero_copy_only=False)
    raise HistoryError(
        f"column {name!r} holds lists of {kind}, which cannot be ids",
        hint="give lists of integers or of text; see docs/recommend.md, 'Histories'",
    )


def _is_binary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _from_objects(cells: Sequence[Any], name: str, list_text: str | None) -> Lists:
    """Python cells: None, lists, or text that holds a list."""
    flat: list[Any] = []
    lengths = np.zeros(len(cells), np.int64)
    faults: dict[int, Fault] = {}
    for row, raw in enumerate(cells):
        cell = raw
        try:
            if isinstance(cell, str):
                cell = _parse_text(cell, name, list_text)
            elements = _elements(cell)
        except _BadCell as bad:
            faults[row] = (bad.reason, f"{name}: {bad.detail}")
            continue
        lengths[row] = len(elements)
        flat.extend(elements)
    offsets = offsets_of(lengths)
    return Lists(_id_array(flat), offsets, faults)


class _BadCell(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def _parse_text(text: str, name: str, list_text: str | None) -> Any:
    """The Python value of a list stored as text. Nothing in it is ever executed."""
    if list_text is None:
        raise HistoryError(
            f"column {name!r} holds text, not lists",
            why=f"the first text is {text[:60]!r}",
            hint=_hint_for(text),
        )
    if not text.strip():
        return None
    try:
        return json.loads(text) if list_text == "json" else ast.literal_eval(text.strip())
    # literal_eval raises MemoryError or RecursionError on absurdly nested text, which is the cell's fault, not ours
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise _BadCell("bad-list-text", f"not a {list_text} list: {text[:60]!r}") from error


def _hint_for(text: str) -> str:
    """What to do with a column of texts such as this one."""
    if text.strip()[:1] in ("[", "("):
        return "add --list-text json for [1, 2] or [\"a\", \"b\"], --list-text python for ['a', 'b']"
    if "<" in text and ">" in text:
        return (
            "split the text into a list with one text per semantic ID: a list column, "
            'or ["<a_1><b_2>", "<a_3><b_4>"] with --list-text json; ready prompts need --history-format prompt'
        )
    return 'split the text into a list: a list column, or [1, 2] or ["a", "b"] with --list-text json'


def _elements(cell: Any) -> list[int | str]:
    if cell is None:
        return []
    if not isinstance(cell, list | tuple):
        raise _BadCell("bad-list-text", f"not a list: {str(cell)[:60]!r}")
    return [_element(value) for value in cell]


def _element(value: Any) -> int | str:
    if isinstance(value, str):
        return value
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bool):
        raise _BadCell("not-integral", f"{value} is not an id")
    if isinstance(value, int | np.integer):
        return int(value)
    if value is None or (isinstance(value, float) and np.isnan(value)):
        raise _BadCell("null-in-list", "the list holds a null or NaN")
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2.0**53:
        return int(value)
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    raise _BadCell("not-integral", f"{str(value)[:60]} is neither a whole number nor text")


def _id_array(flat: list[int | str]) -> pa.Array:
    """Integers stay integers; a mixture becomes text, which matches ids just as well."""
    if all(type(value) is int for value in flat):
        for kind in (pa.int64(), pa.uint64()):
            try:
                return pa.array(flat, kind)
            except (OverflowError, pa.ArrowInvalid):
                continue
    return pa.array([str(value) for value in flat], pa.large_string())


@dataclass(frozen=True)
class ReadyPrompts:
    """Ready prompts: text or token ids (int64) a row, None where there is none; and the rows that cannot be used."""

    prompts: list[str | NDArray[np.int64] | None]
    faults: dict[int, Fault]


def read_prompts(column: ListColumn, name: str, list_text: str | None) -> ReadyPrompts:
    """Prompt text, or lists of token ids.

    Raises:
        HistoryError: a column that is neither.
    """
    if not isinstance(column, list) and is_text_type(column.type) and list_text is None:
        return ReadyPrompts([text or None for text in _plain_text(column).to_pylist()], {})
    if isinstance(column, list) and list_text is None:
        text_rows = {row: cell for row, cell in enumerate(column) if isinstance(cell, str)}
        lists = read_lists([None if row in text_rows else cell for row, cell in enumerate(column)], name, None)
    else:
        text_rows = {}
        lists = read_lists(column, name, list_text)
    tokens, faults = as_token_ids(lists, name)
    prompts: list[str | NDArray[np.int64] | None] = []
    for row in range(len(lists)):
        ids = tokens[lists.offsets[row] : lists.offsets[row + 1]]
        prompts.append(text_rows.get(row) or (ids if len(ids) else None))
    return ReadyPrompts(prompts, faults)


def as_token_ids(lists: Lists, name: str) -> tuple[NDArray[np.int64], dict[int, Fault]]:
    """The flat values as integers (-1 for text that is not a number), and the faults with such rows added."""
    faults = dict(lists.faults)
    if pa.types.is_integer(lists.values.type):
        numbers = lists.values.to_numpy(zero_copy_only=False)
        if numbers.dtype == np.uint64:  # what does not fit an int64 is not a token id either
            numbers = np.minimum(numbers, np.uint64(2**62))
        return numbers.astype(np.int64), faults
    texts = lists.values.cast(pa.large_string()).to_pylist()
    # Integers beside texts have become texts, in whatever row of the batch they stand.
    numbers_only = np.array([_TOKEN_ID.fullmatch(text) is not None for text in texts], np.bool_)
    tokens = np.array([int(text) if ok else -1 for text, ok in zip(texts, numbers_only, strict=True)], np.int64)
    owner = np.repeat(np.arange(len(lists)), lists.lengths)
    for row in np.unique(owner[~numbers_only]):
        faults[int(row)] = ("bad-token", f"{name} holds text that is not a token id")
    return tokens, faults

"""SIDs as tables hold them: a list column, one column a level, or text. All end as codes [n, L]."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import is_list, is_text
from xgr_engine.catalog.ids import plain
from xgr_engine.catalog.sid_text import MAX_CODE, ParsedSids, pad_rows, parse_sids, parse_tokens
from xgr_engine.errors import CatalogError

IntArray = NDArray[np.int32]
Templates = tuple[str, ...] | None

MAX_LEVELS = 255
_ACCEPTED = "a list of integer codes, a list of tokens, or text such as <a_12><b_3> or 12-3-7"


class SidSource:
    """Names rows in messages: ``catalog.parquet, row 17, item B00X``.

    Args:
        path: the file.
        item_id: [n] ids of its rows.
        column: the SID column.
    """

    def __init__(self, path: object, item_id: pa.Array | pa.ChunkedArray, column: str) -> None:
        self.path = path
        self.item_id = item_id
        self.column = column

    def error(self, row: int, what: str, hint: str = "") -> CatalogError:
        """The error for ``row`` (0-based; shown from 1)."""
        item = self.item_id[row].as_py()
        return CatalogError(f"{self.path}, row {row + 1}, item {item}: {what}", hint=hint)


def find_sid_columns(names: Sequence[str], sid_col: str) -> list[str]:
    """``[sid_col]``, or the columns ``sid_0``, ``sid_1``... by number; empty if there is neither."""
    if sid_col in names:
        return [sid_col]
    numbered = {}
    for name in names:
        match = re.fullmatch(re.escape(sid_col) + r"_?([0-9]+)", name)
        if match:
            numbered[int(match[1])] = name
    ordered = sorted(numbered)
    if ordered and ordered != list(range(ordered[0], ordered[0] + len(ordered))):
        raise CatalogError(
            f"the numbers of the columns {', '.join(numbered[number] for number in ordered)} have a gap",
            hint="each level of the SID needs its column",
        )
    return [numbered[number] for number in ordered]


def read_sid_column(column: pa.ChunkedArray, source: SidSource) -> tuple[IntArray, Templates]:
    """Codes [n, L] (a null or empty SID is all -1) and token templates of one column."""
    kind = column.type
    if pa.types.is_null(kind):
        return np.full((len(column), 0), -1, np.int32), None
    if is_text(kind) or (pa.types.is_dictionary(kind) and is_text(kind.value_type)):
        texts = plain(column)
        return _checked(parse_sids(texts), _blank(texts), source, lambda row: repr(texts[row].as_py()))
    if is_list(kind):
        return _read_lists(column, source)
    raise CatalogError(
        f"{source.path}: column {source.column} has type {kind}, which is not a SID",
        why=f"a SID is {_ACCEPTED}, or is spread over columns such as sid_0, sid_1, sid_2",
        hint="name the right column with --sid-col",
    )


def read_level_columns(columns: Sequence[pa.ChunkedArray], source: SidSource) -> tuple[IntArray, Templates]:
    """Codes [n, L] of one column a level; null beyond the end makes a shorter SID."""
    levels = [plain(column) for column in columns]
    rows = len(levels[0])
    if any(is_text(level.type) for level in levels):
        present = np.stack([level.is_valid().to_numpy(zero_copy_only=False) for level in levels], axis=1)
        _no_holes(present, source)
        # Row-major: the tokens of a row one after the other.
        tokens = pa.concat_arrays([level.cast(pa.large_string()) for level in levels])
        at = np.arange(len(levels) * rows).reshape(len(levels), rows).T[present]
        parsed = parse_tokens(tokens.take(pa.array(at)), present.sum(axis=1).astype(np.int64))
        return _checked(parsed, ~present[:, 0], source, lambda row: str([level[row].as_py() for level in levels]))
    codes = np.stack([_level_codes(level, source) for level in levels], axis=1)
    _no_holes(codes >= 0, source)
    return codes, None


def _level_codes(level: pa.Array, source: SidSource) -> IntArray:
    if pa.types.is_null(level.type):
        return np.full(len(level), -1, np.int32)
    missing = pc.is_null(level, nan_is_null=True).to_numpy(zero_copy_only=False)
    values = _as_codes(pc.if_else(pa.array(~missing), level, pa.scalar(0, level.type)), None, source)
    values[missing] = -1
    return values


def _no_holes(present: NDArray[np.bool_], source: SidSource) -> None:
    holes = (present[:, 1:] & ~present[:, :-1]).any(axis=1)
    if holes.any():
        raise source.error(
            int(np.flatnonzero(holes)[0]),
            "a level of its SID is null, but a later one is not",
            hint="only the levels beyond the end of a shorter SID may be null",
        )


def _read_lists(column: pa.ChunkedArray, source: SidSource) -> tuple[IntArray, Templates]:
    lengths = np.concatenate(
        [
            pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False).astype(np.int64)
            for chunk in column.chunks
        ]
        or [np.zeros(0, np.int64)]
    )
    if lengths.max(initial=0) > MAX_LEVELS:
        row = int(lengths.argmax())
        raise source.error(row, f"a SID of {lengths[row]} codes", hint="name the SID column with --sid-col")
    # Flattening skips null lists and follows offsets and views.
    values = plain(pa.chunked_array([_flat(chunk) for chunk in column.chunks], column.type.value_type))
    if values.null_count:
        at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise source.error(_row_of(at, lengths), "its SID holds a null")
    if is_text(values.type):
        parsed = parse_tokens(values, lengths)
        return _checked(parsed, lengths == 0, source, lambda row: str(_list_at(column, row)))
    if pa.types.is_null(values.type):
        return np.full((len(lengths), 0), -1, np.int32), None
    return pad_rows(_as_codes(values, lengths, source), lengths), None


def _flat(chunk: pa.Array) -> pa.Array:
    if pa.types.is_fixed_size_list(chunk.type) and chunk.null_count:
        chunk = chunk.drop_null()
    return chunk.flatten()


def _as_codes(values: pa.Array, lengths: NDArray[np.int64] | None, source: SidSource) -> IntArray:
    """Integer codes; floats are taken where every value is integral (a frame with missing values has floats)."""

    def row_of(bad: NDArray[np.bool_]) -> int:
        at = int(np.flatnonzero(bad)[0])
        return at if lengths is None else _row_of(at, lengths)

    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise CatalogError(
            f"{source.path}: column {source.column} holds values of type {kind}, which are not codes",
            why=f"a SID is {_ACCEPTED}",
            hint="name the right column with --sid-col",
        )
    numbers = values.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        fractions = ~(np.floor(numbers) == numbers)
        if fractions.any():
            row = row_of(fractions)
            raise source.error(row, "its SID holds a value that is not an integer code")
    if len(numbers):
        if numbers.min() < 0:
            raise source.error(row_of(numbers < 0), "its SID holds a negative code")
        if numbers.max() > MAX_CODE:
            raise source.error(row_of(numbers > MAX_CODE), f"its SID holds a code above {MAX_CODE}")
    codes: IntArray = numbers.astype(np.int32)
    return codes


def _checked(
    parsed: ParsedSids, blank: NDArray[np.bool_], source: SidSource, show: Callable[[int], str]
) -> tuple[IntArray, Templates]:
    """Refuse malformed SIDs and levels spelt in two ways."""
    wrong = np.flatnonzero(~parsed.ok & ~blank)
    if len(wrong):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        if _is_too_large(show(int(wrong[0]))):
            raise source.error(int(wrong[0]), f"{show(int(wrong[0]))} holds a code above {MAX_CODE}{more}")
        raise source.error(
            int(wrong[0]),
            f"{show(int(wrong[0]))} is not a SID{more}",
            hint=f"a SID is {_ACCEPTED}, without leading zeros and in one form for the whole column",
        )
    if parsed.odd_row is not None:
        first = int(np.flatnonzero(parsed.ok)[0])
        raise source.error(
            parsed.odd_row,
            f"{show(parsed.odd_row)} spells its tokens unlike the rows before it, such as {show(first)}",
            hint="the tokens of a level must differ only in the code",
        )
    if parsed.codes.shape[1] > MAX_LEVELS:
        raise CatalogError(
            f"{source.path}: SIDs of {parsed.codes.shape[1]} codes", hint="name the column with --sid-col"
        )
    return parsed.codes, parsed.templates


def _is_too_large(shown: str) -> bool:
    """Whether what a message shows would be a SID if its codes were smaller."""
    text = shown.strip("'")
    smaller = re.sub(r"\d+", lambda code: "0" if int(code[0]) > MAX_CODE else code[0], text)
    return smaller != text and bool(parse_sids(pa.array([smaller])).ok[0])


def _blank(texts: pa.Array) -> NDArray[np.bool_]:
    blank = pc.fill_null(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0), True)
    result: NDArray[np.bool_] = blank.to_numpy(zero_copy_only=False)
    return result


def _row_of(at: int, lengths: NDArray[np.int64]) -> int:
    return int(np.searchsorted(np.cumsum(lengths), at, side="right"))


def _list_at(column: pa.ChunkedArray, row: int) -> object:
    return column[row].as_py()

"""Item ids: one canonical text for each, so that 5 and "5" are the same item, and a fast look-up by it."""

from __future__ import annotations

import uuid
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.errors import InputError

IntArray = NDArray[np.int32]

# 18 digits always fit an int64.
_SAFE_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
_INTEGER = r"^(0|-?[1-9][0-9]*)$"
_INT64_MAX = 2**63 - 1


def plain(ids: pa.Array | pa.ChunkedArray) -> pa.Array:
    """``ids`` as one array without the encodings that carry no meaning (chunks, dictionary, run ends, views).

    The type of the values stays; text of more than 2 GiB becomes ``large_string``.
    """
    kind = ids.type
    if pa.types.is_dictionary(kind):
        ids = ids.cast(kind.value_type)
    elif pa.types.is_run_end_encoded(kind):
        ids = pc.run_end_decode(ids)
    elif pa.types.is_string_view(kind):
        ids = ids.cast(pa.large_string())
    elif pa.types.is_binary_view(kind):
        ids = ids.cast(pa.large_binary())
    if isinstance(ids, pa.ChunkedArray):
        if pa.types.is_string(ids.type) and ids.nbytes >= 2**31:
            ids = ids.cast(pa.large_string())
        ids = ids.chunk(0) if ids.num_chunks == 1 else pa.concat_arrays(ids.chunks) if ids.num_chunks else _empty(ids)
    return ids


def canonical(ids: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The text by which an id is matched: ``large_string`` [n], null where the id is null or NaN.

    Integers, and floats and decimals with an integral value, are written as integers (5, 5.0 and "5" match); text
    stays as it is ("05" and "5" are two items); UUIDs are written with dashes; variable-length binary is read as
    UTF-8, fixed-size binary is written in hexadecimal.

    Raises:
        InputError: a type that can be no id (lists, structs, booleans), or binary that is no UTF-8.
    """
    ids = plain(ids)
    kind = ids.type
    if isinstance(kind, pa.BaseExtensionType):
        return _canonical_extension(ids)
    if pa.types.is_null(kind):
        return pa.nulls(len(ids), pa.large_string())
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _canonical_fraction(ids)
    if pa.types.is_fixed_size_binary(kind):
        texts = [None if value is None else value.hex() for value in ids.to_pylist()]
        return pa.array(texts, pa.large_string())
    if pa.types.is_boolean(kind) or pa.types.is_nested(kind):
        raise InputError(f"item ids of type {kind} cannot be matched", hint="give ids as integers or text")
    try:
        return ids.cast(pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputError(
            f"item ids of type {kind} cannot be read as text", why=str(error), hint="give ids as integers or text"
        ) from error


def first_fraction(ids: pa.Array | pa.ChunkedArray) -> int | None:
    """Row of the first float or decimal that is no whole number, infinities included; null and NaN are none."""
    if not (pa.types.is_floating(ids.type) or pa.types.is_decimal(ids.type)):
        return None
    missing = pc.is_null(ids, nan_is_null=True)
    if pa.types.is_float16(ids.type):
        ids = ids.cast(pa.float32())
    finite = pc.is_finite(ids) if pa.types.is_floating(ids.type) else True
    whole = pc.and_(finite, pc.equal(ids, pc.trunc(ids)))
    bad = pc.and_not(pc.invert(pc.fill_null(whole, False)), missing)
    found = pc.index(bad, True).as_py()
    return None if found < 0 else int(found)


def is_decimal_text(texts: pa.Array) -> pa.Array:
    """Boolean [n]: all digits and no leading zero, so that the text is ordered by its value."""
    return pc.match_substring_regex(texts, r"^(0|[1-9][0-9]*)$")


def has_duplicates(ids: pa.Array) -> bool:
    """Whether two ids may be the same item. Quicker than an index; a false alarm (equal hashes) is possible."""
    numbers = _as_int64(ids)
    keys: NDArray[Any] = np.sort(numbers if numbers is not None else hash_texts(canonical(ids)))
    return bool((keys[1:] == keys[:-1]).any())


class IdIndex:
    """Finds the row of an id among many. Built once (a sort), then every look-up is a binary search of all ids asked.

    Integers are compared as integers. Anything else is compared by a 64-bit hash of its canonical text first, and
    then by the text itself, so that equal hashes cannot mix up two items.
    """

    def __init__(self, ids: pa.Array) -> None:
        """
        Args:
            ids: [N] any type that ``canonical`` takes, no nulls.
        """
        self._numbers = _as_int64(ids)
        self._texts = None if self._numbers is not None else canonical(ids)
        keys: NDArray[Any] = self._numbers if self._numbers is not None else hash_texts(self._texts)
        self._order: IntArray = np.argsort(keys).astype(np.int32)
        self._keys = keys[self._order]

    @property
    def texts(self) -> pa.Array:
        """Canonical text of every row."""
        return self._texts if self._texts is not None else pa.array(self._numbers).cast(pa.large_string())

    @cached_property
    def duplicates(self) -> NDArray[np.intp]:
        """[m, 2] pairs of rows with the same canonical id: the first row of the id, and each further one."""
        same = np.flatnonzero(self._keys[1:] == self._keys[:-1])
        if len(same) == 0:
            return np.zeros((0, 2), np.intp)
        rows = np.unique(self._order[np.concatenate([same, same + 1])])
        first: dict[str, int] = {}
        pairs = []
        for row, text in zip(rows.tolist(), self.texts.take(pa.array(rows)).to_pylist(), strict=True):
            if first.setdefault(text, row) != row:
                pairs.append((first[text], row))
        return np.array(pairs, np.intp).reshape(-1, 2)

    def rows_of(self, ids: pa.Array | pa.ChunkedArray) -> IntArray:
        """[n] row of each id, or -1 where it is null or unknown."""
        ids = plain(ids)
        if len(ids) == 0 or len(self._order) == 0:
            return np.full(len(ids), -1, np.int32)
        if self._numbers is not None:
            asked, valid = _integers_of(ids)
            return self._find(asked, valid, None)
        texts = canonical(ids)
        return self._find(hash_texts(texts), _valid(texts), texts)

    def _find(self, asked: NDArray[Any], valid: NDArray[np.bool_], texts: pa.Array | None) -> IntArray:
        # Neighbouring look-ups of sorted keys share cache lines, which more than pays for the sort.
        distinct, inverse = np.unique(asked, return_inverse=True)
        at = np.searchsorted(self._keys, distinct)[inverse]
        last = len(self._keys) - 1
        hit = valid & (at <= last)
        hit[hit] = self._keys[at[hit]] == asked[hit]
        rows = np.full(len(asked), -1, np.int32)
        if texts is None or self._texts is None:
            rows[hit] = self._order[at[hit]]
            return rows
        pending = np.flatnonzero(hit)
        while len(pending):
            found = self._order[at[pending]]
            equal = pc.equal(self._texts.take(pa.array(found)), texts.take(pa.array(pending)))
            match = equal.to_numpy(zero_copy_only=False)
            rows[pending[match]] = found[match]
            # Another text with the same hash: try the next row that has it.
            pending = pending[~match]
            at[pending] += 1
            pending = pending[at[pending] <= last]
            pending = pending[self._keys[at[pending]] == asked[pending]]
        return rows


def hash_texts(texts: pa.Array, *, slice_rows: int = 1 << 18) -> NDArray[np.uint64]:
    """[n] a 64-bit hash of each text (UTF-8, ``large_string``), eight bytes a step. Nulls hash like empty text."""
    hashes = np.empty(len(texts), np.uint64)
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    for start in range(0, len(texts), slice_rows):  # slices that stay in the cache
        stop = min(start + slice_rows, len(texts))
        low, high = int(offsets[start]), int(offsets[stop])
        padded = np.zeros(high - low + 8, np.uint8)
        padded[: high - low] = data[low:high]
        hashes[start:stop] = _hash_slice(padded, offsets[start : stop + 1] - low)
    return hashes


_MASKS = np.array([(1 << (8 * count)) - 1 for count in range(9)], np.uint64)
_FACTOR_1 = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


def _hash_slice(padded: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    words = np.lib.stride_tricks.as_strided(padded.view(), (len(padded) - 7, 8), (1, 1))
    lengths = np.diff(offsets)
    state = lengths.astype(np.uint64) * _FACTOR_1
    rows = np.arange(len(lengths))
    for step in range(0, int(lengths.max(initial=0)), 8):
        rows = rows[lengths[rows] > step]
        word = words[offsets[rows] + step].view("<u8")[:, 0]
        word &= _MASKS[np.minimum(lengths[rows] - step, 8)]
        mixed = (state[rows] ^ word) * _FACTOR_2
        mixed ^= mixed >> _SHIFT
        state[rows] = mixed
    return state


def _integers_of(ids: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids as int64 and where that is possible: the ids that can match a catalog of integers."""
    numbers = _as_int64(ids)
    if numbers is not None:
        return numbers, np.ones(len(ids), np.bool_)
    if pa.types.is_integer(ids.type) and not pa.types.is_uint64(ids.type):
        return pc.fill_null(ids, 0).cast(pa.int64()).to_numpy(), _valid(ids)
    texts = canonical(ids)
    safe = pc.fill_null(pc.match_substring_regex(texts, _SAFE_INTEGER), False)
    numbers = pc.if_else(safe, texts, "0").cast(pa.int64()).to_numpy().copy()
    valid = safe.to_numpy(zero_copy_only=False).copy()
    # 19 digits may or may not fit: few, so one by one.
    integral = pc.fill_null(pc.match_substring_regex(texts, _INTEGER), False).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(integral & ~valid):
        value = int(texts[row].as_py())
        if -_INT64_MAX - 1 <= value <= _INT64_MAX:
            numbers[row], valid[row] = value, True
    return numbers, valid


def _as_int64(ids: pa.Array) -> NDArray[np.int64] | None:
    """The ids as int64 if they are integers, without nulls, that fit."""
    if not pa.types.is_integer(ids.type) or ids.null_count:
        return None
    try:
        numbers: NDArray[np.int64] = ids.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return None
    return numbers


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _canonical_fraction(ids: pa.Array) -> pa.Array:
    """Floats and decimals: as an integer where the value is one."""
    if pa.types.is_floating(ids.type):
        ids = pc.if_else(pc.is_finite(ids.cast(pa.float64())), ids.cast(pa.float64()), None)
        fits = pc.less(pc.abs(ids), float(2**63))
    else:
        fits = pc.less(pc.abs(ids.cast(pa.float64())), float(10**18))
    integral = pc.fill_null(pc.and_(fits, pc.equal(ids, pc.trunc(ids))), False)
    whole = pc.if_else(integral, ids, None)
    if pa.types.is_decimal(whole.type):
        whole = pc.trunc(whole)
    texts = whole.cast(pa.int64()).cast(pa.large_string())
    # longer decimals than int64 holds, with or without a scale
    plain_texts = pc.replace_substring_regex(ids.cast(pa.large_string()), r"\.0+$", "")
    return pc.coalesce(texts, plain_texts)


def _canonical_extension(ids: pa.Array) -> pa.Array:
    if ids.type.extension_name == "arrow.uuid":
        raw = ids.storage.to_pylist()
        return pa.array([None if value is None else str(uuid.UUID(bytes=value)) for value in raw], pa.large_string())
    return canonical(ids.storage)


def _empty(ids: pa.ChunkedArray) -> pa.Array:
    return pa.array([], ids.type)

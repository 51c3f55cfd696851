"""Canonical text of item ids, and looking them up."""

from __future__ import annotations

import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.catalog import ids as ids_module
from xgr_engine.catalog.ids import IdIndex, canonical, has_duplicates, hash_texts
from xgr_engine.errors import InputError


@pytest.mark.parametrize(
    ("array", "texts"),
    [
        (pa.array([5, None, -3], pa.int16()), ["5", None, "-3"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([2**53 + 1]), ["9007199254740993"]),
        (pa.array([5.0, -0.0, 1.5, float("nan"), None, 1e18]), ["5", "0", "1.5", None, None, str(10**18)]),
        (pa.array([Decimal("5.00"), Decimal("1.25"), None]), ["5", "1.25", None]),
        (pa.array([Decimal("12345678901234567890123")]), ["12345678901234567890123"]),
        (pa.array([Decimal("12345678901234567890.00")]), ["12345678901234567890"]),
        (pa.array(["05", "5", "", None]), ["05", "5", "", None]),
        (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
        (pa.array(["x"], pa.string_view()), ["x"]),
        (pa.array(["x"], pa.large_string()), ["x"]),
        (pa.array([b"B00X", None]), ["B00X", None]),
        (pa.array([b"\x01\xff"], pa.binary(2)), ["01ff"]),
        (pa.chunked_array([["a"], ["b"]]), ["a", "b"]),
        (pa.chunked_array([], pa.string()), []),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array | pa.ChunkedArray) else "",
)
def test_canonical_text(array: pa.Array, texts: list[str | None]) -> None:
    assert canonical(array).to_pylist() == texts


@pytest.mark.skipif(not hasattr(pa, "uuid"), reason="this pyarrow has no UUID type")
def test_a_uuid_matches_its_text() -> None:
    value = uuid.uuid5(uuid.NAMESPACE_DNS, "item")
    array = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([value.bytes], pa.binary(16)))
    assert canonical(array).to_pylist() == [str(value)]


@pytest.mark.parametrize("array", [pa.array([[1]]), pa.array([True]), pa.array([b"\xff"]), pa.array([{"a": 1}])])
def test_types_that_can_be_no_id_are_refused(array: pa.Array) -> None:
    with pytest.raises(InputError):
        canonical(array)


integers = st.one_of(st.integers(0, 30), st.integers(-(2**63), 2**63 - 1))
texts = st.one_of(st.integers(-5, 30).map(str), st.text(max_size=20), st.text("ab0", max_size=3))


@given(st.lists(integers, min_size=1, max_size=30, unique=True), st.lists(integers), st.lists(texts))
@settings(max_examples=100, deadline=None)
def test_look_up_among_integers(known: list[int], asked: list[int], asked_texts: list[str]) -> None:
    index = IdIndex(pa.array(known, pa.int64()))
    by_text = {str(value): row for row, value in enumerate(known)}
    assert index.rows_of(pa.array(asked, pa.int64())).tolist() == [by_text.get(str(value), -1) for value in asked]
    every = [*asked_texts, *map(str, known), "9223372036854775808", "-0", "+1", "01", None]
    expected = [by_text.get(text, -1) if text is not None else -1 for text in every]
    assert index.rows_of(pa.array(every)).tolist() == expected


@given(st.lists(texts, min_size=1, max_size=30, unique=True), st.lists(texts), st.lists(integers))
@settings(max_examples=100, deadline=None)
def test_look_up_among_texts(known: list[str], asked: list[str], numbers: list[int]) -> None:
    index = IdIndex(pa.array(known))
    rows = {text: row for row, text in enumerate(known)}
    every = [*asked, *known, None]
    expected = [rows.get(text, -1) if text is not None else -1 for text in every]
    assert index.rows_of(pa.array(every, pa.string())).tolist() == expected
    assert index.rows_of(pa.array(every, pa.string()).dictionary_encode()).tolist() == expected
    assert index.rows_of(pa.array(numbers, pa.int64())).tolist() == [rows.get(str(value), -1) for value in numbers]


def test_equal_hashes_do_not_mix_up_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "hash_texts", lambda array: np.zeros(len(array), np.uint64))
    known = [f"item{number}" for number in range(20)]
    index = IdIndex(pa.array(known))
    assert index.rows_of(pa.array([*known[::-1], "other"])).tolist() == [*range(19, -1, -1), -1]
    assert len(index.duplicates) == 0


def test_sliced_arrays_are_read_from_their_offset() -> None:
    array = pa.array(["skip", "a", "bb", "ccc" * 9])
    assert hash_texts(canonical(array.slice(1))).tolist() == hash_texts(canonical(array)).tolist()[1:]
    assert IdIndex(array.slice(1)).rows_of(array.slice(2)).tolist() == [1, 2]
    assert IdIndex(pa.array([1, 2, 3]).slice(1)).rows_of(pa.array([9, 3]).slice(1)).tolist() == [1]


def test_hashing_in_slices_changes_nothing() -> None:
    array = canonical(pa.array([f"{number}" * (number % 5) for number in range(100)]))
    assert hash_texts(array, slice_rows=7).tolist() == hash_texts(array).tolist()


@given(st.lists(st.one_of(st.integers(0, 9).map(str), st.sampled_from(["a", "05"])), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_duplicates_are_the_repeated_ids_each_with_its_first_row(values: list[str]) -> None:
    pairs = [(values.index(value), row) for row, value in enumerate(values) if values.index(value) != row]
    assert sorted(map(tuple, IdIndex(pa.array(values)).duplicates.tolist())) == sorted(pairs)
    assert has_duplicates(pa.array(values)) == bool(pairs)
    if all(value.isdigit() and value != "05" for value in values):
        numbers = pa.array([int(value) for value in values])
        assert sorted(map(tuple, IdIndex(numbers).duplicates.tolist())) == sorted(pairs)


@pytest.mark.parametrize(
    "asked",
    [
        pa.array([5.0, 7.5, float("nan"), None]),
        pa.array([5, 99, None, 99], pa.uint64()),
        pa.array(["5", "5.0", "05", None]),
        pa.array([Decimal("5.00"), Decimal("7.50"), None, None]),
        pa.array([5, 6, None, 6], pa.int8()),
    ],
)
def test_5_is_one_item_in_every_type(asked: pa.Array) -> None:
    assert IdIndex(pa.array([7, 5])).rows_of(asked).tolist() == [1, -1, -1, -1]
    assert IdIndex(pa.array(["7", "5"])).rows_of(asked).tolist() == [1, -1, -1, -1]


def test_empty_arrays() -> None:
    assert IdIndex(pa.array([], pa.string())).rows_of(pa.array(["a"])).tolist() == [-1]
    assert IdIndex(pa.array(["a"])).rows_of(pa.array([], pa.string())).tolist() == []

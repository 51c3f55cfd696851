"""List columns in the physical shapes of formats.md 2.4; rows of cases.md on Parquet lists."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.errors import HistoryError
from xgr_engine.job.lists import as_token_ids, read_lists, read_prompts

ROWS: list[list[int] | None] = [[5, 7], None, [], [2**31 - 1, 5, 5]]
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
WRAPPERS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def texts(column: pa.Array | list[Any], list_text: str | None = None) -> list[list[str]]:
    lists = read_lists(column, "history", list_text)
    flat = [str(value) for value in lists.values.to_pylist()]
    return [flat[start:stop] for start, stop in zip(lists.offsets[:-1], lists.offsets[1:], strict=True)]


def through_parquet(column: pa.Array, path: Any) -> pa.Array:
    pq.write_table(pa.table({"history": column}), path)
    return pq.read_table(path).column("history").combine_chunks()


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("kind", [*INTEGERS, pa.float64()], ids=str)
def test_every_list_type_of_numbers_reads_the_same_slices_included(wrap: Any, kind: pa.DataType, tmp_path: Any) -> None:
    rows = [[row if row is None else [value % 100 for value in row] for row in ROWS]][0]
    column = pa.array(rows, wrap(kind))
    expected = [[str(value) for value in row or []] for row in rows]
    assert texts(column) == expected
    assert texts(column.slice(1, 3)) == expected[1:]
    assert texts(through_parquet(column, tmp_path / "x.parquet")) == expected


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_every_list_type_of_text_reads_the_same(wrap: Any, kind: pa.DataType, tmp_path: Any) -> None:
    rows = [["B00X", "007"], None, [], ["a", "a"]]
    if pa.types.is_dictionary(kind):
        values = pa.array(["B00X", "007", "a", "a"]).dictionary_encode()
        column = pa.ListArray.from_arrays(pa.array([0, 2, 2, 2, 4], pa.int32()), values)
    else:
        column = pa.array(rows, wrap(kind))
    expected = [["B00X", "007"], [], [], ["a", "a"]]
    assert texts(column) == expected
    assert texts(through_parquet(column, tmp_path / "x.parquet")) == expected


def test_fixed_size_lists_with_null_rows() -> None:
    column = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    assert texts(column) == [["1", "2"], [], ["3", "4"]]
    assert texts(column.slice(1)) == [[], ["3", "4"]]


def test_pandas_list_of_null_and_null_columns_are_empty_histories() -> None:
    assert texts(pa.array([[], None, []], pa.list_(pa.null()))) == [[], [], []]
    assert texts(pa.nulls(2)) == [[], []]


def test_decimals_are_the_integers_they_hold() -> None:
    wide = Decimal("12345678901234567890123")
    assert texts(pa.array([[wide, Decimal(-5)], None, []])) == [[str(wide), "-5"], [], []]
    assert texts(pa.array([[Decimal("7.00")]], pa.list_(pa.decimal256(50, 2)))) == [["7"]]
    assert texts([[Decimal("7.00"), wide]]) == [["7", str(wide)]]
    assert texts([[UUID(int=7)]]) == [["00000000-0000-0000-0000-000000000007"]]


def test_large_unsigned_ids_survive() -> None:
    assert texts(pa.array([[2**64 - 1]], pa.list_(pa.uint64()))) == [[str(2**64 - 1)]]
    assert texts([[2**64 - 1, 1]]) == [[str(2**64 - 1), "1"]]
    assert texts([[2**70]]) == [[str(2**70)]]


@pytest.mark.parametrize(
    ("column", "faults"),
    [
        (pa.array([[1.0, None], [2.0]], pa.list_(pa.float64())), {0: "null-in-list"}),
        (pa.array([[2.0], [1.0, float("nan")]], pa.list_(pa.float64())), {1: "null-in-list"}),
        (pa.array([[2.0], [1.5], [float("inf")]], pa.list_(pa.float64())), {1: "not-integral", 2: "not-integral"}),
        (pa.array([[2.0**53 + 2], [7.0]], pa.list_(pa.float64())), {0: "not-integral"}),
        (pa.array([[2.0**24 + 2], [7.0]], pa.list_(pa.float32())), {0: "not-integral"}),
        (pa.array([["a", None], ["b"]], pa.list_(pa.string())), {0: "null-in-list"}),
        (pa.array([[Decimal("1.00"), None], [Decimal("2.50")], [Decimal("3.00")]]), {
            0: "null-in-list", 1: "not-integral"}),
        ([[Decimal("1.5")], [Decimal("NaN")], [Decimal("2.00")]], {0: "not-integral", 1: "not-integral"}),
        (pa.array([[None], []], pa.list_(pa.null())), {0: "null-in-list"}),
        ([[1, None], [float("nan")], [True], [{"a": 1}], {"a": 1}, [3]], {
            0: "null-in-list", 1: "null-in-list", 2: "not-integral", 3: "not-integral", 4: "bad-list-text"}),
    ],
)  # fmt: skip
def test_nulls_nan_and_fractions_reject_their_row_alone(column: Any, faults: dict[int, str]) -> None:
    """cases.md: list with nulls inside, list<double> with NaN: one stated policy, never a crash, never a wrong id."""
    lists = read_lists(column, "history", None)
    assert {row: fault[0] for row, fault in lists.faults.items()} == faults
    assert all(lists.lengths[row] == 0 for row in faults)
    assert lists.lengths.sum() == len(lists.values) == sum(
        len(cell or []) for row, cell in enumerate(column.to_pylist() if isinstance(column, pa.Array) else column)
        if row not in faults
    )  # fmt: skip


def test_text_without_list_text_is_refused_with_a_hint() -> None:
    with pytest.raises(HistoryError, match="--list-text python"):
        read_lists(pa.array(["['<a_1>', '<b_2>']"]), "history", None)


def test_minionerec_python_lists_are_parsed_without_evaluating_code(tmp_path: Any) -> None:
    """cases.md: MiniOneRec CSV; a cell that would do something if evaluated is a reject and does nothing."""
    marker = tmp_path / "evaluated"
    evil = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    deep = "[" * 5000 + "]" * 5000
    column = pa.array(["['<a_1>', '<b_2>']", evil, "[1, 2]", "(3,)", None, "", "{1: 2}", "'x'", deep, "[None]"])
    lists = read_lists(column, "history", "python")
    assert not marker.exists()
    reasons = {row: fault[0] for row, fault in lists.faults.items()}
    bad = "bad-list-text"
    assert reasons == {1: bad, 6: bad, 7: bad, 8: bad, 9: "null-in-list"}
    assert texts(column, "python")[:6] == [["<a_1>", "<b_2>"], [], ["1", "2"], ["3"], [], []]


@given(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.integers(), st.text(max_size=4)), max_size=4)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_json_text_round_trips_whatever_ids_it_holds(rows: list[list[Any] | None]) -> None:
    column = pa.array([None if row is None else json.dumps(row) for row in rows], pa.string())
    assert texts(column, "json") == [[str(value) for value in row or []] for row in rows] == texts(rows)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2]),
        pa.array([[True]]),
        pa.array([[[1]]]),
        pa.array([[{"a": 1}]]),
        pa.array([{"a": 1}]),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_that_can_hold_no_ids_fails_and_names_itself(column: pa.Array) -> None:
    with pytest.raises(HistoryError, match="history"):
        read_lists(column, "history", None)


def test_token_ids_from_every_form() -> None:
    tokens, faults = as_token_ids(read_lists(pa.array([[1, 2**63], [3]], pa.list_(pa.uint64())), "h", None), "h")
    assert tokens[0] == 1 and tokens[1] > 2**31 and tokens[2] == 3 and not faults
    tokens, faults = as_token_ids(read_lists([["4", "x"], ["5"]], "h", None), "h")
    assert tokens.tolist() == [4, -1, 5] and faults[0][0] == "bad-token"


def test_ready_prompts_as_text_ids_and_mixed_json_lines() -> None:
    assert read_prompts(pa.array(["hello", None, ""]), "h", None).prompts == ["hello", None, None]
    ids = read_prompts(pa.array([[1, 2], [], None]), "h", None).prompts
    assert isinstance(ids[0], np.ndarray) and ids[0].tolist() == [1, 2] and ids[1:] == [None, None]
    mixed = read_prompts(["text", [3, 4], None, [None]], "h", None)
    assert mixed.prompts[0] == "text" and mixed.prompts[2] is None and list(mixed.faults) == [3]
    as_text = read_prompts(pa.array(["[5, 6]"]), "h", "json").prompts[0]
    assert isinstance(as_text, np.ndarray) and as_text.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[1, 2]", "add --list-text json"),
        ("<a_1><b_2><a_3><b_4>", "one text per semantic ID"),
        ("1 2 3", "split the text into a list"),
    ],
)
def test_the_hint_for_a_text_column_fits_the_text(text: str, hint: str) -> None:
    """--list-text json cannot read semantic IDs that stand one after the other."""
    with pytest.raises(HistoryError, match="holds text, not lists") as caught:
        read_lists(pa.array([text]), "history", None)
    assert hint in caught.value.hint

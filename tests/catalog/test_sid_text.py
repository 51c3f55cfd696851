"""SIDs in text form."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.catalog.sid_text import parse_sid_texts, parse_sids, sid_text

sids = st.lists(st.integers(0, 10**6), min_size=1, max_size=5).map(tuple)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("<a_12><b_3>", [12, 3]),
        ("<a_0>", [0]),
        ("<|sid_begin|><s_a_340><s_b_6566><s_c_5603><|sid_end|>", [340, 6566, 5603]),
        ("<item_L0_C5><item_L1_C17>", [5, 17]),
        ("<|a_12|><|b_3|>", [12, 3]),
        ("['<a_1>', '<b_2>']", [1, 2]),
        (" <a_1> <b_2> ", [1, 2]),
        ("12-3-7", [12, 3, 7]),
        ("12,3, 7", [12, 3, 7]),
        ("12 3 7", [12, 3, 7]),
        ("[12, 3, 7]", [12, 3, 7]),
        ("(12, 3)", [12, 3]),
        ("7", [7]),
        ("2147483646", [2147483646]),
    ],
)
def test_forms(text: str, codes: list[int]) -> None:
    parsed, ok = parse_sid_texts(pa.array([text]))
    assert ok.tolist() == [True] and parsed.tolist() == [codes]


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "<a_>", "<a_><b_3>", "<a_1", "a_1>", "<a_1>x", "x<a_1>", "<a_01>", "<a_1>>", "<|sid_begin|>"),
        *("-1", "1--2", "1-", "1.5", "a-1", "[]", "99999999999", "<a_99999999999>", "<a_2147483647>", "1,,2"),
    ],
)
def test_malformed_text_is_not_ok_and_harms_no_other_row(text: str) -> None:
    good = "<a_3>" if "<" in text or text in ("x", "", " ") else "3"
    codes, ok = parse_sid_texts(pa.array([good, text, None, good]))
    assert ok.tolist() == [True, False, False, True]
    assert codes[[0, 3], 0].tolist() == [3, 3] and (codes[[1, 2]] == -1).all()


@given(st.lists(st.one_of(sids, st.none()), min_size=1, max_size=30), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_written_and_read_again(rows: list[tuple[int, ...] | None], tokens: bool, chunked: bool) -> None:
    templates = ("<a_{}>", "<b_{}>", "<c_{}>", "<d_{}>", "<e_{}>") if tokens else None
    array = pa.array([None if row is None else sid_text(row, templates) for row in rows], pa.string())
    given_array = pa.chunked_array([array.slice(0, 3), array.slice(3)]) if chunked else array
    parsed = parse_sids(given_array)
    width = max((len(row) for row in rows if row), default=0)
    assert parsed.ok.tolist() == [row is not None for row in rows]
    assert parsed.codes.tolist() == [[*(row or ()), *[-1] * (width - len(row or ()))] for row in rows]
    if templates is not None and width:
        assert parsed.templates == templates[:width]
        assert parse_sid_texts(given_array, templates)[0].tolist() == parsed.codes.tolist()


def test_levels_spelt_in_two_ways_are_told_with_their_row() -> None:
    assert parse_sids(pa.array(["<a_1><b_2>", None, "<b_1><a_2>"])).odd_row == 2
    assert parse_sids(pa.array(["<a_1>", "<a_1><b_2>"])).templates == ("<a_{}>", "<b_{}>")


def test_given_templates_refuse_another_spelling_and_deeper_sids() -> None:
    rows = ["<a_1><b_2>", "<b_2><a_1>", "<x_1><b_2>", "<a_1>", "<a_1><b_2><c_3>"]
    codes, ok = parse_sid_texts(pa.array(rows), ("<a_{}>", "<b_{}>"))
    assert ok.tolist() == [True, False, False, True, False]
    assert (codes[~ok] == -1).all() and codes[3].tolist()[:2] == [1, -1]


def test_each_row_is_read_by_itself_whatever_form_the_others_have() -> None:
    rows = ["<a_1><b_2>", "3-4", None, "5", "<a_>", "1,2,3", "x"]
    for templates in (None, ("<a_{}>", "<b_{}>")):
        codes, ok = parse_sid_texts(pa.array(rows), templates)
        assert ok.tolist() == [True, True, False, True, False, True, False]
        assert codes.tolist() == [[1, 2, -1], [3, 4, -1], [-1] * 3, [5, -1, -1], [-1] * 3, [1, 2, 3], [-1] * 3]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_string_type(kind: pa.DataType) -> None:
    codes, ok = parse_sid_texts(pa.array(["<a_1><b_2>", None]).cast(kind))
    assert codes[0].tolist() == [1, 2] and ok.tolist() == [True, False]


def test_nothing() -> None:
    codes, ok = parse_sid_texts(pa.array([], pa.string()))
    assert len(codes) == 0 and len(ok) == 0
    codes, ok = parse_sid_texts(pa.nulls(2, pa.string()))
    assert codes.shape == (2, 0) and not ok.any()

"""Quotes that swallow rows of a CSV file, against a state machine that takes one byte at a time."""

from __future__ import annotations

import gzip
import io
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xgr_engine.catalog.readers import ReadOptions, csv_quotes, read_catalog
from xgr_engine.catalog.readers.csv_quotes import find_quote_fault
from xgr_engine.errors import CatalogError


def fault_by_hand(text: bytes) -> int | None:
    """Offset of the opening quote of the first field that swallows lines; Arrow's rules, byte by byte."""
    state, opened, at = "start", 0, 0
    while at < len(text):
        byte = text[at : at + 1]
        if state == "quoted":
            if byte == b'"' and text[at + 1 : at + 2] == b'"':
                at += 1
            elif byte == b'"':
                behind = text[at + 1 : at + 2]
                if behind not in (b"", b",", b"\n", b"\r") and any(end in text[opened:at] for end in (b"\n", b"\r")):
                    return opened
                state = "plain"
        elif state == "start" and byte == b'"':
            state, opened = "quoted", at
        else:
            state = "start" if byte in (b",", b"\n", b"\r") else "plain"
        at += 1
    return opened if state == "quoted" else None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([b'"', b'""', b'"""', b",", b"\n", b"a", b',"', b'",', b"\r\n"]), max_size=40).map(
        b"".join
    ),
    st.integers(1, 9),
)
@example(b'1,"[""p""]\n2,"[""r""]"', 3)
@example(b'"a""', 2)
def test_the_scan_equals_a_byte_by_byte_machine_at_any_block_size(text: bytes, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_quotes, "_BLOCK", block)
        fault = find_quote_fault(io.BytesIO(text))
    assert (fault.offset if fault else None) == fault_by_hand(text)


@pytest.mark.parametrize("name", ["c.csv", "c.csv.gz"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('item_id,sid,title\n1,1-2,"open\n2,1-3,b\n3,1-4,c', 2),
        ('item_id,sid,title\n1,1-2,a\n2,1-3,"b\n3,1-4,"c"\n4,1-5,d\n', 3),
        ('\ufeff"item_id",sid,title\n1,1-2,"a\nb"\n2,1-3,"', 4),
    ],
)
def test_a_quote_that_swallows_rows_is_refused_naming_its_line(tmp_path: Path, name: str, text: str, line: int) -> None:
    """It used to build a catalog of fewer items, without a word."""
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(CatalogError, match=rf"{name}, line {line}: a quoted field"):
        read_catalog([tmp_path / name], ReadOptions())


def test_inch_marks_and_closed_fields_of_several_lines_are_legal(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('item_id,sid,title\n1,1-2,12" pipe\n2,1-3,"6"" pipe,\nblack"\n3,1-4,""\n4,1-5,"7" pipe\n')
    titles = read_catalog([path], ReadOptions()).attributes["title"].to_pylist()
    assert titles == ['12" pipe', '6" pipe,\nblack', "", "7 pipe"]


@pytest.mark.parametrize("row", [b'1,"[""p"",""q""]","a\nb"\n', b'1,12" pipe,"x"\n'])
def test_a_large_file_takes_seconds(row: bytes) -> None:
    """Far below what parsing it costs: a second for 16 MiB is the limit of a busy machine, not the usual time."""
    text = row * ((16 << 20) // len(row))
    started = time.perf_counter()
    assert find_quote_fault(io.BytesIO(text)) is None
    assert time.perf_counter() - started < 5

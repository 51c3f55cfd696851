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
from xgr_engine.catalog.readers.csv_quotes import QuotedField, QuoteFault, scan_quotes
from xgr_engine.errors import CatalogError


def scanned_by_hand(text: bytes) -> tuple[str, int, int]:
    """Offset of the opening quote of the first field that swallows lines, else of the one with most lines, and these.

    Arrow's rules, byte by byte.
    """
    state, opened, at, longest = "start", 0, 0, ("field", 0, 0)
    while at < len(text):
        byte = text[at : at + 1]
        if state == "quoted":
            if byte == b'"' and text[at + 1 : at + 2] == b'"':
                at += 1
            elif byte == b'"':
                behind = text[at + 1 : at + 2]
                if behind not in (b"", b",", b"\n", b"\r") and any(end in text[opened:at] for end in (b"\n", b"\r")):
                    return ("fault", opened, 0)
                lines = text[opened:at].count(b"\n") + 1
                longest = max(longest, ("field", opened, lines), key=lambda field: field[2])
                state = "plain"
        elif state == "start" and byte == b'"':
            state, opened = "quoted", at
        else:
            state = "start" if byte in (b",", b"\n", b"\r") else "plain"
        at += 1
    return ("fault", opened, 0) if state == "quoted" else longest


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
        found = scan_quotes(io.BytesIO(text))
    lines = found.lines if isinstance(found, QuotedField) else 0
    kind = "fault" if isinstance(found, QuoteFault) else "field"
    assert (kind, found.offset, lines) == scanned_by_hand(text)


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


def test_a_field_of_very_many_lines_is_warned_of_and_then_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stray quotes: by the rules of CSV one field, in truth all rows between them."""
    path = tmp_path / "c.csv"

    def read(swallowed: int) -> int:
        rows = "".join(f"{item},1-{item},b\n" for item in range(4, 4 + swallowed))
        path.write_text(f'item_id,sid,title\n1,1-1,"a\nb"\n2,1-2,"inch\n3,1-3,c\n{rows}9,1-9,12"\n8,1-8,d\n')
        return len(read_catalog([path], ReadOptions()).item_id)

    assert read(97) == 3 and not caplog.records
    assert read(98) == 3 and read(98) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}, line 4: a quoted field of 101 lines begins there; if its quote does not belong there, the rows in it "
        "are lost"
    ]
    with pytest.raises(CatalogError, match=r"c.csv, line 4: a quoted field of 10,001 lines begins there"):
        read(9998)


@pytest.mark.parametrize("row", [b'1,"[""p"",""q""]","a\nb"\n', b'1,12" pipe,"x"\n'])
def test_a_large_file_takes_seconds(row: bytes) -> None:
    """Far below what parsing it costs: the limit is that of a slow machine, not the usual time."""
    text = row * ((16 << 20) // len(row))
    started = time.process_time()
    assert isinstance(scan_quotes(io.BytesIO(text)), QuotedField)
    assert time.process_time() - started < 5

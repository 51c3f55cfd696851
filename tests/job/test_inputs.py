"""Input files: which, in what order, which rows; row ranges equal slices of the whole."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xgr_engine.errors import HistoryError
from xgr_engine.job import input_formats
from xgr_engine.job.inputs import RowReader, find_files, open_inputs, would_find
from xgr_engine.job.options import HistoryOptions


def options(*paths: Any, **given: Any) -> HistoryOptions:
    return HistoryOptions(tuple(str(path) for path in paths), **given)


def write(path: Path, rows: int, group: int, first: int = 0) -> Path:
    table = pa.table(
        {
            "user_id": pa.array(range(first, first + rows), pa.int64()),
            "history": [[row, row + 1] for row in range(first, first + rows)],
            "blob": ["x" * 50] * rows,
        }
    )
    pq.write_table(table, path, row_group_size=group)
    return path


def as_text(path: Path, kind: str) -> Path:
    """The same rows as CSV or JSON Lines, perhaps compressed."""
    rows = pq.ParquetFile(path).read().to_pylist()
    if kind.startswith("csv"):
        text = "user_id,history,blob\n" + "".join(f'{r["user_id"]},"{r["history"]}",x\n' for r in rows)
    else:
        text = "\n\n".join(json.dumps(r) for r in rows)
    out = path.with_suffix("." + kind)
    out.write_bytes(gzip.compress(text.encode()) if kind.endswith(".gz") else text.encode())
    return out


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz", "jsonl", "ndjson.gz"])
def test_any_row_range_equals_the_slice_of_the_whole(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(input_formats, "BATCH_ROWS", 7)
    path = write(tmp_path / "u.parquet", 50, 9)
    if kind != "parquet":
        path = as_text(path, kind)
    inputs = open_inputs(options(path))
    assert inputs.rows == 50
    reader = RowReader(inputs)
    for start, stop in ((0, 13), (13, 20), (20, 50), (5, 6), (9, 18), (0, 50), (49, 50), (50, 50)):
        rows = reader.read(0, start, stop)
        assert rows.length == stop - start
        assert [int(user) for user in rows.table["user_id"].to_pylist()] == list(range(start, stop))
        cells = rows.lists["history"]
        cells = cells if isinstance(cells, list) else cells.to_pylist()
        assert [json.loads(cell) if isinstance(cell, str) else cell for cell in cells] == [
            [row, row + 1] for row in range(start, stop)
        ]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 9))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranges_in_order_read_every_row_once(tmp_path: Path, cuts: list[int], group: int) -> None:
    path = write(tmp_path / "u.parquet", 40, group)
    reader = RowReader(open_inputs(options(path)))
    edges = sorted({0, 40, *cuts})
    users: list[int] = []
    for start, stop in pairwise(edges):
        users += reader.read(0, start, stop).table["user_id"].to_pylist()
    assert users == list(range(40))


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_of_dictionary_values_may_span_row_groups(tmp_path: Path, kind: Any) -> None:
    """Each row group has a dictionary of its own, which Arrow cannot join inside a list."""
    rows = [[f"i{row % 5}", f"i{row % 3}"] if row % 4 else None for row in range(20)]
    history = pa.array(rows, kind(pa.dictionary(pa.int32(), pa.string())))
    path = tmp_path / "u.parquet"
    pq.write_table(pa.table({"user_id": range(20), "history": history}), path, row_group_size=6)
    inputs = open_inputs(options(path, keep=("history",)))
    got = RowReader(inputs).read(0, 3, 17)
    assert got.lists["history"].to_pylist() == got.table["history"].to_pylist() == rows[3:17]


def test_views_inside_kept_columns_become_types_whose_rows_can_be_picked(tmp_path: Path) -> None:
    text = pa.string_view()
    kept = {
        "list": pa.array([["a"], None, ["b", "c"]], pa.list_(text)),
        "large": pa.array([["a"], None, ["b", "c"]], pa.large_list(text)),
        "pair": pa.array([["a", "b"], None, ["c", "d"]], pa.list_(text, 2)),
        "struct": pa.array([{"x": [b"a"]}, None, {"x": []}], pa.struct([("x", pa.list_(pa.binary_view()))])),
        "map": pa.array([[("a", "b")], None, []], pa.map_(text, text)),
    }
    path = tmp_path / "u.parquet"
    pq.write_table(pa.table({"user_id": range(3), "history": [[1]] * 3, **kept}), path)
    table = RowReader(open_inputs(options(path, keep=tuple(kept)))).read(0, 0, 3).table
    for name, column in kept.items():
        assert table[name].take(pa.array([2, 0])).to_pylist() == [column[2].as_py(), column[0].as_py()]


def test_only_needed_columns_are_read(tmp_path: Path) -> None:
    inputs = open_inputs(options(write(tmp_path / "u.parquet", 3, 3)))
    rows = RowReader(inputs).read(0, 0, 3)
    assert rows.table.column_names == ["user_id"] and list(rows.lists) == ["history"]


def test_directories_globs_and_files_in_a_stable_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.parquet", "a.parquet", "_SUCCESS", ".b.parquet.crc", "_metadata", "sub/c.parquet"):
        write(folder / name, 1, 1)
    names = [str(path.relative_to(folder)) for path in find_files((str(folder),))]
    assert names == ["a.parquet", "b.parquet", "sub/c.parquet"]
    assert [path.name for path in find_files((str(folder / "*"),))] == ["a.parquet", "b.parquet"]
    given = (str(folder / "b.parquet"), str(folder / "a.parquet"))
    assert [path.name for path in find_files(given)] == ["b.parquet", "a.parquet"]


def test_globs_skip_what_lies_in_hidden_directories_unless_they_spell_them_out(tmp_path: Path) -> None:
    """Other tools keep half-written files in ``_temporary``: read as well, their rows would count twice."""
    for name in ("a.parquet", "day/b.parquet", "_temporary/0/a.parquet", "day/_temporary/b.parquet", "_old/c.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, 1, 1)
    expected = {
        "**/*.parquet": ["a.parquet", "day/b.parquet"],
        "*/*.parquet": ["day/b.parquet"],
        "*": ["a.parquet"],
        "d*": ["day/b.parquet"],
        "d*/../*.parquet": ["day/../a.parquet"],
        "_o*/*.parquet": ["_old/c.parquet"],
        "_old/*.parquet": ["_old/c.parquet"],
    }
    for pattern, names in expected.items():
        found = find_files((str(tmp_path / pattern),))
        assert [str(path.relative_to(tmp_path)) for path in found] == names, pattern
    found = find_files((f"{tmp_path}/**/*.parquet",))
    would = {
        name: would_find(f"{tmp_path}/**/*.parquet", tmp_path / name, found) for name in ("n/x.parquet", "_n/x.parquet")
    }
    assert would == {"n/x.parquet": True, "_n/x.parquet": False}
    with pytest.raises(HistoryError, match="no input file"):
        find_files((str(tmp_path / "*" / "0" / "*.parquet"),))


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    path = write(tmp_path / "u[1].parquet", 1, 1)
    assert find_files((str(path),)) == [path]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda root: (root / "nothing.parquet",), "no such file"),
        (lambda root: (root / "*.nothing",), "no input file"),
        (lambda root: (root / "u.parquet", root / "u.*"), "named twice"),
        (lambda root: ((root / "empty").mkdir(), root / "empty")[1:], "no input file"),
    ],
)
def test_bad_paths_are_named(tmp_path: Path, make: Any, match: str) -> None:
    write(tmp_path / "u.parquet", 1, 1)
    with pytest.raises(HistoryError, match=match):
        open_inputs(options(*make(tmp_path)))


def test_unreadable_and_foreign_files_are_named(tmp_path: Path) -> None:
    cut = write(tmp_path / "cut.parquet", 100, 10)
    cut.write_bytes(cut.read_bytes()[:-30])
    with pytest.raises(HistoryError, match=r"cut\.parquet"):
        open_inputs(options(cut))
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(HistoryError, match=r"readme\.md"):
        open_inputs(options(tmp_path / "readme.md"))
    (tmp_path / "bad.jsonl").write_text('{"user_id": 1, "history": []}\n{oops\n')
    with pytest.raises(HistoryError, match="line 2"):
        open_inputs(options(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.csv").write_text("user_id,history\n1,[1]\n2\n")
    with pytest.raises(HistoryError, match=r"bad\.csv"):
        open_inputs(options(tmp_path / "bad.csv"))
    bare = write(tmp_path / "bare", 1, 1)
    assert open_inputs(options(bare)).files[0].format == "parquet"


def test_half_a_surrogate_pair_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    path.write_text('{"user_id": "\\ud83d\\ude00", "history": []}\n')
    assert open_inputs(options(path)).files[0].rows == 1
    path.write_text('{"user_id": 1, "history": []}\n{"user_id": 2, "history": ["\\uD83D"]}\n')
    with pytest.raises(HistoryError, match=r"line 2 is not JSON: .*surrogates not allowed"):
        open_inputs(options(path))


def test_columns_that_differ_between_files(tmp_path: Path) -> None:
    one = tmp_path / "1.parquet"
    pq.write_table(pa.table({"user_id": ["a"], "history": [[1]]}), one)
    two = tmp_path / "2.parquet"
    pq.write_table(pa.table({"user_id": pa.array(["b"], pa.large_string()), "history": [["x"]]}), two)
    inputs = open_inputs(options(one, two))
    assert inputs.schema.field("user_id").type == pa.large_string()
    assert RowReader(inputs).read(0, 0, 1).table.schema == RowReader(inputs).read(1, 0, 1).table.schema
    three = tmp_path / "3.parquet"
    pq.write_table(pa.table({"user_id": [3], "history": [[1]]}), three)
    with pytest.raises(HistoryError, match=r"user_id.*int64"):
        open_inputs(options(one, three))
    pq.write_table(pa.table({"user_id": ["c"], "history": [[1]], "more": [1]}), three)
    with pytest.raises(HistoryError, match="more"):
        open_inputs(options(one, three, keep=("*",)))


def test_missing_and_doubled_columns_are_named_with_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "u.parquet", 1, 1)
    with pytest.raises(HistoryError, match="no column 'past'") as failure:
        open_inputs(options(path, history_col="past"))
    assert "user_id, history, blob" in failure.value.why
    (tmp_path / "u.csv").write_text("user_id,history,user_id\n1,2,3\n")
    with pytest.raises(HistoryError, match="two columns"):
        open_inputs(options(tmp_path / "u.csv"))


def test_json_lines_columns_of_mixed_types_are_refused_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    path.write_text('{"user_id": 1, "history": [1]}\n{"user_id": "a", "history": [1]}\n')
    with pytest.raises(HistoryError, match="mixes types"):
        open_inputs(options(path))


def test_a_file_replaced_by_one_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "u.parquet", 20, 5)
    reader = RowReader(open_inputs(options(path)))
    reader.read(0, 0, 5)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(HistoryError, match="changed during the run"):
        reader.check_unchanged()
    with pytest.raises(HistoryError, match="changed during the run"):
        reader.read(0, 0, 5)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('user_id,history\n1,"[""p""]\n2,"[""r""]"', 2),
        ('user_id,history\n1,"[""p""]"\n2,"[""r""]\n3,x\n', 3),
    ],
)
def test_a_quote_that_swallows_users_is_refused_naming_its_line(tmp_path: Path, text: str, line: int) -> None:
    """Two users used to become one row."""
    path = tmp_path / "users.csv"
    path.write_text(text)
    with pytest.raises(HistoryError, match=rf"users.csv, line {line}: a quoted field") as caught:
        open_inputs(options(path, list_text="json"))
    assert caught.value.exit_code == 2


def test_a_quoted_field_of_very_many_lines_is_warned_of_and_then_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "users.csv"
    for swallowed in (150, 10_050):
        rows = "".join(f"u{user},[1]\n" for user in range(swallowed))
        path.write_text(f'user_id,history\na,[1]\n"b,[2]\n{rows}c",[3]\nd,[4]\n')
        if swallowed < 10_000:
            assert open_inputs(options(path, list_text="json")).rows == 3
    assert "users.csv, line 3: a quoted field of 152 lines" in caplog.text
    with pytest.raises(HistoryError, match=r"users.csv, line 3: a quoted field of 10,052 lines begins there"):
        open_inputs(options(path, list_text="json"))

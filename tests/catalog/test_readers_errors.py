"""Catalogs that cannot be read: the file, the row and the item are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from catalog_support import Columns, items, parquet

from xgr_engine.catalog.readers import FORMATS, ReadOptions, read_catalog
from xgr_engine.errors import CatalogError, UsageError


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"item_id": ["a", "b"], "sid": [[1, 2], [1, None]]}, ["row 2", "item b", "null"]),
        ({"item_id": ["a", "b"], "sid": [[1, 2], [1, -5]]}, ["row 2", "item b", "negative"]),
        ({"item_id": ["a", "b"], "sid": [[1.0], [1.5]]}, ["row 2", "item b", "integer"]),
        ({"item_id": ["a", "b"], "sid": [[1.0], [float("nan")]]}, ["row 2", "item b", "integer"]),
        ({"item_id": ["a", "b"], "sid": [[1], [2**31 - 1]]}, ["row 2", "item b", "2147483646"]),
        ({"item_id": ["a", "b"], "sid": [[1], [0] * 300]}, ["row 2", "item b", "300"]),
        ({"item_id": ["a"], "sid": [[True]]}, ["sid", "bool"]),
        ({"item_id": ["a"], "sid": [5]}, ["sid", "int64"]),
        ({"item_id": ["a", "b"], "sid": ["<a_1>", "junk"]}, ["row 2", "item b", "junk"]),
        ({"item_id": ["a", "b"], "sid": ["<a_1><b_2>", "<b_2><a_1>"]}, ["row 2", "item b", "<b_2><a_1>"]),
        ({"item_id": ["a", "b"], "sid_0": [1, 1], "sid_1": [2, None], "sid_2": [3, 3]}, ["row 2", "item b", "null"]),
        ({"item_id": ["a", "b"], "sid_0": [1, None], "sid_1": [2, 2]}, ["row 2", "item b", "null"]),
        ({"item_id": ["a"], "sid_0": [1], "sid_2": [2]}, ["sid_0, sid_2"]),
        ({"id": ["a"], "sid": [[1]]}, ["item_id", "id, sid", "--item-col"]),
        ({"item_id": ["a"], "codes": [[1]]}, ["'sid'", "item_id, codes", "--sid-col"]),
        ({"item_id": [None, "b"], "sid": [[1], None]}, ["no items", "1 rows have no item id, 1 have no SID"]),
    ],
)
def test_bad_tables_are_refused_naming_row_and_item(tmp_path: Path, columns: Columns, names: list[str]) -> None:
    with pytest.raises(CatalogError) as caught:
        read_catalog([parquet(tmp_path / "c.parquet", columns)], ReadOptions())
    assert all(name in str(caught.value) for name in names), str(caught.value)


def write_text(name: str, text: str) -> Callable[[Path], list[Path]]:
    def write(folder: Path) -> list[Path]:
        (folder / name).write_text(text)
        return [folder / name]

    return write


def two_id_types(folder: Path) -> list[Path]:
    return [
        parquet(folder / "a.parquet", {"item_id": [5], "sid": [[1]]}),
        parquet(folder / "b.parquet", {"item_id": ["5"], "sid": [[2]]}),
    ]


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_text("c.jsonl", '{"item_id": 5, "sid": [1]}\n{"item_id": "5", "sid": [2]}\n'), ["5", '"5"', "one type"]),
        (write_text("c.jsonl", '{"item_id": 5, "sid": ' + "[" * 100_000), ["c.jsonl, line 1: not JSON"]),
        (
            write_text("c.jsonl", '{"item_id": 5, "sid": [1]}\n{"item_id": 6, "sid": "<a_1>"}\n'),
            ["c.jsonl: some values of column sid are of type", "in one way in every row"],
        ),
        (
            write_text("c.jsonl", '{"item_id": 5, "sid": [1]}\n{"item_id": 6, "sid": ["<a_1>"]}\n'),
            ["c.jsonl: some values inside column sid are of type", "in one way in every row"],
        ),
        (
            write_text("tokenizer.json", '{"version": "1.0", "added_tokens": [{"id": 0}], "model": {"type": "BPE"}}'),
            ["tokenizer.json is not an LC-Rec index but a tokenizer", "name the catalog"],
        ),
        (two_id_types, ["a.parquet", "b.parquet", "numbers", "text"]),
        (write_text("c.jsonl", '{"item_id": 5, "sid": [1]}\n{"item_id": \n'), ["c.jsonl, line 2"]),
        (write_text("c.jsonl", "[1]\n"), ["c.jsonl, line 1", "object"]),
        (write_text("c.index.json", '{"0": ["<a_1>"], '), ["c.index.json", "JSON"]),
        (write_text("c.index.json", '{"0": ["<a_1>"], "1": {"x": 1}}'), ["item 1"]),
        (write_text("c.index.json", '{"0": ["<a_1>"], "1": [1]}'), ["item 1"]),
        (write_text("c.index.json", '{"0": [1.5]}'), ["item 0"]),
        (write_text("c.index.json", '{"0": ["<a_1>"], "1": ["a1"]}'), ["item 1", "a1"]),
        (write_text("c.index.json", "{}"), ["c.index.json", "without items"]),
        (write_text("c.index.json", '{"0": null, "1": []}'), ["c.index.json", "null"]),
        (write_text("c.item.json", '{"0": {"title": "x"}}'), ["only item attributes"]),
        (write_text("c.txt", "<a_1>\tx\t0\n<a_1> x 0\n"), ["c.txt, line 2"]),
        (write_text("c.csv", ""), ["c.csv"]),
        (write_text("c.csv", "item_id,sid\n"), ["no items"]),
        (write_text("c.csv", "item_id,sid,sid\n1,2,3\n"), ["sid", "twice"]),
        (write_text("c.csv", "item_id,sid\n1,2\n1,2,3\n"), ["c.csv", "columns"]),
        (write_text("c.parquet", "PAR1 and nothing else"), ["c.parquet"]),
        (write_text("c.parquet", "no parquet"), ["c.parquet"]),
        (write_text("c.bin", "?"), ["c.bin", "--format"]),
        (write_text("c", ""), ["empty"]),
        (lambda folder: [folder / "absent.parquet"], ["absent.parquet", "not found"]),
        (lambda folder: [folder], ["holds no"]),
    ],
)
def test_bad_files_are_refused_naming_them(
    tmp_path: Path, write: Callable[[Path], list[Path]], names: list[str]
) -> None:
    with pytest.raises(CatalogError) as caught:
        read_catalog(write(tmp_path), ReadOptions())
    assert all(name in str(caught.value) for name in names), str(caught.value)


LARGE = 2**31 - 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.csv", f'item_id,sid\n1,"[1, 2]"\n2,"[1, {LARGE}]"\n'),
        ("c.csv", f"item_id,sid\n1,1-2\n2,1-{LARGE}\n"),
        ("c.csv", f"item_id,sid\n1,<a_1>\n2,<a_{LARGE}>\n"),
        ("c.jsonl", f'{{"item_id": 1, "sid": ["<a_1>"]}}\n{{"item_id": 2, "sid": ["<a_{LARGE}>"]}}\n'),
        ("c.jsonl", f'{{"item_id": 1, "sid": [1]}}\n{{"item_id": 2, "sid": [{LARGE}]}}\n'),
    ],
)
def test_a_code_that_is_too_large_is_called_so(tmp_path: Path, name: str, text: str) -> None:
    """It used to be called no list of integer codes, which it is."""
    with pytest.raises(CatalogError, match=f"item 2.* holds a code above {LARGE - 1}") as caught:
        read_catalog(write_text(name, text)(tmp_path), ReadOptions())
    assert "is not a SID" not in str(caught.value)


def test_what_is_no_sid_whatever_its_codes_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="is not a SID"):
        read_catalog(write_text("c.csv", f"item_id,sid\n1,1-2\n2,about {LARGE}\n")(tmp_path), ReadOptions())


def test_numbers_beside_tokens_are_told_that_a_column_has_one_form(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="'1-2' is not a SID") as caught:
        read_catalog(write_text("c.csv", "item_id,sid\n1,1-2\n2,<a_1><b_3>\n")(tmp_path), ReadOptions())
    assert "in one form for the whole column" in str(caught.value.hint)


def test_ids_of_two_types_beyond_the_sampled_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"item_id": number, "sid": [number]}) for number in range(1500)]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join([*lines, '{"item_id": "5", "sid": [2]}']))
    with pytest.raises(CatalogError, match="one type"):
        read_catalog([path], ReadOptions())


def test_formats_do_not_mix_and_must_be_known(tmp_path: Path) -> None:
    index = write_text("c.index.json", '{"0": ["<a_1>"]}')(tmp_path)
    table = [parquet(tmp_path / "c.parquet", {"item_id": [1], "sid": [[1]]})]
    with pytest.raises(CatalogError, match="different formats"):
        read_catalog(index + table, ReadOptions())
    with pytest.raises(UsageError) as caught:
        read_catalog(table, ReadOptions(format="tiger"))
    assert all(name in str(caught.value) for name in FORMATS)


def test_a_missing_rank_or_attribute_column_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "c.parquet", {"item_id": [1], "sid": [[1]], "views": [3]})
    for options in (ReadOptions(rank_column="sales"), ReadOptions(attributes=("sales",))):
        with pytest.raises(CatalogError) as caught:
            read_catalog([path], options)
        assert "'sales'" in str(caught.value) and "views" in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "c.parquet", {"item_id": [1], "sid": [[1]]})

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CatalogError, match=r"c\.parquet cannot be read\nPermission denied"):
        read_catalog([path], ReadOptions())


def test_a_format_can_be_named_when_the_file_does_not_tell(tmp_path: Path) -> None:
    path = tmp_path / "catalog.dat"
    pq.write_table(pa.table({"item_id": [1], "sid": [[1]]}), path)
    assert items(read_catalog([path], ReadOptions())) == {1: (1,)}, "Parquet tells by its first bytes"
    pa_csv.write_csv(pa.table({"item_id": [1], "sid": ["1-2"]}), tmp_path / "c.csv")
    assert items(read_catalog([tmp_path / "c.csv"], ReadOptions(format="table"))) == {1: (1, 2)}

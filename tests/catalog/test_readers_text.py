"""Catalogs in CSV, JSON lines and the files of LC-Rec and MiniOneRec."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from catalog_support import items, parquet

from xgr_engine.catalog.readers import ReadOptions, read_catalog
from xgr_engine.errors import CatalogError


def test_csv_with_columns_text_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('item_id,title,sid_0,sid_1\n007,"a, ""b""\nc",1,2\n8,,3,\n', encoding="utf-8-sig")
    catalog = read_catalog([path], ReadOptions())
    assert items(catalog) == {"007": (1, 2), "8": (3,)}
    assert catalog.attributes["title"].to_pylist() == ['a, "b"\nc', ""]


@pytest.mark.parametrize("text", ["<a_1><b_2>", "1-2", '"1,2"', '"[1, 2]"', "\"['<a_1>', '<b_2>']\""])
def test_csv_with_sid_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(f"item_id,sid\nNA,{text}\nnull,{text}\n")
    assert items(read_catalog([path], ReadOptions())) == {"NA": (1, 2), "null": (1, 2)}


def test_ids_of_csv_are_integers_only_if_that_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    path.write_text("item_id\tsid\n7\t1\n-8\t2\n\t3\n")
    catalog = read_catalog([path], ReadOptions())
    assert catalog.item_id.equals(pa.array([7, -8])) and catalog.null_ids == 1
    path.write_text("item_id\tsid\n7\t1\n1e3\t2\n")
    assert read_catalog([path], ReadOptions()).item_id.to_pylist() == ["7", "1e3"]


def test_json_lines_keep_text_that_looks_like_dates_or_numbers(tmp_path: Path) -> None:
    rows = [
        {"item_id": "2024-01-01", "sid": [1, 2], "since": "2024-01-01", "tags": ["x"]},
        {"item_id": "5", "sid": [3], "since": None},
    ]
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    catalog = read_catalog([path], ReadOptions())
    assert items(catalog) == {"2024-01-01": (1, 2), "5": (3,)}
    assert catalog.attributes.to_pydict() == {"since": ["2024-01-01", None], "tags": [["x"], None]}


def test_json_numbers_beyond_int64_are_never_rounded(tmp_path: Path) -> None:
    """RQ-VAE-Recommender#38: Arrow would read these as floats, and 2**53 + 1 would come back as 2**53."""
    path = tmp_path / "c.jsonl"
    rows = [{"item_id": 2**53 + 1, "sid": [1]}, {"item_id": 2**64 - 1, "sid": [2]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert items(read_catalog([path], ReadOptions())) == {2**53 + 1: (1,), 2**64 - 1: (2,)}
    late = [{"item_id": 2**53 + number, "sid": [number]} for number in range(1500)]
    path.write_text("\n".join(map(json.dumps, [*late, rows[1]])))
    with pytest.raises(CatalogError, match="too large to be read exactly"):
        read_catalog([path], ReadOptions())


def test_a_sid_over_two_lines_is_no_sid(tmp_path: Path) -> None:
    """The next row would become codes of this one: 1-2-2-1-3."""
    path = tmp_path / "c.csv"
    path.write_text('item_id,sid\n1,"1-2\n2,1-3"\n')
    with pytest.raises(CatalogError, match="item 1"):
        read_catalog([path], ReadOptions())
    path.write_text('item_id,sid\n1,"[1\n 2]"\n')
    assert items(read_catalog([path], ReadOptions())) == {1: (1, 2)}


@pytest.mark.parametrize("options", [ReadOptions(item_col="sid"), ReadOptions(sid_col="item_id")])
def test_one_column_is_not_both_item_id_and_sid(tmp_path: Path, options: ReadOptions) -> None:
    with pytest.raises(CatalogError, match="both the item id and the SID"):
        read_catalog([parquet(tmp_path / "c.parquet", {"item_id": [1], "sid": [[1]]})], options)


def test_ndjson_with_token_text(tmp_path: Path) -> None:
    path = tmp_path / "c.ndjson"
    path.write_text('{"item_id": 9007199254740993, "sid": "<a_1><b_2>"}\n\n{"item_id": 6, "sid": null}\n')
    catalog = read_catalog([path], ReadOptions())
    assert items(catalog) == {9007199254740993: (1, 2)} and catalog.null_sids == 1


def test_lcrec_index_with_and_without_its_item_file(tmp_path: Path) -> None:
    index, item = tmp_path / "Toys.index.json", tmp_path / "Toys.item.json"
    index.write_text(json.dumps({"0": ["<a_1>", "<b_2>"], "10": ["<a_1>", "<b_2>", "<d_1>"], "2": []}))
    alone = read_catalog([index], ReadOptions())
    assert items(alone) == {"0": (1, 2), "10": (1, 2, 1)} and alone.null_sids == 1
    assert alone.sid_templates == ("<a_{}>", "<b_{}>", "<d_{}>") and alone.attributes.num_columns == 0
    item.write_text(json.dumps({"10": {"title": "x", "n": 1}, "0": {"title": "y", "n": "two"}, "99": {"title": "z"}}))
    for paths in ([index], [index, item], [item, index]):
        both = read_catalog(paths, ReadOptions())
        assert both.item_id.type == pa.string()
        assert both.attributes.to_pydict() == {"title": ["y", "x"], "n": ["two", "1"]}
        assert both.notes == ("1 items of the item file have no SID in the index",)


def test_lcrec_index_of_bare_codes_and_of_joined_text(tmp_path: Path) -> None:
    path = tmp_path / "codes.json"
    path.write_text(json.dumps({"0": [1, 2], "1": [3, 4]}))
    assert items(read_catalog([path], ReadOptions())) == {"0": (1, 2), "1": (3, 4)}
    path.write_text(json.dumps({"0": "<a_1><b_2>"}))
    assert items(read_catalog([path], ReadOptions())) == {"0": (1, 2)}


def test_lcrec_first_item_without_a_sid_is_left_out_and_counted(tmp_path: Path) -> None:
    """The format is told although the first value is null."""
    path = tmp_path / "c.index.json"
    path.write_text('{"0": null, "1": ["<a_1>"]}')
    catalog = read_catalog([path], ReadOptions())
    assert items(catalog) == {"1": (1,)} and catalog.null_sids == 1


def test_lcrec_repeated_keys_are_both_seen(tmp_path: Path) -> None:
    path = tmp_path / "i.index.json"
    path.write_text('{"0": ["<a_1>"], "0": ["<a_2>"]}')
    assert read_catalog([path], ReadOptions()).item_id.to_pylist() == ["0", "0"]


def test_minionerec_info_splits_from_the_outside(tmp_path: Path) -> None:
    path = tmp_path / "Toys.txt"
    path.write_bytes("<a_1><b_2>\ttitle\twith\u2028tabs\t0\r\n<a_3><b_4>\t\t007\n".encode())
    catalog = read_catalog([path], ReadOptions())
    assert items(catalog) == {"0": (1, 2), "007": (3, 4)}
    assert catalog.attributes["title"].to_pylist() == ["title\twith\u2028tabs", ""]


@pytest.mark.shared_data
def test_published_files_of_one_catalog_agree(shared_data: Path) -> None:
    folder = shared_data / "industrial"
    index = read_catalog([folder / "catalog.index.json"], ReadOptions())
    info = read_catalog([folder / "catalog.info.txt"], ReadOptions())
    tiger = read_catalog([folder / "t5_tiger" / "semantic_ids.json"], ReadOptions())
    assert items(index) == items(info) and len(items(index)) == 3686
    assert {item: sid[:3] for item, sid in items(tiger).items()} == items(index)
    title = dict(zip(index.item_id.to_pylist(), index.attributes["title"].to_pylist(), strict=True))
    assert title == dict(zip(info.item_id.to_pylist(), info.attributes["title"].to_pylist(), strict=True))

"""Catalog files of every format and shape become the same items and codes, or a clear error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from xgr_engine.catalog.readers import FORMATS, Catalog, ReadOptions, read_catalog
from xgr_engine.errors import CatalogError, UsageError

IDS = ["B00X", "007", "9007199254740993", "é"]
SIDS = [[1, 2, 3], [1, 2, 4], [0, 0, 0], [1, 2, 3]]

Columns = dict[str, Any]


def parquet(path: Path, columns: Columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def items(catalog: Catalog) -> dict[Any, tuple[int, ...]]:
    codes = [tuple(code for code in row if code >= 0) for row in catalog.codes.tolist()]
    return dict(zip(catalog.item_id.to_pylist(), codes, strict=True))


EXPECTED = {item: tuple(sid) for item, sid in zip(IDS, SIDS, strict=True)}


# ---- Parquet -----------------------------------------------------------------------------------------------------

LIST_TYPES = {
    "list": pa.list_(pa.int32()),
    "list of int64": pa.list_(pa.int64()),
    "list of uint64": pa.list_(pa.uint64()),
    "list of uint8": pa.list_(pa.uint8()),
    "list of double": pa.list_(pa.float64()),
    "large_list": pa.large_list(pa.int32()),
    "fixed_size_list": pa.list_(pa.int32(), 3),
    "list_view": pa.list_view(pa.int32()),
    "large_list_view": pa.large_list_view(pa.int64()),
}


@pytest.mark.parametrize("kind", LIST_TYPES.values(), ids=LIST_TYPES)
def test_every_list_type_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    """arrow#35697, polars#20163, arrow#40205."""
    from xgr_engine.catalog.readers.sid_columns import SidSource, read_sid_column

    whole = pa.array(SIDS, pa.list_(pa.int64()))
    values = whole.cast(kind) if "view" not in str(kind) else pa.array(SIDS, kind)
    column = pa.chunked_array([values.slice(0, 1), values.slice(1)])
    codes, templates = read_sid_column(column, SidSource("here", pa.array(IDS), "sid"))
    assert codes.tolist() == SIDS and templates is None
    if "view" not in str(kind):  # Parquet files hold no views
        assert items(read_catalog([parquet(tmp_path / "c.parquet", {"item_id": IDS, "sid": values})], ReadOptions()))


ID_ARRAYS = {
    "int8": pa.array([1, 2, -3, 4], pa.int8()),
    "int64 above 2^53": pa.array([2**53 + 1, 2**53 + 2, 2**63 - 1, 0]),
    "uint64": pa.array([2**64 - 1, 1, 2, 3], pa.uint64()),
    "string": pa.array(IDS),
    "large_string": pa.array(IDS, pa.large_string()),
    "UUID text": pa.array([f"123e4567-e89b-12d3-a456-42661417400{n}" for n in range(4)]),
    "double": pa.array([1.0, 2.0, -3.0, 4.0]),
    "decimal": pa.array([Decimal("1.00"), Decimal("20.00"), Decimal("-3.00"), Decimal("12345678901234567890.00")]),
    "binary": pa.array([b"a", b"b", b"c", b"d"]),
}


@pytest.mark.parametrize("ids", ID_ARRAYS.values(), ids=ID_ARRAYS)
def test_item_ids_keep_their_type_and_value(tmp_path: Path, ids: pa.Array) -> None:
    """RQ-VAE-Recommender#38, GRID#11."""
    catalog = read_catalog([parquet(tmp_path / "c.parquet", {"item_id": ids, "sid": SIDS})], ReadOptions())
    assert catalog.item_id.equals(ids)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (pa.array([date(2026, 11, 30)] * 4), r"c.parquet: the item ids in column 'item_id' are of type date32"),
        (pa.array([1, 2, 3, 4], pa.timestamp("us")), "are of type timestamp"),
        (pa.array([1, 2, 3, 4], pa.time64("us")), "are of type time64"),
        (pa.array([1, 2, 3, 4], pa.duration("s")), "are of type duration"),
        (pa.array([True, False, None, None]), "are of type bool"),
        (pa.array([[1], [2], [3], [4]]), "are of type list"),
        (pa.array([1.0, None, 2.5, 3.0]), r"c.parquet, row 2: the item id 2.5 is not a whole number"),
        (pa.array([1.0, float("inf"), 2.0, 3.0], pa.float32()), "row 1: the item id inf"),
        (pa.array([0.5, 1, 2, 3], pa.float16()), "row 0: the item id 0.5"),
        (pa.array([Decimal("1.00"), Decimal("2.00"), None, Decimal("3.50")]), "row 3: the item id 3.50"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_ids_that_no_history_can_name_are_refused(tmp_path: Path, ids: pa.Array, said: str) -> None:
    path = parquet(tmp_path / "c.parquet", {"item_id": ids, "sid": SIDS})
    with pytest.raises(CatalogError, match=said):
        read_catalog([path], ReadOptions())


def test_lists_of_dictionary_values_may_span_row_groups(tmp_path: Path) -> None:
    """Each row group has a dictionary of its own, which Arrow cannot join inside a list."""
    words = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    tokens = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(sid)] for sid in SIDS]
    columns = {
        "item_id": IDS,
        "sid": pa.array(tokens, words),
        "tags": pa.array([["new"], ["old"], None, ["new"]], words),
    }
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=2)
    catalog = read_catalog([path], ReadOptions())
    assert items(catalog) == EXPECTED
    assert catalog.attributes["tags"].to_pylist() == [["new"], ["old"], None, ["new"]]


def test_dictionary_encoded_ids_and_attributes_are_decoded(tmp_path: Path) -> None:
    columns = {"item_id": pa.array(IDS).dictionary_encode(), "sid": SIDS, "brand": pa.array("abab").dictionary_encode()}
    columns["brand"] = pa.array(list("abab")).dictionary_encode()
    catalog = read_catalog([parquet(tmp_path / "c.parquet", columns)], ReadOptions())
    assert catalog.item_id.equals(pa.array(IDS))
    assert catalog.attributes["brand"].type == pa.string() and catalog.attributes["brand"].to_pylist() == list("abab")


@pytest.mark.parametrize(
    ("columns", "templates"),
    [
        ({"sid": SIDS}, None),
        ({"sid": ["1-2-3", "1-2-4", "0-0-0", "1-2-3"]}, None),
        ({f"sid_{level}": [sid[level] for sid in SIDS] for level in range(3)}, None),
        ({f"sid_{level + 1}": [float(sid[level]) for sid in SIDS] for level in range(3)}, None),
        ({f"sid{level}": [sid[level] for sid in SIDS] for level in range(3)}, None),
        ({"sid": [[f"<a_{a}>", f"<b_{b}>", f"<c_{c}>"] for a, b, c in SIDS]}, ("<a_{}>", "<b_{}>", "<c_{}>")),
        ({"sid": [f"<a_{a}><b_{b}><c_{c}>" for a, b, c in SIDS]}, ("<a_{}>", "<b_{}>", "<c_{}>")),
        ({f"sid_{n}": [f"<{n}_{sid[n]}>" for sid in SIDS] for n in range(3)}, ("<0_{}>", "<1_{}>", "<2_{}>")),
    ],
    ids=["list", "text", "columns", "float columns from 1", "columns without _", "token list", "token text", "tokens"],
)
def test_every_way_to_write_a_sid(tmp_path: Path, columns: Columns, templates: tuple[str, ...] | None) -> None:
    catalog = read_catalog([parquet(tmp_path / "c.parquet", {"item_id": IDS, **columns})], ReadOptions())
    assert items(catalog) == EXPECTED and catalog.sid_templates == templates
    assert catalog.attributes.num_columns == 0


def test_sids_of_unequal_length(tmp_path: Path) -> None:
    expected = {"a": (1, 2), "b": (1, 2, 3), "c": (4,)}
    ids = list(expected)
    lists = {"sid": [list(sid) for sid in expected.values()]}
    columns = {"sid_0": [1, 1, 4], "sid_1": [2, 2, None], "sid_2": [None, 3, None]}
    for number, sid in enumerate((lists, columns)):
        path = parquet(tmp_path / f"{number}.parquet", {"item_id": ids, **sid})
        assert items(read_catalog([path], ReadOptions())) == expected


def test_ten_level_columns_are_ordered_by_number(tmp_path: Path) -> None:
    columns = {f"sid_{level}": [level] for level in reversed(range(11))}
    catalog = read_catalog([parquet(tmp_path / "c.parquet", {"item_id": ["a"], **columns})], ReadOptions())
    assert catalog.codes.tolist() == [list(range(11))]


def test_levels_that_no_item_has_are_no_levels_of_the_catalog(tmp_path: Path) -> None:
    columns = {"item_id": ["a", "b"], "sid_0": [1, 1], "sid_1": [2, 3], "sid_2": [None, None]}
    as_columns = read_catalog([parquet(tmp_path / "c.parquet", columns)], ReadOptions())
    assert as_columns.codes.tolist() == [[1, 2], [1, 3]]
    texts = {"item_id": ["a", None], "sid": ["<a_1><b_2>", "<a_1><b_2><c_3>"]}
    left_out = read_catalog([parquet(tmp_path / "t.parquet", texts)], ReadOptions())
    assert left_out.codes.tolist() == [[1, 2]] and left_out.sid_templates == ("<a_{}>", "<b_{}>")


def test_rows_without_id_or_sid_are_left_out_and_counted(tmp_path: Path) -> None:
    columns = {"item_id": ["a", None, "c", "d", None], "sid": [[1], [2], None, [], None], "price": [1, 2, 3, 4, 5]}
    catalog = read_catalog([parquet(tmp_path / "c.parquet", columns)], ReadOptions())
    assert items(catalog) == {"a": (1,)} and catalog.attributes.to_pydict() == {"price": [1]}
    assert (catalog.null_ids, catalog.null_sids) == (2, 2)


def test_named_columns_and_chosen_attributes(tmp_path: Path) -> None:
    columns = {"pid": [5, 6], "codes": [[1], [2]], "title": ["x", "y"], "price": [1.5, None], "vector": [[0.5], [0.1]]}
    path = parquet(tmp_path / "c.parquet", columns)
    read = ReadOptions(item_col="pid", sid_col="codes")
    every = read_catalog([path], read)
    assert items(every) == {5: (1,), 6: (2,)} and every.attributes.column_names == ["title", "price"]
    assert "vector" in every.notes[0], "an embedding is left out by default, and said so"
    some = read_catalog([path], ReadOptions(item_col="pid", sid_col="codes", attributes=("vector",)))
    assert some.attributes.column_names == ["vector"] and some.notes == ()
    none = read_catalog([path], ReadOptions(item_col="pid", sid_col="codes", attributes=()))
    assert none.attributes.num_columns == 0
    ranked = ReadOptions(item_col="pid", sid_col="codes", attributes=(), rank_column="price")
    assert read_catalog([path], ranked).attributes.column_names == ["price"]


def test_an_attribute_cannot_take_a_name_of_the_vocabulary(tmp_path: Path) -> None:
    path = parquet(tmp_path / "c.parquet", {"pid": [5], "codes": [[1]], "leaf": [3], "item_id": ["x"]})
    catalog = read_catalog([path], ReadOptions(item_col="pid", sid_col="codes"))
    assert catalog.attributes.num_columns == 0 and "leaf, item_id" in catalog.notes[0]


def test_several_files_directories_and_patterns_are_one_catalog(tmp_path: Path) -> None:
    folder = tmp_path / "catalog"
    folder.mkdir()
    parquet(folder / "a.parquet", {"item_id": pa.array([1, 2], pa.int32()), "sid": [[1, 2], [3, 4]], "x": ["p", "q"]})
    parquet(folder / "b.parquet", {"sid": [[5, 6, 7]], "item_id": pa.array([3], pa.int64()), "y": [1]})
    for ignored in ("_SUCCESS", ".hidden.parquet", "readme.txt"):
        (folder / ignored).write_text("no catalog")
    expected = {1: (1, 2), 2: (3, 4), 3: (5, 6, 7)}
    for given in ([folder], [folder / "*.parquet"], [folder / "a.parquet", folder / "b.parquet"]):
        catalog = read_catalog(given, ReadOptions())
        assert items(catalog) == expected and catalog.item_id.type == pa.int64()
        assert catalog.attributes.to_pydict() == {"x": ["p", "q", None], "y": [None, None, 1]}


def test_a_path_that_looks_partitioned_adds_no_column(tmp_path: Path) -> None:
    folder = tmp_path / "date=2026-01-01"
    folder.mkdir()
    catalog = read_catalog([parquet(folder / "c.parquet", {"item_id": [1], "sid": [[1]]})], ReadOptions())
    assert catalog.attributes.num_columns == 0


# ---- CSV and JSON lines ------------------------------------------------------------------------------------------


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


# ---- LC-Rec and MiniOneRec ---------------------------------------------------------------------------------------


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


# ---- errors ------------------------------------------------------------------------------------------------------


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

"""Catalogs in Parquet: every type of ids and SIDs that is read, columns, and several files."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalog_support import EXPECTED, IDS, SIDS, Columns, items, parquet

from xgr_engine.catalog.readers import ReadOptions, read_catalog
from xgr_engine.errors import CatalogError

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

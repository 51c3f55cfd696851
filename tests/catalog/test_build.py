"""build-vocab: what the directory holds, the order of items on a SID, duplicates, and the report."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalog_support import BASIC, build, content, rows_in_order
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.catalog.build import BuildOptions, build_vocabulary, parse_attributes, parse_codebook
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.errors import CatalogError, UsageError


def test_the_directory_holds_items_in_leaf_order(tmp_path: Path) -> None:
    result = build(tmp_path, BASIC)
    assert result.action == "built" and result.changes is None
    table = pq.read_table(tmp_path / "vocab" / "items.parquet")
    assert table.to_pydict() == {
        "item_id": [3, 1, 2, 4],
        "sid": [[0, 9], [1], [1, 2], [1, 2]],
        "leaf": [0, 1, 2, 2],
        "title": ["c", "a", None, "d"],
    }
    assert table.schema.field("item_id").type == pa.int64()
    assert table.schema.field("sid").type == pa.list_(pa.int32()) and table.schema.field("leaf").type == pa.int32()
    vocabulary = load_vocabulary(tmp_path / "vocab")
    assert vocabulary.trie.item_start.tolist() == [0, 1, 2, 4]
    assert sorted(content(tmp_path / "vocab")) == ["items.parquet", "trie.safetensors", "vocab.json"]
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"


ids = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12, unique=True),
    st.lists(st.one_of(st.text(max_size=4), st.integers(0, 99).map(str)), min_size=1, max_size=12, unique=True),
)


@given(ids, st.data())
@settings(max_examples=40, deadline=None)
def test_row_order_changes_no_byte(
    tmp_path_factory: pytest.TempPathFactory, ids: list[Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shuffled")
    sids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    table = pa.table(
        {
            "item_id": ids,
            "sid": pa.array([data.draw(sids) for _ in ids], pa.list_(pa.int32())),
            "price": pa.array([data.draw(st.one_of(st.none(), st.floats(0, 9))) for _ in ids], pa.float64()),
            "tags": pa.array(
                [data.draw(st.one_of(st.none(), st.lists(st.text(max_size=2)))) for _ in ids], pa.list_(pa.string())
            ),
        }
    )
    build(folder, table, "one", rank="price")
    shuffled = table.take(pa.array(data.draw(st.permutations(range(len(ids)))), pa.int64()))
    build(folder, shuffled, "two", rank="price")
    assert content(folder / "one") == content(folder / "two")


def test_chunks_encodings_and_offset_widths_change_no_hash(tmp_path: Path) -> None:
    plain = pa.table({"item_id": ["a", "b", "c"], "sid": [[1], [2], [3]], "brand": ["x", "y", "x"]})
    other = pa.table(
        {
            "item_id": plain["item_id"].cast(pa.large_string()),
            "sid": plain["sid"].cast(pa.large_list(pa.int64())),
            "brand": plain["brand"].dictionary_encode(),
        }
    )
    one = build(tmp_path, plain, "one").description["content_hash"]
    assert (
        build(tmp_path, pa.concat_tables([other.slice(0, 1), other.slice(1)]), "two").description["content_hash"] == one
    )


@pytest.mark.parametrize(
    "change",
    [
        {"sid": [[1, 2], [0, 9], [1, 2], [2]]},
        {"sid": [[1, 2], [0, 9], [1, 2], [1, 0]]},
        {"item_id": [4, 3, 2, 5]},
        {"item_id": ["4", "3", "2", "1"]},
        {"title": ["d", "c", "", "a"]},
        {"title": ["d", "c", None, "b"]},
        {"title": None},
        {"brand": ["d", "c", None, "a"]},
        {"sid": ["<a_1><b_2>", "<a_0><b_9>", "<a_1><b_2>", "<a_1>"]},
    ],
    ids=str,
)
def test_any_change_of_meaning_changes_the_hash(tmp_path: Path, change: dict[str, Any]) -> None:
    """RQ-VAE-Recommender#58: one SID edited after the vocabulary was built."""
    changed = {name: value for name, value in {**BASIC, **change}.items() if value is not None}
    one, two = build(tmp_path, BASIC, "one"), build(tmp_path, changed, "two")
    assert one.description["content_hash"] != two.description["content_hash"]


@pytest.mark.parametrize(
    ("given_ids", "expected"),
    [
        ([10, 9, -1], [-1, 9, 10]),
        (["10", "9", "100"], ["9", "10", "100"]),
        (["10", "9", "010", "B", "é", "a", "-1"], ["9", "10", "-1", "010", "B", "a", "é"]),
        ([2.0, -1.0, 10.0], [-1.0, 2.0, 10.0]),
        ([2**63, 1, 2**64 - 1], [1, 2**63, 2**64 - 1]),
    ],
)
def test_items_of_a_sid_are_ordered_by_id(tmp_path: Path, given_ids: list[Any], expected: list[Any]) -> None:
    """MiniOneRec#8, LETTER#21: row order never matters."""
    kind = pa.uint64() if max(map(str, given_ids), key=len).isdigit() and 2**63 in given_ids else None
    for number, order in enumerate(itertools.islice(itertools.permutations(given_ids), 6)):
        table = pa.table({"item_id": pa.array(order, kind), "sid": [[1, 2, 3]] * len(order)})
        build(tmp_path, table, f"v{number}")
        assert [item for item, _ in rows_in_order(tmp_path / f"v{number}")] == expected


@pytest.mark.parametrize(
    ("rank", "descending", "expected"),
    [
        (pa.array([3, 1, None, 1]), False, [2, 4, 1, 3]),
        (pa.array([3, 1, None, 1]), True, [1, 2, 4, 3]),
        (pa.array([0.5, float("nan"), None, -1.0]), False, [4, 1, 2, 3]),
        (pa.array([0.5, float("nan"), None, -1.0]), True, [1, 4, 2, 3]),
        (pa.array(["b", "a", None, "c"]), False, [2, 1, 4, 3]),
    ],
)
def test_rank_column_orders_items_of_a_sid_nulls_last(
    tmp_path: Path, rank: pa.Array, descending: bool, expected: list[int]
) -> None:
    table = pa.table({"item_id": [1, 2, 3, 4], "sid": [[7, 7]] * 4, "rank": rank})
    build(tmp_path, table, rank="rank", rank_desc=descending)
    assert [item for item, _ in rows_in_order(tmp_path / "vocab")] == expected


def test_rank_desc_without_a_rank_column_is_refused(tmp_path: Path) -> None:
    """An option that cannot act is an error, not ignored."""
    with pytest.raises(UsageError, match="--rank-column"):
        build(tmp_path, {"item_id": [1, 2], "sid": [[1], [1]]}, rank_desc=True)


def test_half_float_ids_are_ordered_by_value(tmp_path: Path) -> None:
    build(tmp_path, pa.table({"item_id": pa.array(np.array([10, 9], np.float16)), "sid": [[1], [1]]}))
    assert [item for item, _ in rows_in_order(tmp_path / "vocab")] == [9, 10]


@pytest.mark.parametrize("text", ["8192x99999999999", "99999999999,2", "0x3"])
def test_a_codebook_beyond_any_code_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="codebook"):
        BuildOptions(codebook=parse_codebook(text))


def test_rank_of_a_type_without_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="tags"):
        build(tmp_path, {"item_id": [1, 2], "sid": [[1], [1]], "tags": [["a"], ["b"]]}, rank="tags")


def test_a_group_of_65_items_is_kept_and_counted_or_refused(tmp_path: Path) -> None:
    """Up to 65 items on one SID are real (LETTER's Yelp catalog)."""
    table = {"item_id": [*range(65), 100, 101], "sid": [[1, 2, 3]] * 65 + [[1, 2, 4], [0, 0, 0]]}
    description = build(tmp_path, table).description
    assert description["collisions"] == {"groups": 1, "items": 65, "largest": 65}
    assert (description["num_items"], description["num_sids"]) == (67, 3)
    with pytest.raises(CatalogError, match=r"1 SIDs are shared.*1-2-3 by 0, 1, 2, 3, 4, \.\.\."):
        build(tmp_path, table, "refused", collisions="error")
    assert not (tmp_path / "refused").exists()
    build(tmp_path, {"item_id": [1], "sid": [[1]]}, "fine", collisions="error")


def test_a_row_that_repeats_an_item_is_left_out_with_a_warning(tmp_path: Path) -> None:
    table = {
        "item_id": ["a", "b", "a", "a"],
        "sid": [[1], [2], [1], [1]],
        "x": [float("nan"), 1.0] + [float("nan")] * 2,
    }
    description = build(tmp_path, table).description
    assert description["num_items"] == 2 and description["left_out"]["duplicate_rows"] == 2
    assert any("2 rows that repeat an item" in warning for warning in description["warnings"])


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({"item_id": ["x", "a", "a"], "sid": [[1], [1, 2], [1, 3]]}, ["item a", "1-2", "1-3"]),
        ({"item_id": ["x", "a", "a"], "sid": ["<a_1>", "<a_1><b_2>", "<a_1>"]}, ["item a", "<a_1><b_2>", "<a_1>"]),
        ({"item_id": ["a", "b", "a"], "sid": [[1], [2], [1]], "price": [1, 1, 2]}, ["item a", "price", "1", "2"]),
        ({"item_id": ["a", "b", "a"], "sid": [[1], [2], [1]], "price": [1, 1, None]}, ["item a", "price", "None"]),
        ({"item_id": [0.0, 1.0, -0.0], "sid": [[1], [2], [3]]}, ["two SIDs"]),
    ],
)
def test_rows_that_contradict_each_other_are_refused(tmp_path: Path, table: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(CatalogError) as caught:
        build(tmp_path, table)
    assert all(name in str(caught.value) for name in names), str(caught.value)
    assert not (tmp_path / "vocab").exists()


def test_the_report_counts_what_is_there(tmp_path: Path) -> None:
    sids = [[0, 0, 5], [0, 1], [2, 0, 0], [2, 0, 1], [2, 3, 0], [2, 3, 0]]
    description = build(tmp_path, {"item_id": list(range(6)), "sid": sids}).description
    assert (description["num_items"], description["num_sids"], description["levels"]) == (6, 5, 3)
    assert description["sid_lengths"] == {"2": 1, "3": 4}
    assert description["codebook"] == [3, 4, 6] and not description["codebook_declared"]
    first, second, third = description["level_reports"]
    assert (first["codes_used"], first["nodes"], first["branching_mean"], first["branching_max"]) == (2, 2, 2.0, 2)
    assert (second["codes_used"], second["nodes"], second["branching_mean"], second["branching_max"]) == (3, 4, 2.0, 2)
    # Prefix (0, 1) is a whole SID and has no children.
    assert (third["codes_used"], third["nodes"], third["branching_mean"], third["branching_max"]) == (3, 4, 1.3333, 2)
    assert third["largest_code"] == 5 and description["collisions"]["groups"] == 1


def test_a_collapsed_level_is_warned_about(tmp_path: Path) -> None:
    """RQ-VAE-Recommender#47: a catalog that uses 3 of 256 codes."""
    sids = [[a, b] for a in (0, 7, 255) for b in range(200)]
    table = {"item_id": list(range(len(sids))), "sid": sids}
    warnings = build(tmp_path, table).description["warnings"]
    assert any("level 1 uses 3 of 256 codes" in warning for warning in warnings)
    assert not any("level 2" in warning for warning in warnings)
    declared = build(tmp_path, table, "declared", codebook=(256, 4096)).description
    assert declared["codebook"] == [256, 4096] and declared["codebook_declared"]
    assert any("level 2 uses 200 of 4096 codes" in warning for warning in declared["warnings"])


def test_codes_outside_the_declared_codebook_are_warned_about(tmp_path: Path) -> None:
    warnings = build(tmp_path, {"item_id": [1, 2], "sid": [[1, 3], [1, 5]]}, codebook=(2, 4)).description["warnings"]
    assert any("level 2: 1 prefixes hold a code outside the codebook of 4 (largest 5)" in text for text in warnings)
    with pytest.raises(UsageError, match="2 levels"):
        build(tmp_path, {"item_id": [1], "sid": [[1, 3, 4]]}, codebook=(2, 4))


def test_a_last_level_of_item_numbers_is_warned_about(tmp_path: Path) -> None:
    table = {"item_id": list(range(20)), "sid": [[number % 4, number] for number in range(20)]}
    assert any("item numbers" in text for text in build(tmp_path, table).description["warnings"])
    useless = {"item_id": list(range(20)), "sid": [[number // 2, 0] for number in range(20)]}
    warnings = build(tmp_path, useless, "useless").description["warnings"]
    assert any("level 2 decides nothing" in text for text in warnings)


def test_rows_left_out_are_counted_in_the_report(tmp_path: Path) -> None:
    table = {"item_id": ["a", None, "c"], "sid": [[1, 1], [2], None]}
    description = build(tmp_path, table).description
    assert description["left_out"] == {"null_ids": 1, "null_sids": 1, "duplicate_rows": 0}
    assert len([text for text in description["warnings"] if "left out" in text]) == 2


def test_huge_codes_are_counted_without_huge_memory(tmp_path: Path) -> None:
    description = build(tmp_path, {"item_id": [1, 2], "sid": [[2**31 - 2], [5]]}).description
    assert description["level_reports"][0]["codes_used"] == 2


def test_options_as_text() -> None:
    assert parse_codebook("256,256, 512") == (256, 256, 512) and parse_codebook("8192x3") == (8192,) * 3
    for text in ("", "a", "256,", "x3"):
        with pytest.raises(UsageError, match="--codebook"):
            parse_codebook(text)
    with pytest.raises(UsageError, match="at least 1"):
        BuildOptions(codebook=(256, 0))
    with pytest.raises(UsageError, match="one of keep, error"):
        BuildOptions(collisions="drop")  # type: ignore[arg-type]
    assert parse_attributes("all") is None and parse_attributes("none") == ()
    assert parse_attributes("a, b,a") == ("a", "b")


@pytest.mark.shared_data
def test_the_published_catalog(tmp_path: Path, shared_data: Path) -> None:
    """Counts that were taken from the published files by hand."""
    out = tmp_path / "vocab"
    index = shared_data / "industrial" / "catalog.index.json"
    description = build_vocabulary([index], out, ReadOptions(), BuildOptions()).description
    assert (description["num_items"], description["num_sids"]) == (3686, 3670)
    assert description["collisions"] == {"groups": 15, "items": 31, "largest": 3}
    assert [level["codes_used"] for level in description["level_reports"]] == [48, 256, 256]
    assert description["sid_templates"] == ["<a_{}>", "<b_{}>", "<c_{}>"] and description["warnings"] == []
    vocabulary = load_vocabulary(out)
    raw = json.loads(index.read_bytes())
    rows = vocabulary.rows_of(pa.array(list(raw)))
    codes = vocabulary.sids()[0][vocabulary.leaf_of_row[rows]]
    assert codes.tolist() == [[int(token.strip("<>").split("_")[1]) for token in sid] for sid in raw.values()]
    assert np.array_equal(np.sort(rows), np.arange(3686))

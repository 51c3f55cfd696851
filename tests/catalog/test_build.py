"""From a catalog to the vocabulary directory: order, hash, report, update, atomic replacement."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.catalog import build as build_module
from xgr_engine.catalog.build import BuildOptions, BuildResult, build_vocabulary, parse_attributes, parse_codebook
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.errors import CatalogError, OutputExistsError, UsageError

Sid = tuple[int, ...]


def build(
    folder: Path, table: pa.Table | dict[str, Any], out: str = "vocab", *, rank: str | None = None, **options: Any
) -> BuildResult:
    source = folder / f"{out}.source.parquet"
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), source)
    return build_vocabulary([source], folder / out, ReadOptions(rank_column=rank), BuildOptions(**options))


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rows_in_order(directory: Path) -> list[tuple[Any, list[int]]]:
    table = pq.read_table(directory / "items.parquet")
    return list(zip(table["item_id"].to_pylist(), table["sid"].to_pylist(), strict=True))


BASIC = {"item_id": [4, 3, 2, 1], "sid": [[1, 2], [0, 9], [1, 2], [1]], "title": ["d", "c", None, "a"]}


# ---- content -----------------------------------------------------------------------------------------------------


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


# ---- order on a SID ----------------------------------------------------------------------------------------------


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


# ---- duplicates --------------------------------------------------------------------------------------------------


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


# ---- report ------------------------------------------------------------------------------------------------------


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


# ---- an output that exists ---------------------------------------------------------------------------------------


def test_the_same_catalog_again_is_nothing_to_do(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "vocab").iterdir()}
    for options in ({}, {"update": True}):
        assert build(tmp_path, BASIC, **options).action == "unchanged"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "vocab").iterdir()} == before


def test_another_catalog_needs_update(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    before = content(tmp_path / "vocab")
    changed = {**BASIC, "sid": [[1, 2], [0, 9], [1, 2], [5]]}
    with pytest.raises(OutputExistsError, match="content_hash") as caught:
        build(tmp_path, changed)
    assert "--update" in str(caught.value) and caught.value.exit_code == 2
    assert content(tmp_path / "vocab") == before


def test_update_reports_changes_and_equals_a_fresh_build(tmp_path: Path) -> None:
    """xLLM vocabulary: 3 items added, 2 removed, 1 moved."""
    old_sids = {item: [item % 3, item] for item in range(10)}
    new_sids = {item: sid for item, sid in old_sids.items() if item > 1} | {20: [0, 5, 1], 21: [2, 1], 22: [0, 0]}
    new_sids[5] = [2, 5, 0]
    old = {"item_id": list(old_sids), "sid": list(old_sids.values())}
    new = {"item_id": list(new_sids), "sid": list(new_sids.values())}
    build(tmp_path, old)
    result = build(tmp_path, new, update=True)
    assert result.action == "updated" and result.changes is not None
    changes = result.changes
    assert (changes.added, changes.removed, changes.moved, changes.kept) == (3, 2, 1, 7)
    assert changes.examples == {"added": [22, 20, 21], "removed": [0, 1], "moved": [5]}
    build(tmp_path, new, "fresh")
    assert content(tmp_path / "vocab") == content(tmp_path / "fresh")
    assert not list(tmp_path.glob(".*")), "the old directory is gone"


def test_update_matches_ids_of_another_type_by_their_text(tmp_path: Path) -> None:
    build(tmp_path, {"item_id": [1, 2], "sid": [[1], [2]]})
    changes = build(tmp_path, {"item_id": ["1", "3"], "sid": [[1, 0], [2, 0]]}, update=True).changes
    assert changes is not None and (changes.added, changes.removed, changes.moved, changes.kept) == (1, 1, 1, 0)


def test_update_without_a_vocabulary_builds_one(tmp_path: Path) -> None:
    (tmp_path / "vocab").mkdir()
    assert build(tmp_path, BASIC, update=True).action == "built"


def test_what_is_no_vocabulary_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for out in ("vocab", "file"):
        with pytest.raises(OutputExistsError, match="is not a vocabulary"):
            build(tmp_path, BASIC, out, update=True)
    assert content(tmp_path / "vocab") == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("name", ["vocab.json", "trie.safetensors", "items.parquet"])
@pytest.mark.parametrize("items", [[1, 2], [1, 3]], ids=["same catalog", "another catalog"])
def test_update_builds_a_damaged_vocabulary_anew(tmp_path: Path, name: str, items: list[int]) -> None:
    build(tmp_path, {"item_id": [1, 2], "sid": [[1], [2]]})
    damaged = tmp_path / "vocab" / name
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(CatalogError, match="--update builds it anew"):
        build(tmp_path, {"item_id": items, "sid": [[1], [2]]})
    build(tmp_path, {"item_id": items, "sid": [[1], [2]]}, update=True)
    assert [item for item, _ in rows_in_order(tmp_path / "vocab")] == items


def test_update_never_deletes_files_of_others(tmp_path: Path) -> None:
    build(tmp_path, {"item_id": [1], "sid": [[1]]})
    note = tmp_path / "vocab" / "note.txt"
    note.write_text("mine")
    with pytest.raises(OutputExistsError, match=r"note\.txt"):
        build(tmp_path, {"item_id": [2], "sid": [[1]]}, update=True)
    assert note.read_text() == "mine" and [item for item, _ in rows_in_order(tmp_path / "vocab")] == [1]


def test_a_damaged_vocabulary_is_named_and_not_called_unchanged(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    items = tmp_path / "vocab" / "items.parquet"
    broken = bytearray(items.read_bytes())
    broken[10] ^= 1
    items.write_bytes(broken)
    with pytest.raises(CatalogError, match=r"items\.parquet is damaged"):
        build(tmp_path, BASIC)


def test_a_link_keeps_pointing_at_the_replaced_directory(tmp_path: Path) -> None:
    build(tmp_path, BASIC, "vocab-1")
    (tmp_path / "vocab").symlink_to("vocab-1")
    build(tmp_path, {"item_id": [1], "sid": [[1]]}, "vocab", update=True)
    assert (tmp_path / "vocab").is_symlink() and load_vocabulary(tmp_path / "vocab-1").num_items == 1


def test_a_failure_while_writing_leaves_the_old_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, BASIC)
    before = content(tmp_path / "vocab")

    def fail(*args: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "save_trie", fail)
    with pytest.raises(OSError, match="No space"):
        build(tmp_path, {"item_id": [1], "sid": [[1]]}, update=True)
    assert content(tmp_path / "vocab") == before and not list(tmp_path.glob(".*"))


def test_an_open_vocabulary_survives_its_replacement(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    vocabulary = load_vocabulary(tmp_path / "vocab")
    build(tmp_path, {"item_id": [1], "sid": [[1]]}, update=True)
    assert vocabulary.trie.leaf_codes().tolist() == [[0, 9], [1, -1], [1, 2]]


_KILLED = """
import os, signal, sys
from xgr_engine.catalog import build
from xgr_engine.catalog.readers import ReadOptions
save = build.save_trie
def die(*args):
    save(*args)
    os.kill(os.getpid(), signal.SIGKILL)
build.save_trie = die
build.build_vocabulary([sys.argv[1]], sys.argv[2], ReadOptions(), build.BuildOptions(update=True))
"""


def test_a_killed_build_leaves_the_old_vocabulary_and_the_next_build_cleans_up(tmp_path: Path) -> None:
    """Kill -9 at any moment, run again: same content as an uninterrupted run."""
    build(tmp_path, BASIC)
    before = content(tmp_path / "vocab")
    new = {"item_id": [1, 2], "sid": [[1], [2]]}
    source = tmp_path / "new.parquet"
    pq.write_table(pa.table(new), source)
    done = subprocess.run([sys.executable, "-c", _KILLED, source, tmp_path / "vocab"], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert content(tmp_path / "vocab") == before and len(list(tmp_path.glob(".vocab.build-*"))) == 1
    build(tmp_path, new, update=True)
    build(tmp_path, new, "fresh")
    assert content(tmp_path / "vocab") == content(tmp_path / "fresh") and not list(tmp_path.glob(".*"))


def test_a_build_that_is_running_is_not_cleaned_away(tmp_path: Path) -> None:
    from xgr_engine.catalog.swap import replacement

    with replacement(tmp_path / "vocab") as one:
        with replacement(tmp_path / "vocab") as two:
            (two / "name").write_text("two")
        assert one.is_dir()
        (one / "name").write_text("one")
    assert (tmp_path / "vocab" / "name").read_text() == "one" and not list(tmp_path.glob(".*"))


def test_replacement_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xgr_engine.catalog import swap

    monkeypatch.setattr(swap, "_exchange", lambda one, other: False)
    build(tmp_path, BASIC)
    build(tmp_path, {"item_id": [1], "sid": [[1]]}, update=True)
    assert load_vocabulary(tmp_path / "vocab").num_items == 1 and not list(tmp_path.glob(".*"))


def test_the_directory_has_ordinary_permissions(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "vocab").stat().st_mode & 0o777 == 0o777 & ~mask


# ---- options -----------------------------------------------------------------------------------------------------


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

"""The rows that a job writes: order, columns, types and layouts, whatever the input looks like."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import Place, make_vocabulary

from xgr_engine.errors import HistoryError, UsageError
from xgr_engine.metrics.evaluate import EvalOptions, evaluate
from xgr_engine.options import SearchOptions


def test_one_row_a_user_in_input_order_with_the_fixed_schema(place: Place) -> None:
    users = place.users([[100, 101], [], [139], None, [105]], country=["a", "b", "c", "d", "e"])
    report, _ = place.run(place.options(users, keep=("country",), max_rejects="2", item_cols=("title",)))
    assert report.failure is None and (place.out / "_SUCCESS").exists()
    table = place.written()
    item = pa.struct(
        [("item_id", pa.int64()), ("score", pa.float32()), ("sid", pa.list_(pa.int32())), ("title", pa.string())]
    )
    assert table.column_names == ["user_id", "country", "items", "short"]
    assert table.schema.field("items").type == pa.list_(item)
    assert table["user_id"].to_pylist() == ["u0", "u1", "u2", "u3", "u4"]
    assert table["country"].to_pylist() == ["a", "b", "c", "d", "e"]
    lists = table["items"].to_pylist()
    assert [None if cell is None else len(cell) for cell in lists] == [5, None, 5, None, 5]
    assert table["short"].to_pylist() == [False, None, False, None, False]
    assert lists[0][0]["title"] == f"title {lists[0][0]['item_id'] - 100}"
    assert [(r["row"], r["user"], r["reason"]) for r in place.rejects()] == [
        (1, "u1", "empty-history"),
        (3, "u3", "empty-history"),
    ]
    metadata = pq.read_metadata(place.out / "part-00000-of-00001.parquet")
    keys = metadata.metadata or {}
    assert {b"xgr.run_id", b"xgr.model", b"xgr.vocab", b"xgr.schema_version"} <= keys.keys()
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    audit = report.record["audit"]
    assert audit["line"] == "users=3, items=15, invalid=0, duplicate=0, seen=off, short=0"


def test_ten_users_in_three_shards_come_back_in_order(place: Place) -> None:
    """cases.md: LC-Rec drop_last: 10 users, 3 shards: 10 rows out, order kept."""
    users = place.users([[100 + i] * (i % 3 + 1) for i in range(10)])
    whole, _ = place.run(place.options(users, out=str(place.root / "whole")))
    report, _ = place.run(place.options(users, shard_rows=4))
    assert [p.name for p in sorted(place.out.glob("part*"))] == [f"part-0000{i}-of-00003.parquet" for i in range(3)]
    assert place.written()["user_id"].to_pylist() == [f"u{i}" for i in range(10)]
    one = pq.ParquetFile(place.root / "whole" / "part-00000-of-00001.parquet").read().replace_schema_metadata(None)
    assert place.written().to_pylist() == one.to_pylist()
    assert whole.record["counts"] | {"batches": 0} == report.record["counts"] | {"batches": 0}


@pytest.mark.parametrize(
    "ids",
    [
        [f"B00X{i}" for i in range(40)],
        [2**53 + i for i in range(1, 41)],
        [f"{i:08x}-0000-4000-8000-000000000000" for i in range(40)],
        [f"0{i}" for i in range(40)],
    ],
    ids=["asin", "above-2^53", "uuid-text", "leading-zeros"],
)
def test_item_ids_come_back_in_their_own_type(place: Place, tmp_path: Path, ids: list[Any]) -> None:
    """cases.md: ids "B00X", int64 above 2^53, UUID strings, ids with leading zeros come back unchanged."""
    vocab = make_vocabulary(tmp_path / "vocab2", ids)
    users = place.users(pa.array([[ids[0], ids[5]]]))
    place.run(place.options(users, vocab=str(vocab), exclude_seen=True, search=SearchOptions(beam=40, top_k=40)))
    found = [item["item_id"] for item in place.written()["items"].to_pylist()[0]]
    assert set(found) == set(ids) - {ids[0], ids[5]}
    kind = place.written().schema.field("items").type.value_type.field("item_id").type
    assert kind == (pa.int64() if isinstance(ids[0], int) else pa.string())


@pytest.mark.parametrize(
    "users",
    [pa.array([5, 6]), pa.array([b"\x00", b"\xff"]), pa.array([1.5, float("nan")]), pa.array(["a", None]),
     pa.array([{"id": 1}, {"id": 2}]), pa.array(["x", "y"]).dictionary_encode()],
    ids=["int", "binary", "nan", "null", "struct", "dictionary"],
)  # fmt: skip
def test_user_columns_of_any_type_are_kept_unchanged(place: Place, users: pa.Array) -> None:
    path = place.users([[100], [101]], user_id=users)
    report, _ = place.run(place.options(path))
    column = place.written()["user_id"]
    assert column.type == users.type and str(column.to_pylist()) == str(users.to_pylist())
    assert report.failure is None


@pytest.mark.parametrize(
    ("view", "plain"), [(pa.string_view(), pa.large_string()), (pa.binary_view(), pa.large_binary())]
)
def test_view_columns_become_the_plain_type_of_the_same_values(place: Place, view: Any, plain: Any) -> None:
    users = pa.array([b"a", b"b"], pa.binary()).cast(view)
    place.run(place.options(place.users([[100], []], user_id=users), max_rejects="1"))
    assert place.written()["user_id"].type == plain
    assert [str(user) for user in place.written()["user_id"].to_pylist()] == [str(user) for user in users.to_pylist()]
    assert place.rejects()[0]["user"] == users[1].as_py()


def test_keep_all_keeps_every_column_and_refuses_names_of_the_output(place: Place) -> None:
    path = place.users([[100]], other=[1], day=["mon"])
    place.run(place.options(path, keep=("*",)))
    assert place.written().column_names == ["user_id", "history", "other", "day", "items", "short"]
    bad = place.users([[100]], name="bad.parquet", items=[1])
    with pytest.raises(UsageError, match="'items' cannot be copied"):
        place.run(place.options(bad, keep=("*",), out=str(place.root / "other")))


def test_long_layout_has_one_row_a_recommendation_and_none_for_rejects(place: Place) -> None:
    users = place.users([[100], [], [101, 102]])
    report, _ = place.run(place.options(users, layout="long", max_rejects="1", shard_rows=2))
    table = place.written()
    assert table.column_names == ["row", "user_id", "rank", "item_id", "score", "sid", "short"]
    assert table["row"].to_pylist() == [0] * 5 + [2] * 5
    assert table["rank"].to_pylist() == [1, 2, 3, 4, 5] * 2
    assert report.record["audit"]["line"] == "users=2, items=10, invalid=0, duplicate=0, seen=off, short=0"


def test_csv_json_lines_and_parquet_give_the_same_recommendations(place: Place) -> None:
    histories = [[100, 101], [102], [103, 104, 105]]
    parquet = place.users(histories)
    csv = place.root / "u.csv"
    csv.write_text("user_id,history\n" + "".join(f'u{i},"{h}"\n' for i, h in enumerate(histories)))
    jsonl = place.root / "u.ndjson"
    jsonl.write_text("".join(f'{{"user_id": "u{i}", "history": {h}}}\n' for i, h in enumerate(histories)))
    tables = []
    for path, text in ((parquet, None), (csv, "json"), (jsonl, None)):
        place.run(place.options(path, list_text=text, fresh=True))
        tables.append(place.written().to_pylist())
    assert tables[0] == tables[1] == tables[2]


def test_csv_user_ids_keep_their_leading_zeros(place: Place) -> None:
    path = place.root / "u.csv"
    path.write_text('user_id,history\n007,"[100]"\n"a\nb","[101]"\n')
    place.run(place.options(path, list_text="json"))
    assert place.written()["user_id"].to_pylist() == ["007", "a\nb"]


def test_empty_input_writes_one_part_with_the_schema(place: Place) -> None:
    users = place.users(pa.array([], pa.list_(pa.int64())))
    report, engine = place.run(place.options(users))
    assert report.failure is None and engine is not None and not engine.calls
    assert place.written().num_rows == 0 and place.written().column_names == ["user_id", "items", "short"]
    assert (place.out / "_SUCCESS").exists()


@pytest.mark.parametrize("histories", [[["?"]], [None, []], []], ids=["unknown", "empty", "no rows"])
def test_a_shard_without_any_list_over_a_catalog_of_uuids(place: Place, histories: list[Any]) -> None:
    storage = pa.array([bytes([number] * 16) for number in range(40)], pa.binary(16))
    ids = pa.ExtensionArray.from_storage(pa.uuid(), storage)
    place = dataclasses.replace(place, vocab=make_vocabulary(place.root / "vocab", ids))
    users = place.users(
        pa.array(histories, pa.list_(pa.string())), target=pa.array(["?"] * len(histories), pa.string())
    )
    report, _ = place.run(place.options(users, max_rejects="100%"))
    assert report.failure is None and place.written()["items"].null_count == len(histories)
    assert place.written().schema.field("items").type.value_type.field("item_id").type == pa.uuid()
    if histories:
        assert evaluate(EvalOptions(str(place.out), (str(users),))).record["rows"]["rejected"] == len(histories)


def test_limit_takes_the_first_rows_over_all_files(place: Place) -> None:
    first, second = place.users([[100]] * 3, "a.parquet"), place.users([[101]] * 3, "b.parquet")
    place.run(place.options(first, second, limit=4))
    assert place.written()["user_id"].to_pylist() == ["u0", "u1", "u2", "u0"]


def test_unknown_ids_are_dropped_and_counted(place: Place) -> None:
    """cases.md: [], null, [unknown id]: policies, counted; a history left empty by unknown ids counts as empty."""
    users = place.users([[100, 999], [], None, [998, 997]])
    report, _ = place.run(place.options(users, max_rejects="3"))
    assert [r["reason"] for r in place.rejects()] == ["empty-history"] * 3
    assert "none of its 2 ids" in place.rejects()[2]["detail"]
    counts = report.record["counts"]
    assert (counts["unknown_items"], counts["empty_histories"], counts["rejects"]) == (3, 3, 3)


def test_unknown_reject_and_fail(place: Place) -> None:
    users = place.users([[100], [101, 999, 998]])
    place.run(place.options(users, on_unknown="reject", max_rejects="100%"))
    assert [(r["row"], r["reason"], r["detail"]) for r in place.rejects()] == [
        (1, "unknown-item", "999 is not in the catalog")
    ]
    with pytest.raises(HistoryError, match=r"users\.parquet: row 1: '999' is not in the catalog"):
        place.run(place.options(users, on_unknown="fail", fresh=True))
    assert place.manifest()["state"] == "failed" and not (place.out / "_SUCCESS").exists()


def test_broken_lists_reject_their_rows(place: Place) -> None:
    column = pa.array([[100.0, None], [101.0], [1.5]], pa.list_(pa.float64()))
    place.run(place.options(place.users(column), max_rejects="2"))
    assert [(r["row"], r["reason"]) for r in place.rejects()] == [(0, "null-in-list"), (2, "not-integral")]


def test_max_history_keeps_the_newest_and_exclusion_still_sees_all(place: Place) -> None:
    """cases.md: MIMIGenRec, long history: the newest n whole items; exclusions use the whole history before the cut."""
    long = [100 + i % 30 for i in range(300)]
    users = place.users([long, [107, 108, 109]])
    report, _ = place.run(
        place.options(users, max_history=3, exclude_seen=True, search=SearchOptions(beam=40, top_k=40))
    )
    lists = place.written()["items"].to_pylist()
    assert {item["item_id"] for item in lists[0]} == set(range(130, 140))
    assert report.record["counts"]["cut_items"] == 297
    # 3 items of 3 tokens each
    assert report.record["counts"]["prompt_tokens"] == 18
    assert report.record["audit"]["seen"] == 0 and report.record["audit"]["short"] == 2

"""The whole job with a stand-in engine: output schema, order, rejects, resumable states, exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import Place, make_vocabulary

from xgr_engine.errors import HistoryError, OutputExistsError, TooManyRejectsError, UsageError, XgrError
from xgr_engine.job.run import plan_job
from xgr_engine.options import SearchOptions
from xgr_engine.system import cpu_name


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


def test_limit_takes_the_first_rows_over_all_files(place: Place) -> None:
    first, second = place.users([[100]] * 3, "a.parquet"), place.users([[101]] * 3, "b.parquet")
    place.run(place.options(first, second, limit=4))
    assert place.written()["user_id"].to_pylist() == ["u0", "u1", "u2", "u0"]


# ---- unknown and empty -------------------------------------------------------------------------------------------


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


# ---- errors, rejects, exit codes -----------------------------------------------------------------------------------


def test_a_batch_that_raises_is_rejected_with_the_reason(place: Place) -> None:
    """cases.md: OpenOneRec: rows of a failed batch are in the rejects; nothing becomes an empty string."""
    users = place.users([[100], [101], [102]])
    options = place.options(users, shard_rows=1, max_rejects="1")
    report, _ = place.run(options, fails=lambda prompts: len(prompts[0]) > 0 and int(prompts[0][0]) == 2 + 1)
    assert report.failure is None
    [reject] = place.rejects()
    assert (reject["row"], reject["reason"]) == (1, "engine-error")
    assert reject["detail"] == "RuntimeError: a row that makes the engine raise"
    assert [cell is None for cell in place.written()["items"].to_pylist()] == [False, True, False]


def test_on_error_fail_stops_and_leaves_no_success(place: Place) -> None:
    users = place.users([[100], [101]])
    with pytest.raises(XgrError, match=r"users.parquet: row 0: the computation raised RuntimeError: a row that"):
        place.run(place.options(users, on_error="fail"), fails=lambda prompts: True)
    assert not (place.out / "_SUCCESS").exists() and place.manifest()["state"] == "failed"
    assert not list(place.out.glob("part-*"))


def test_too_many_rejects_exit_3_and_a_larger_limit_completes_without_computing(place: Place) -> None:
    users = place.users([[100], [], []])
    report, engine = place.run(place.options(users, max_rejects="1"))
    assert isinstance(report.failure, TooManyRejectsError) and report.failure.exit_code == 3
    assert engine is not None and engine.calls and not (place.out / "_SUCCESS").exists()
    before = (place.out / "part-00000-of-00001.parquet").read_bytes()
    report, engine = place.run(place.options(users, max_rejects="2"))
    assert report.failure is None and engine is None and (place.out / "_SUCCESS").exists()
    assert (place.out / "part-00000-of-00001.parquet").read_bytes() == before
    assert place.manifest()["state"] == "done" and place.manifest()["engine"]["implementation"] == "fake"
    assert [r["row"] for r in place.rejects()] == [1, 2]


def test_the_same_command_again_is_nothing_to_do(place: Place) -> None:
    users = place.users([[100]])
    place.run(place.options(users))
    stamp = place.out.stat().st_mtime_ns
    report, engine = place.run(place.options(users))
    assert report.record["state"] == "nothing-to-do" and engine is None and place.out.stat().st_mtime_ns == stamp


def test_a_run_stopped_just_before_success_completes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from xgr_engine.job.outdir import OutDir

    users = place.users([[100]])
    with monkeypatch.context() as patch:
        patch.setattr(OutDir, "succeed", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr("xgr_engine.job.run._recorded", lambda *given: contextlib.nullcontext())
        with pytest.raises(KeyboardInterrupt):
            place.run(place.options(users))
    assert not (place.out / "_SUCCESS").exists()
    report, engine = place.run(place.options(users))
    assert engine is None and report.failure is None and (place.out / "_SUCCESS").exists()


def test_nothing_to_do_needs_no_device(place: Place) -> None:
    users = place.users([[100]])
    place.run(place.options(users))
    report, _ = place.run(place.options(users, device="cuda:99"))
    assert report.record["state"] == "nothing-to-do" and report.record["audit"]["users"] == 1


def test_a_flipped_byte_in_the_weights_is_found_before_the_output_is_touched(place: Place, tmp_path: Path) -> None:
    model = Path(shutil.copytree(place.model, tmp_path / "damaged"))
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(XgrError, match="damaged"):
        place.run(place.options(place.users([[100]]), model=str(model)))
    assert not place.out.exists()


def test_another_option_input_or_vocabulary_refuses_and_names_the_difference(place: Place, tmp_path: Path) -> None:
    """cases.md: RQ-VAE-Recommender#58: a changed catalog; recommend into the old output refuses (exit 2)."""
    users = place.users([[100]])
    place.run(place.options(users))
    with pytest.raises(OutputExistsError, match="another run: --top-k was 5, is 6") as refused:
        place.run(place.options(users, search=SearchOptions(beam=40, top_k=6)))
    assert refused.value.exit_code == 2
    retitled = make_vocabulary(tmp_path / "vocab2", titles=["x"] * 40)
    with pytest.raises(OutputExistsError, match="the content of --vocab was"):
        place.run(place.options(users, vocab=str(retitled)))
    place.users([[101]])
    with pytest.raises(OutputExistsError, match=r"contents of users.parquet changed"):
        place.run(place.options(users))
    report, _ = place.run(place.options(users, fresh=True))
    assert report.failure is None


def test_fresh_never_removes_foreign_files(place: Place) -> None:
    users = place.users([[100]])
    place.run(place.options(users))
    foreign = place.out / "part-00007-of-00010.parquet"
    pq.write_table(pa.table({"x": [1]}), foreign)
    with pytest.raises(OutputExistsError, match="part-00007-of-00010"):
        place.run(place.options(users, fresh=True))
    assert foreign.exists() and (place.out / "_SUCCESS").exists()
    foreign.unlink()
    notes = place.out / "_xgr" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(OutputExistsError, match=r"notes\.txt"):
        place.run(place.options(users, fresh=True))
    notes.unlink()
    report, _ = place.run(place.options(users, fresh=True))
    assert report.failure is None


def test_a_directory_of_somebody_else_is_never_touched(place: Place) -> None:
    users = place.users([[100]])
    place.out.mkdir()
    (place.out / "_SUCCESS").touch()
    for fresh in (False, True):
        with pytest.raises(OutputExistsError):
            place.run(place.options(users, fresh=fresh))
    assert [path.name for path in place.out.iterdir()] == ["_SUCCESS"]


def test_outputs_that_overlap_an_input_are_refused(place: Place) -> None:
    folder = place.root / "data"
    folder.mkdir()
    users = place.users([[100]], "data/users.parquet")
    for out, given in (
        (folder, folder),
        (folder / "recs", folder),
        (place.root, users),
        (place.vocab, users),
        (place.model / "x", users),
        (users, users),
    ):
        with pytest.raises(UsageError, match="--out"):
            place.run(place.options(given, out=str(out)))
    assert sorted(path.name for path in folder.iterdir()) == ["users.parquet"]
    # a pattern would find the first part files, and the run could not go on
    (folder / "r1").mkdir()
    place.users([[100]], "data/r1/part.parquet")
    for pattern in ("data/**/*.parquet", "*/*/*.parquet", "data/r*/part*", "data/r*", "d*[a]"):
        with pytest.raises(UsageError, match=r"would be found by --in"):
            place.run(place.options(str(place.root / pattern), out=str(folder / "recs")))
        assert not (folder / "recs").exists()
    for pattern, name in (("data/*/*.parquet", ".recs"), ("data/r*", "_recs"), ("data/*", "recs")):
        options = place.options(str(place.root / pattern), out=str(folder / name))
        assert place.run(options)[0].failure is None
        assert place.run(options)[1] is None  # nothing to do: the input is what it was


def test_dry_run_checks_everything_and_writes_nothing(place: Place) -> None:
    users = place.users([[100]] * 10)
    record = plan_job(place.options(users, shard_rows=4)).record
    assert (record["rows"], record["shards"], record["output"]["state"]) == (10, 3, "new")
    assert not place.out.exists()
    with pytest.raises(HistoryError, match="no column 'nothere'"):
        plan_job(place.options(users, history_col="nothere"))


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (pa.array(range(5)), "b.parquet: column 'history' is int64, not a list"),
        (pa.array([[True]] * 5), "b.parquet: column 'history' holds lists of bool"),
        (pa.array(["[100]"] * 5), "b.parquet: column 'history' holds text, not lists"),
    ],
)
def test_a_later_file_whose_histories_have_another_type_is_named_before_anything_is_written(
    place: Place, column: pa.Array, match: str
) -> None:
    first, second = place.users([[100]] * 5, "a.parquet"), place.users(column, "b.parquet")
    with pytest.raises(HistoryError, match=match):
        place.run(place.options(first, second, shard_rows=2))
    assert not place.out.exists()
    with pytest.raises(HistoryError, match=match):
        plan_job(place.options(first, second))
    report, _ = place.run(place.options(first, second, limit=5))  # which does not read it
    assert report.failure is None


def test_a_width_that_cannot_fit_is_said_before_the_run_and_a_smaller_budget_makes_more_batches(place: Place) -> None:
    """cases.md: --max-memory: same lists, more batches; the width is never lowered."""
    users = place.users([[100 + i % 40] for i in range(40)])
    with pytest.raises(UsageError, match="--max-memory"):
        place.run(place.options(users, max_memory=1000))
    _, roomy = place.run(place.options(users))
    expected = place.written().to_pylist()
    _, tight = place.run(place.options(users, max_memory=400_000, fresh=True))
    assert roomy is not None and tight is not None and len(tight.calls) > len(roomy.calls)
    assert place.written().to_pylist() == expected


def test_an_input_replaced_while_the_job_runs_is_noticed(place: Place) -> None:
    users = place.users([[100 + i] for i in range(6)])

    def replaces(prompts: list[np.ndarray]) -> bool:
        place.users([[139]] * 6)
        return False

    with pytest.raises(HistoryError, match="changed during the run"):
        place.run(place.options(users, shard_rows=2), fails=replaces)
    assert not (place.out / "_SUCCESS").exists()


def test_codes_without_a_token_exit_2_naming_the_code(place: Place, tmp_path: Path) -> None:
    catalog = tmp_path / "c.parquet"
    pq.write_table(pa.table({"item_id": [1], "sid": pa.array([[1, 2, 99]])}), catalog)
    from xgr_engine.catalog.build import BuildOptions, build_vocabulary
    from xgr_engine.catalog.readers import ReadOptions

    build_vocabulary([catalog], tmp_path / "v", ReadOptions(), BuildOptions())
    with pytest.raises(XgrError, match="99") as failure:
        place.run(place.options(place.users([[1]]), vocab=str(tmp_path / "v")))
    assert failure.value.exit_code == 2 and not place.out.exists()


def test_manifest_says_what_ran(place: Place) -> None:
    users = place.users([[100], [101]])
    place.run(place.options(users, exclude_seen=True))
    record = place.manifest()
    assert record["state"] == "done" and record["rows"] == 2 and record["shards"] == 1
    assert record["options"]["histories.exclude_seen"] == {"value": True, "origin": "caller"}
    assert record["inputs"][0]["rows"] == 2 and len(record["inputs"][0]["sha256"]) == 64
    environment = record["environment"]
    assert environment["versions"]["pyarrow"] == pa.__version__ and "gpus" not in environment
    assert environment["cpu"] == cpu_name() and environment["host"] == platform.node()
    assert {"load", "read", "prepare", "compute", "write", "audit", "total"} <= record["durations"].keys()
    assert not (place.out / "_xgr" / "shards").exists()
    options = dataclasses.replace(place.options(users, exclude_seen=True))
    assert place.run(options)[0].record["fingerprint"] == record["fingerprint"]


def test_decimal_ids_are_named_by_decimals_integers_and_text(place: Place, tmp_path: Path) -> None:
    """Databases write numbers as decimals: DECIMAL(20, 0), NUMBER(38)."""
    ids = [Decimal(f"{10**19 + number}.00") for number in range(40)]
    vocab = make_vocabulary(tmp_path / "vocab", pa.array(ids))
    whole = [[int(ids[1]), int(ids[2])], [int(ids[3])]]
    forms = {
        "decimal": pa.array([[ids[1], ids[2]], [ids[3]]]),
        "other-scale": pa.array([[Decimal(item) for item in row] for row in whole], pa.list_(pa.decimal128(38, 3))),
        "integer": pa.array(whole, pa.list_(pa.uint64())),
        "text": pa.array([[str(item) for item in row] for row in whole]),
    }
    written = []
    for name, histories in forms.items():
        users = place.users(histories, f"{name}.parquet")
        place.run(place.options(users, vocab=str(vocab), exclude_seen=True, fresh=True))
        assert "unknown_items" not in place.manifest()["counts"]
        written.append(place.written()["items"].to_pylist())
    assert all(lists == written[0] for lists in written)
    for row, seen in zip(written[0], whole, strict=True):
        got = [item["item_id"] for item in row]
        assert len(got) == 5 and set(got) <= set(ids) and not {int(item) for item in got} & set(seen)

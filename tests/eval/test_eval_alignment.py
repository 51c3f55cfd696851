"""Which row of the truth belongs to which row of the output, and truths in other forms."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eval_support import make_vocabulary, mean, nested, run, write_output, write_users

from xgr_engine.errors import InputError, UsageError


@pytest.fixture()
def vocab(tmp_path: Path) -> Path:
    return make_vocabulary(tmp_path)


def test_users_file_of_the_run_by_position_with_repeated_users(tmp_path: Path, vocab: Path) -> None:
    users = write_users(tmp_path, user_id=["u", "u", "v"], target=[10, 20, 30])
    recs = write_output(tmp_path, nested(["u", "u", "v"], [[10], [20], [10]]), inputs=[users], vocab=vocab)
    moved = users.rename(tmp_path / "elsewhere.parquet")
    report = run(recs, moved)
    assert report.record["aligned_by"] == "position"
    assert mean(report, "recall@1") == pytest.approx(2 / 3)


def test_limited_run_uses_the_first_rows_of_its_input(tmp_path: Path, vocab: Path) -> None:
    users = write_users(tmp_path, user_id=[1, 2, 3], target=[10, 20, 30])
    recs = write_output(tmp_path, nested([1, 2], [[10], [10]]), inputs=[users], vocab=vocab, rows=2)
    report = run(recs, users)
    assert report.record["rows"]["evaluated"] == 2
    assert mean(report, "recall@1") == pytest.approx(1 / 2)


def test_same_users_row_by_row_in_another_file(tmp_path: Path, vocab: Path) -> None:
    """The targets were added to the users file after the run: another content, the same rows."""
    recs = write_output(tmp_path, nested([4, 4, 5], [[10], [20], [30]]), vocab=vocab)
    truth = write_users(tmp_path, user_id=["4", "4", "5"], target=[10, 20, 30])
    report = run(recs, truth)
    assert report.record["aligned_by"] == "position"
    assert mean(report, "recall@1") == 1


def test_other_order_is_matched_by_user(tmp_path: Path, vocab: Path) -> None:
    recs = write_output(tmp_path, nested([1, 2, 3, 4], [[10], [20], [30], [12]]), vocab=vocab, parts=2)
    truth = write_users(tmp_path, user_id=[3, 1, 99, 2], target=[30, 10, 30, 21])
    report = run(recs, truth)
    assert report.record["aligned_by"] == "user"
    assert report.record["rows"]["evaluated"] == 3
    assert report.record["rows"]["output_rows_without_truth"] == 1
    assert report.record["rows"]["truth_rows_without_output"] == 1
    assert "1 rows of the truth have users that are not in the output; they are left out" in report.warnings
    assert mean(report, "recall@1") == pytest.approx(2 / 3)


def test_user_twice_in_the_truth_is_refused(tmp_path: Path, vocab: Path) -> None:
    recs = write_output(tmp_path, nested([1, 2], [[10], [20]]), vocab=vocab)
    truth = write_users(tmp_path, user_id=[2, 1, 2], target=[10, 20, 30])
    with pytest.raises(InputError, match="two rows for user 2"):
        run(recs, truth)


@pytest.mark.parametrize("parts", [1, 2], ids=["one file", "over two files"])
def test_user_twice_in_the_output_is_refused(tmp_path: Path, vocab: Path, parts: int) -> None:
    recs = write_output(tmp_path, nested([1, 2, 3, 1], [[10], [20], [10], [10]]), vocab=vocab, parts=parts)
    truth = write_users(tmp_path, user_id=[3, 2, 1], target=[10, 20, 30])
    with pytest.raises(InputError, match="two rows for user 1"):
        run(recs, truth)


@pytest.mark.parametrize("harm", ["a part is lost", "a part stands twice", "a part holds other rows"])
def test_an_output_that_is_not_what_the_run_left_is_refused(tmp_path: Path, vocab: Path, harm: str) -> None:
    """Figures over a part of the users would pass for figures over all of them."""
    recs = write_output(tmp_path, nested([1, 2, 3, 4], [[10], [20], [10], [10]]), vocab=vocab, parts=2)
    truth = write_users(tmp_path, user_id=[4, 3, 2, 1], target=[10, 20, 30, 10])
    second = max(recs.glob("part-*"))
    if harm == "a part is lost":
        second.unlink()
    elif harm == "a part stands twice":
        shutil.copy(second, recs / "part-00002-of-00003.parquet")
    else:
        pq.write_table(nested([3], [[10]]), second)
    with pytest.raises(InputError, match="not what the run left"):
        run(recs, truth)


@pytest.mark.parametrize("ks", [(1_000_001,), (1, 10**20)])
def test_lists_longer_than_any_are_refused(tmp_path: Path, vocab: Path, ks: tuple[int, ...]) -> None:
    recs = write_output(tmp_path, nested([1], [[10]]), vocab=vocab)
    with pytest.raises(UsageError, match="no list is longer"):
        run(recs, write_users(tmp_path, user_id=[1], target=[10]), ks=ks)


def test_position_with_other_users_is_refused(tmp_path: Path, vocab: Path) -> None:
    recs = write_output(tmp_path, nested([1, 2, 3], [[10], [20], [30]]), vocab=vocab)
    truth = write_users(tmp_path, user_id=[1, 3, 2], target=[10, 20, 30])
    with pytest.raises(InputError, match=r"row 1: output for user 2, truth for user 3"):
        run(recs, truth, align="position")


@pytest.mark.parametrize("rows", [2, 4])
def test_position_with_another_number_of_rows_is_refused(tmp_path: Path, vocab: Path, rows: int) -> None:
    recs = write_output(tmp_path, nested([1, 2, 3], [[10], [20], [30]]), vocab=vocab)
    truth = write_users(tmp_path, user_id=list(range(1, rows + 1)), target=[10] * rows)
    with pytest.raises(InputError, match="rows"):
        run(recs, truth, align="position")


def test_truth_without_user_column_needs_align_position(tmp_path: Path, vocab: Path) -> None:
    recs = write_output(tmp_path, nested([1, 2], [[10], [20]]), vocab=vocab)
    truth = write_users(tmp_path, target=[10, 10])
    with pytest.raises(InputError, match="no column 'user_id'"):
        run(recs, truth)
    assert mean(run(recs, truth, align="position"), "recall@1") == pytest.approx(1 / 2)


def test_csv_truth_with_python_lists(tmp_path: Path, vocab: Path) -> None:
    """MiniOneRec's files: a scalar target and a history that is a Python list as text."""
    users = tmp_path / "users.csv"
    users.write_text("user_id,history,target\nA,\"['20', '10']\",10\nB,\"['20']\",12\nC,[],\n")
    options = {"list_text": "python"}
    recs = write_output(
        tmp_path, nested(["A", "B", "C"], [[10], [20], [10]]), inputs=[users], vocab=vocab, options=options
    )
    report = run(recs, users)
    assert report.record["rows"]["evaluated"] == 2
    assert report.record["rows"]["without_target"] == 1
    assert report.record["rows"]["target_not_in_history"] == 1
    assert mean(report, "recall@1") == pytest.approx(1 / 2)


def test_json_lines_truth_with_single_and_several_targets(tmp_path: Path, vocab: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    truth.write_text('{"user_id": 2, "target": [10, 20]}\n{"user_id": 1, "target": 30}\n{"user_id": 3}\n')
    recs = write_output(tmp_path, nested([1, 2, 3], [[30], [20], [10]]), vocab=vocab)
    report = run(recs, truth)
    assert report.record["rows"]["evaluated"] == 2
    assert mean(report, "recall@1") == pytest.approx((1 + 1 / 2) / 2)


def test_unreadable_target_is_left_out_and_counted(tmp_path: Path, vocab: Path) -> None:
    users = write_users(tmp_path, user_id=[1, 2, 3], target=[10.0, 20.5, 30.0])
    recs = write_output(tmp_path, nested([1, 2, 3], [[10], [20], [10]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert report.record["rows"]["unreadable_target"] == 1
    assert report.record["rows"]["evaluated"] == 2
    assert mean(report, "recall@1") == pytest.approx(1 / 2)


def test_rows_without_target_and_unreadable_ones_are_counted_apart(tmp_path: Path, vocab: Path) -> None:
    """A list with a null used to be counted as both."""
    users = write_users(tmp_path, user_id=[1, 2, 3, 4], target=[[10], [20, None], [], None])
    recs = write_output(tmp_path, nested([1, 2, 3, 4], [[10], [20], [10], [10]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    rows = report.record["rows"]
    assert (rows["evaluated"], rows["unreadable_target"], rows["without_target"]) == (1, 1, 2)
    assert "1 targets could not be read; these rows are left out" in report.warnings
    assert "2 rows of the truth have no target; they are left out" in report.warnings


def test_a_truth_of_unreadable_targets_alone_says_so(tmp_path: Path, vocab: Path) -> None:
    users = write_users(tmp_path, user_id=[1, 2], target=[[10, None], [20, None]])
    recs = write_output(tmp_path, nested([1, 2], [[10], [20]]), inputs=[users], vocab=vocab)
    with pytest.raises(InputError, match="no row of the output has a target") as caught:
        run(recs, users)
    assert caught.value.why == "the targets of 2 of its 2 rows cannot be read; row 1: target holds a null or NaN"


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_truth_without_rows_says_so(tmp_path: Path, vocab: Path, kind: str) -> None:
    """It used to be told that it lacks the column of users, which it has."""
    recs = write_output(tmp_path, nested([1], [[10]]), vocab=vocab)
    truth = tmp_path / f"truth.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"user_id": pa.array([], pa.int64()), "target": pa.array([], pa.int64())}), truth)
    else:
        truth.write_text("user_id,target\n" if kind == "csv" else "")
    with pytest.raises(InputError, match=r"truth.* holds no rows"):
        run(recs, truth)


def test_null_recommendations_are_no_items_of_another_catalog(tmp_path: Path, vocab: Path) -> None:
    users = write_users(tmp_path, user_id=[1, 2], target=[10, 20])
    recs = write_output(tmp_path, nested([1, 2], [[None, 10, 777], [20]], pa.int64()), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert (report.record["predictions"]["null"], report.record["predictions"]["not_in_vocabulary"]) == (1, 1)
    assert any(text.startswith("1 recommended item ids are null") for text in report.warnings)
    assert mean(report, "mrr") == pytest.approx((1 / 2 + 1) / 2)
    assert run(recs, users, vocab="none").record["predictions"]["null"] == 1


def test_missing_truth_column_names_what_is_there(tmp_path: Path, vocab: Path) -> None:
    users = write_users(tmp_path, user_id=[1], next_item=[10])
    recs = write_output(tmp_path, nested([1], [[10]]), inputs=[users], vocab=vocab)
    with pytest.raises(InputError) as caught:
        run(recs, users)
    assert "'target'" in caught.value.what
    assert "next_item" in caught.value.why
    assert "--truth-col" in caught.value.hint


def test_several_truth_files_in_order(tmp_path: Path, vocab: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    first = write_users(folder, "1.parquet", user_id=[1], target=[10])
    second = write_users(folder, "2.parquet", user_id=["2"], target=["20"])
    recs = write_output(tmp_path, nested([1, 2], [[10], [20]]), inputs=[first, second], vocab=vocab)
    report = run(recs, folder)
    assert report.record["aligned_by"] == "position"
    assert mean(report, "recall@1") == 1

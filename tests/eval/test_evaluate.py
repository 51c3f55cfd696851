"""``xgr eval`` over small outputs whose figures are worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eval_support import long, make_vocabulary, mean, nested, run, write_output, write_users

from xgr_engine.errors import InputError, UsageError
from xgr_engine.metrics.evaluate import EvalOptions

SECOND = 1 / math.log2(3)


def test_figures_by_hand_with_rejected_row_and_seen_target(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(
        tmp_path,
        user_id=["a", "b", "c", "d"],
        history=[[20], [21], [12, 10], [30]],
        target=[10, 12, 12, 30],
    )
    lists = [[10, 20], [20, 12, 10], None, [20]]
    recs = write_output(tmp_path, nested(["a", "b", "c", "d"], lists), inputs=[users], vocab=vocab, parts=2)
    report = run(recs, users)
    rows = report.record["rows"]
    assert (rows["evaluated"], rows["rejected"], rows["target_not_in_history"]) == (4, 1, 2)
    assert report.record["aligned_by"] == "position"
    assert mean(report, "recall@1") == pytest.approx(1 / 4)
    assert mean(report, "recall@3") == mean(report, "hit_rate@3") == pytest.approx(2 / 4)
    assert mean(report, "ndcg@3") == pytest.approx((1 + SECOND) / 4)
    assert mean(report, "mrr") == pytest.approx((1 + 1 / 2) / 4)
    assert mean(report, "ndcg@3", subset="target_not_in_history") == pytest.approx((1 + SECOND) / 2)
    assert "1 rows were rejected by the run; those that have a target count as misses" in report.warnings


def test_collision_item_missed_but_sid_found(tmp_path: Path) -> None:
    """Truth y, ``--collisions first`` gives x of the same SID: item recall 0, SID recall 1."""
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=[11])
    recs = write_output(tmp_path, nested([1], [[20, 10]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert mean(report, "recall@3") == 0
    assert mean(report, "recall@3", "sid") == 1
    assert mean(report, "ndcg@3", "sid") == pytest.approx(SECOND)


def test_repeated_target_that_the_catalog_lacks_counts_once(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1, 2], target=[[10, 99, 99], [99, 98, 99, 20]])
    recs = write_output(tmp_path, nested([1, 2], [[10], [20]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert report.record["targets"] == {"total": 5, "not_in_catalog": 3}
    assert mean(report, "recall@3") == mean(report, "recall@3", "sid") == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_repeated_recommendation_moves_those_behind_it_up_everywhere(tmp_path: Path) -> None:
    """99 is no item of the catalog; it takes one place at both levels, and coverage is that of the distinct list."""
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=[12])
    recs = write_output(tmp_path, nested([1], [[99, 99, 20, 20, 12]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert mean(report, "mrr") == mean(report, "mrr", "sid") == pytest.approx(1 / 3)
    assert report.record["predictions"]["repeated"] == 2
    assert report.record["coverage"]["at"]["3"]["items"] == 2


def test_items_of_one_sid_count_once_at_sid_level(tmp_path: Path) -> None:
    """10 and 11 share a SID, so 12 is third by item and second by SID."""
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=[12])
    recs = write_output(tmp_path, nested([1], [[10, 11, 12]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert mean(report, "mrr") == pytest.approx(1 / 3)
    assert mean(report, "mrr", "sid") == pytest.approx(1 / 2)
    assert report.record["predictions"]["repeated"] == 0


def test_repeated_prediction_counts_once_with_a_warning(tmp_path: Path) -> None:
    """Predictions [a, a] against truth [a]: NDCG and recall 1.0, and a warning."""
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=[10])
    recs = write_output(tmp_path, nested([1], [[10, 10]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert mean(report, "ndcg@3") == mean(report, "recall@1") == 1
    assert any("1 recommendations repeat" in text for text in report.warnings)


def test_several_targets_and_rows_without_one(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1, 2, 3], target=[[20, 21, 20], [], None])
    recs = write_output(tmp_path, nested([1, 2, 3], [[21, 10, 12], [10], [10]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert report.record["rows"]["evaluated"] == 1
    assert report.record["rows"]["without_target"] == 2
    assert mean(report, "recall@3") == pytest.approx(1 / 2)
    assert mean(report, "hit_rate@3") == 1
    assert mean(report, "ndcg@3") == pytest.approx(1 / (1 + SECOND))


def test_target_outside_the_catalog_is_counted_and_missed(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1, 2], target=[999, 10])
    recs = write_output(tmp_path, nested([1, 2], [[10], [10]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert report.record["targets"]["not_in_catalog"] == 1
    assert mean(report, "recall@1") == mean(report, "recall@1", "sid") == pytest.approx(1 / 2)


def test_recommended_item_outside_the_vocabulary_keeps_its_place(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=[10])
    recs = write_output(tmp_path, nested([1], [[777, 10]]), inputs=[users], vocab=vocab)
    report = run(recs, users)
    assert report.record["predictions"]["not_in_vocabulary"] == 1
    assert mean(report, "mrr") == mean(report, "mrr", "sid") == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("truth_type", "output_type"),
    [
        (pa.string(), pa.int64()),
        (pa.float64(), pa.int32()),
        (pa.dictionary(pa.int32(), pa.string()), pa.uint64()),
        (pa.large_string(), pa.string()),
    ],
    ids=str,
)
def test_ids_match_by_canonical_text_whatever_their_type(
    tmp_path: Path, truth_type: pa.DataType, output_type: pa.DataType
) -> None:
    vocab = make_vocabulary(tmp_path)
    targets = pa.array([12, 21, 10]).cast(pa.string())
    if not pa.types.is_floating(truth_type):
        targets = targets.dictionary_encode() if pa.types.is_dictionary(truth_type) else targets.cast(truth_type)
    else:
        targets = pa.array([12.0, 21.0, 10.0])
    users = write_users(tmp_path, user_id=[1, 2, 3], target=targets)
    lists = [["12"], ["20", "21"], ["11"]] if output_type == pa.string() else [[12], [20, 21], [11]]
    recs = write_output(tmp_path, nested([1, 2, 3], lists, output_type), inputs=[users], vocab=vocab)
    assert mean(run(recs, users), "recall@3") == pytest.approx(2 / 3)


def test_coverage_by_hand(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1, 2], target=[10, 10])
    recs = write_output(tmp_path, nested([1, 2], [[10, 11, 12], [10, 20]]), inputs=[users], vocab=vocab)
    at = run(recs, users).record["coverage"]["at"]
    assert (at["1"]["items"], at["1"]["sids"]) == (1, 1)
    assert (at["3"]["items"], at["3"]["sids"]) == (4, 3)
    assert at["3"]["item_share"] == pytest.approx(4 / 6)
    assert at["3"]["sid_share"] == pytest.approx(3 / 5)


def test_long_layout_equals_nested_layout(tmp_path: Path) -> None:
    """A rejected user and one with nothing to get have no row in the long layout and are misses all the same."""
    vocab = make_vocabulary(tmp_path)
    names, lists = [7, 7, 8, 9, 5], [[10, 20], None, [20, 12, 10], [], [21]]
    users = write_users(tmp_path, user_id=names, history=[[20]] * 5, target=[10, 12, 12, 30, 30])
    reports = []
    for layout in (nested, long):
        folder = tmp_path / layout.__name__
        folder.mkdir()
        recs = write_output(folder, layout(names, lists), inputs=[users], vocab=vocab, rows=5, rejected=[7], parts=3)
        reports.append(run(recs, users))
    assert reports[0].record["metrics"] == reports[1].record["metrics"]
    assert reports[0].record["coverage"] == reports[1].record["coverage"]
    for report in reports:
        rows = report.record["rows"]
        assert (rows["evaluated"], rows["rejected"], rows["truth_rows_without_output"]) == (5, 1, 0)


def test_dictionary_ids_in_lists_may_span_row_groups(tmp_path: Path) -> None:
    """As another writer may leave them: each row group has a dictionary of its own."""
    ids = pa.dictionary(pa.int32(), pa.string())
    lists = [[{"item_id": "10"}, {"item_id": "20"}], [{"item_id": "12"}], None, [{"item_id": "30"}]]
    items = pa.array(lists, pa.list_(pa.struct([("item_id", ids)])))
    recs = tmp_path / "recs.parquet"
    pq.write_table(pa.table({"user_id": range(4), "items": items}), recs, row_group_size=2)
    truth = write_users(tmp_path, user_id=range(4), target=[20, 12, 12, 30])
    report = run(recs, truth, vocab=str(make_vocabulary(tmp_path)))
    assert (mean(report, "recall@1"), mean(report, "recall@3")) == (0.5, 0.75)


def test_long_layout_matched_by_user_counts_rejected_users(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    recs = write_output(tmp_path, long([1, 2, 3], [[10], None, [20]]), vocab=vocab, rows=3, rejected=[2])
    truth = write_users(tmp_path, user_id=[3, 2, 1, 99], target=[20, 10, 20, 10])
    report = run(recs, truth)
    assert report.record["aligned_by"] == "user"
    assert report.record["rows"]["evaluated"] == 3
    assert report.record["rows"]["truth_rows_without_output"] == 1  # 99; 2 was rejected, which is another thing
    assert mean(report, "recall@1") == pytest.approx(1 / 3)


def test_without_manifest_and_without_vocabulary(tmp_path: Path) -> None:
    pq.write_table(nested([1, 2], [[10], [20]]), tmp_path / "theirs.parquet")
    truth = write_users(tmp_path, user_id=[1, 2], target=[10, 10])
    with pytest.raises(UsageError, match="which vocabulary"):
        run(tmp_path / "theirs.parquet", truth)
    report = run(tmp_path / "theirs.parquet", truth, vocab="none")
    assert report.record["metrics"]["sid"] is None
    assert report.record["coverage"] is None
    assert mean(report, "recall@1") == pytest.approx(1 / 2)


def test_vocabulary_that_moved_or_changed(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=[10])
    recs = write_output(tmp_path, nested([1], [[10]]), inputs=[users], vocab=vocab)
    vocab.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="not at"):
        run(recs, users)
    assert not run(recs, users, vocab=str(tmp_path / "moved")).warnings[1:]
    other = make_vocabulary(tmp_path, {10: [0, 0, 1]}, "other")
    assert any("not the vocabulary of this run" in text for text in run(recs, users, vocab=str(other)).warnings)


def test_unfinished_run_is_refused(tmp_path: Path) -> None:
    users = write_users(tmp_path, user_id=[1], target=[10])
    recs = write_output(tmp_path, nested([1], [[10]]), inputs=[users])
    (recs / "_SUCCESS").unlink()
    with pytest.raises(InputError, match="did not finish"):
        run(recs, users)


def test_no_target_at_all(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=pa.array([None], pa.int64()))
    recs = write_output(tmp_path, nested([1], [[10]]), inputs=[users], vocab=vocab)
    with pytest.raises(InputError, match="no row of the output has a target"):
        run(recs, users)


def test_history_as_sid_text_is_compared_by_sid(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1, 2], history=[["1-1-0"], ["2-0-0", "3-1"]], target=[11, 10])
    options = {"history_format": "sids"}
    recs = write_output(tmp_path, nested([1, 2], [[20], [10]]), inputs=[users], vocab=vocab, options=options)
    report = run(recs, users)
    assert report.record["rows"]["target_not_in_history"] == 1
    assert mean(report, "recall@1", subset="target_not_in_history") == 1


def test_token_histories_give_no_figures_for_unseen_targets(tmp_path: Path) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], history=[[5, 6, 7]], target=[10])
    options = {"history_format": "tokens"}
    recs = write_output(tmp_path, nested([1], [[10]]), inputs=[users], vocab=vocab, options=options)
    report = run(recs, users)
    assert report.record["rows"]["target_not_in_history"] is None
    assert report.record["metrics"]["item"]["target_not_in_history"] is None


@pytest.mark.parametrize("ks", [(), (0, 5), (5, 1), (5, 5)])
def test_bad_list_lengths(ks: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="--k"):
        EvalOptions("recs", ("users.parquet",), ks=ks)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (pa.array([0, 1, 0]), "row 0 in two places"),  # it would be measured by the last of them alone
        (pa.array([0, None, 1]), "whole numbers from 0"),
        (pa.array([-1, 0, 1]), "whole numbers from 0"),
        (pa.array([0, 1, 1.5]), "whole numbers from 0"),
        (pa.array([0, 1, 2**64 - 1], pa.uint64()), "whole numbers from 0"),
    ],
)
@pytest.mark.parametrize("group", [1, 3])
def test_row_numbers_of_a_long_file_that_name_no_row_or_one_twice_are_refused(
    tmp_path: Path, row: pa.Array, match: str, group: int
) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=["a", "b"], target=[10, 20])
    pq.write_table(pa.table({"row": row, "item_id": [10, 20, 12]}), tmp_path / "long.parquet", row_group_size=group)
    with pytest.raises(InputError, match=match):
        run(tmp_path / "long.parquet", users, vocab=str(vocab), align="position")


@pytest.mark.parametrize("align", ["auto", "position", "user"])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_a_long_file_may_have_any_order(
    tmp_path: Path, align: Literal["auto", "position", "user"], group: int
) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=["a", "b"], target=[10, 20])
    recs = pa.table({"row": [1, 1, 0], "user_id": ["b", "b", "a"], "item_id": [12, 20, 10]})
    pq.write_table(recs, tmp_path / "long.parquet", row_group_size=group)
    report = run(tmp_path / "long.parquet", users, vocab=str(vocab), align=align)
    assert (mean(report, "recall@1"), mean(report, "recall@3")) == (0.5, 1.0)


@pytest.mark.parametrize(
    "damage",
    [
        {"rows": None},
        {"shards": "1"},
        {"options": {}},
        {"options": None},
        {"vocab": None},
        {"vocab": {"path": 5, "content_hash": ""}},
        {"inputs": [{}]},
        {"inputs": [{"bytes": "x", "sha256": ""}]},
    ],
)
def test_edited_manifest_is_told_as_damaged(tmp_path: Path, damage: dict[str, object]) -> None:
    vocab = make_vocabulary(tmp_path)
    users = write_users(tmp_path, user_id=[1], target=[10])
    recs = write_output(tmp_path, nested([1], [[10]]), inputs=[users], vocab=vocab)
    path = recs / "_xgr" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(InputError, match="is damaged"):
        run(recs, users)
    path.write_text("[" * 100_000)
    with pytest.raises(InputError, match="is damaged"):
        run(recs, users)

"""The audit reads the written files again: rows planted in a part file are counted, whatever the engine said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import Place

from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.job import audit as audit_module
from xgr_engine.job import run as run_module
from xgr_engine.job import shard_work
from xgr_engine.job.audit import Audit
from xgr_engine.job.histories import HistoryResolver
from xgr_engine.job.inputs import RowReader, open_inputs
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.read_back import AuditError
from xgr_engine.job.shard_work import Finisher, ShardWork
from xgr_engine.job.shards import PIECE_ROWS, cut, plan_shards

Rows = list[dict[str, Any]]


def edit(part: Path, change: Callable[[Rows], Any]) -> None:
    """Rewrites a part file with changed rows."""
    with pq.ParquetFile(part) as file:
        table = file.read()
    rows = table.to_pylist()
    changed = change(rows)
    pq.write_table(pa.Table.from_pylist(changed if isinstance(changed, list) else rows, schema=table.schema), part)


def audit_again(place: Place, options: RecommendOptions) -> Audit:
    vocabulary = load_vocabulary(options.vocab)
    inputs = open_inputs(options.histories)
    resolver = HistoryResolver(vocabulary, load_model_dir(options.model).table, options.histories)
    shards = plan_shards([file.groups for file in inputs.files], options.shard_rows)
    return Finisher(OutDir(place.out), inputs, vocabulary, resolver, options).audit(shards)


def swap(items: Any, a: int, b: int) -> None:
    items[a], items[b] = items[b], items[a]


PLANTED: dict[str, tuple[Callable[[Rows], Any], str, int]] = {
    "an item outside the catalog": (lambda rows: rows[0]["items"][0].update(item_id=7), "invalid", 1),
    "the SID of another item": (lambda rows: rows[0]["items"][1].update(sid=[5, 5, 5]), "invalid", 1),
    "a SID cut short": (lambda rows: rows[0]["items"][1]["sid"].pop(), "invalid", 1),
    "a SID with one code more": (lambda rows: rows[0]["items"][1]["sid"].append(0), "invalid", 1),
    "a score above 0": (lambda rows: rows[1]["items"][0].update(score=0.5), "invalid", 1),
    "a score that is no number": (lambda rows: rows[1]["items"][4].update(score=float("nan")), "invalid", 1),
    "an item twice": (lambda rows: rows[2]["items"].__setitem__(1, dict(rows[2]["items"][0])), "duplicate", 1),
    "an item of the history": (lambda rows: rows[0]["items"][4].update(item_id=100, sid=[0, 0, 0]), "seen", 1),
    "an excluded item": (lambda rows: rows[0]["items"][4].update(item_id=105, sid=[5, 0, 0]), "excluded", 1),
    "an ascending pair": (lambda rows: swap(rows[1]["items"], 0, 4), "misordered", 2),
    "a tie against SID order": (lambda rows: swap(rows[1]["items"], 0, 1), "misordered", 1),
    "the rows of two users": (lambda rows: swap(rows, 0, 1), "misplaced", 2),
    "another user's id": (lambda rows: rows[0].update(user_id="x"), "misplaced", 1),
    "a list for a rejected row": (lambda rows: rows[3].update(items=rows[0]["items"], short=False), "misplaced", 1),
    "no list for a live row": (lambda rows: rows[0].update(items=None, short=None), "misplaced", 1),
    "a short list without its flag": (lambda rows: rows[0]["items"].pop(), "misplaced", 1),
    "a flag without a short list": (lambda rows: rows[0].update(short=True), "misplaced", 1),
    "a row too few": (lambda rows: rows[:-1], "misplaced", 1),
}


@pytest.fixture(params=[None, 1], ids=["in one piece", "row by row"])
def cut_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts do not depend on the pieces in which a part is read again."""
    if request.param is not None:
        monkeypatch.setattr(audit_module, "cut", lambda shard: cut(shard, request.param))


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("planted", PLANTED)
def test_planted_rows_are_counted(place: Place, planted: str) -> None:
    users = place.users([[100], [101], [102], []], exclude=pa.array([[105], [], None, []], pa.list_(pa.int64())))
    # one reject too many keeps the run's state for a second audit
    options = place.options(users, exclude_seen=True, exclude_col="exclude", max_rejects="0")
    report, _ = place.run(options)
    assert report.record["audit"]["line"] == "users=3, items=15, invalid=0, duplicate=0, seen=0, short=0"
    assert audit_again(place, options).faults == 0
    change, count, expected = PLANTED[planted]
    edit(place.out / "part-00000-of-00001.parquet", change)
    audit = audit_again(place, options)
    assert getattr(audit, count) == expected
    assert f"{count}={expected}" in audit.line() and audit.faults >= expected


@pytest.mark.usefixtures("cut_small")
def test_planted_rows_of_the_long_layout_are_counted(place: Place) -> None:
    users = place.users([[100], [101], []])
    options = place.options(users, layout="long", max_rejects="0", exclude_seen=True)
    place.run(options)
    part = place.out / "part-00000-of-00001.parquet"
    for change, count, expected in (
        (lambda rows: rows[0].update(item_id=7), "invalid", 1),
        (lambda rows: rows[0].update(item_id=100, sid=[0, 0, 0]), "seen", 1),
        (lambda rows: rows[6].update(rank=9), "misplaced", 1),
        (lambda rows: rows[9].update(row=2), "misplaced", 5),
        (lambda rows: rows[9].update(row=77), "misplaced", 5),
        (lambda rows: rows[0].update(user_id="x"), "misplaced", 1),
    ):
        good = part.read_bytes()
        edit(part, change)
        assert getattr(audit_again(place, options), count) == expected
        part.write_bytes(good)
    assert audit_again(place, options).faults == 0


def test_first_of_a_shared_sid_twice_is_a_duplicate(place: Place) -> None:
    from xgr_engine.options import SearchOptions

    users = place.users([[101], []])
    options = place.options(users, search=SearchOptions(beam=40, top_k=40), max_rejects="0")
    # the stand-in engine knows no collision policy: items 100 and 136 share a SID, and so do three more pairs
    place.run(options)
    assert audit_again(place, options).duplicate == 0
    first = place.options(users, search=SearchOptions(beam=40, top_k=40, collisions="first"), max_rejects="0")
    report, _ = place.run(RecommendOptions(**{**vars(first), "out": str(place.root / "first")}))
    assert isinstance(report.failure, AuditError) and report.record["audit"]["duplicate"] == 4


def test_a_failed_audit_exits_1_and_leaves_no_success(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Planting(ShardWork):
        def write(self, piece: Any, *done: Any) -> None:
            super().write(piece, *done)
            edit(place.out / f"{piece.shard.name}.parquet", lambda rows: rows[0]["items"][0].update(item_id=7))

    monkeypatch.setattr(run_module, "ShardWork", Planting)
    report, _ = place.run(place.options(place.users([[100]])))
    assert isinstance(report.failure, AuditError) and report.failure.exit_code == 1
    assert "invalid=1" in report.failure.what
    assert place.manifest()["state"] == "audit-failed" and not (place.out / "_SUCCESS").exists()


def test_an_unreadable_part_fails_the_audit_with_its_name(place: Place) -> None:
    options = place.options(place.users([[100], []]), max_rejects="0")
    place.run(options)
    part = place.out / "part-00000-of-00001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(AuditError, match="part-00000"):
        audit_again(place, options)


def test_histories_are_read_again_in_pieces_however_large_the_shard(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of long histories at once would take gigabytes after all is computed, and again with each new start."""
    asked: list[int] = []

    class Counting(RowReader):
        def read(self, file: int, start: int, stop: int) -> Any:
            asked.append(stop - start)
            return super().read(file, start, stop)

    options = place.options(place.users([[100]] * (2 * PIECE_ROWS) + [[]]), max_rejects="0", exclude_seen=True)
    place.run(options)
    monkeypatch.setattr(shard_work, "RowReader", Counting)
    audit = audit_again(place, options)
    assert (audit.users, audit.rejected, audit.faults) == (2 * PIECE_ROWS, 1, 0)
    assert sum(asked) == 2 * PIECE_ROWS + 1 and max(asked) <= PIECE_ROWS


def test_the_rule_in_force_is_said(place: Place) -> None:
    """cases.md: implicit#316: without the flag seen items may appear; the summary says which rule was on."""
    report, _ = place.run(place.options(place.users([[100]])))
    assert report.record["audit"]["seen"] == "off" and "seen=off" in report.record["audit"]["line"]
    report, _ = place.run(place.options(place.users([[100]]), exclude_seen=True, fresh=True))
    assert "seen=0" in report.record["audit"]["line"]

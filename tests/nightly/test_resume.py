"""A run that was stopped, killed or failed: the same command computes what is missing, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from job_support import Place
from nightly_support import SHARD_ROWS, SHARDS, Gone, Stage, fails_at, raises, same_output

from xgr_engine.errors import OutputExistsError, OutputWriteError
from xgr_engine.job import run as run_module
from xgr_engine.job.engine import LoadedEngine
from xgr_engine.job.options import OperationOptions
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.read_back import AuditError
from xgr_engine.job.resume import NOTES_KEY
from xgr_engine.job.run import Caller, plan_job, run_job
from xgr_engine.job.stop import Stop, Stopped


def test_only_what_is_missing_is_computed_and_the_result_is_the_same(
    place: Place, stage: Stage, users: Path, whole: Path
) -> None:
    """cases.md: kill at any moment, run again: same rows as an uninterrupted run, none twice."""
    options = place.options(users, shard_rows=SHARD_ROWS)
    shards = len(list(whole.glob("part-*")))
    with pytest.raises(Gone):
        stage.run(options, fails_at(4, Gone()))
    there = {path.name: path.stat().st_mtime_ns for path in place.out.glob("part-*")}
    assert 0 < len(there) < shards and not (place.out / "_SUCCESS").exists()
    assert place.manifest()["state"] == "interrupted"
    report = stage.run(options)
    assert report.failure is None and sum(stage.calls) == SHARDS * SHARD_ROWS - len(there) * SHARD_ROWS
    assert same_output(place.out, whole)
    assert all((place.out / name).stat().st_mtime_ns == stamp for name, stamp in there.items())
    record = place.manifest()
    assert [attempt["state"] for attempt in record["attempts"]] == ["interrupted", "done"]
    assert record["attempts"][0]["shards_finished"] == len(there)
    runs = {(pq.read_metadata(part).metadata or {})[b"xgr.run_id"] for part in place.out.glob("part-*")}
    assert runs == {record["run_id"].encode()}
    # of all attempts, not of the last alone
    assert record["counts"]["batches"] == record["batches"]["count"] >= shards


def test_a_request_to_stop_finishes_what_it_can_in_time(place: Place, stage: Stage, users: Path, whole: Path) -> None:
    """cases.md: SIGTERM: stops within the grace period, resumes."""
    options = place.options(users, shard_rows=SHARD_ROWS)
    for grace, state in ((60.0, "in time"), (0.0, "at once")):
        stop = Stop()

        def before(number: int, stop: Stop = stop, grace: float = grace) -> None:
            if number == 2:
                stop.request("SIGTERM", 143, grace)

        done = len(list(place.out.glob("part-*")))
        with pytest.raises(Stopped) as stopped:
            stage.run(options, before, stop)
        assert stopped.value.exit_code == 143, state
        record = place.manifest()
        assert (record["state"], record["attempts"][-1]["signal"]) == ("interrupted", "SIGTERM")
        assert done < len(list(place.out.glob("part-*"))) == record["shards_finished"] < SHARDS
        assert len(stage.calls) <= 4
    stage.run(options)
    assert same_output(place.out, whole)


def test_a_stop_that_a_library_turns_into_its_own_error_is_a_stop_in_the_metrics(place: Place, users: Path) -> None:
    """safetensors puts a ValueError in place of whatever comes out of its callbacks."""
    metrics, stop = place.root / "xgr.prom", Stop()

    def loader(*given: Any) -> LoadedEngine:
        stop.request("SIGTERM", 143, 20)
        try:
            stop.interrupt()
        except Stopped:
            raise ValueError("could not determine the shape") from None
        raise AssertionError("not interrupted")

    options = place.options(users, operation=OperationOptions(metrics_file=str(metrics)))
    with pytest.raises(Stopped):
        run_job(options, Caller(engine_loader=loader, stop=stop))
    assert 'xgr_last_run_exit_code{name="xgr"} 143\n' in metrics.read_text()


def test_a_stop_before_anything_is_written_leaves_nothing(place: Place, stage: Stage, users: Path) -> None:
    stop = Stop()
    stop.request("SIGINT", 130, 20)
    with pytest.raises(Stopped):
        stage.run(place.options(users), stop=stop)
    assert not place.out.exists()


def test_damaged_parts_and_half_written_files_are_done_again(
    place: Place, stage: Stage, users: Path, whole: Path
) -> None:
    """Power loss on a disk that lies: a part without its end, one without its state, temporary files."""
    options = place.options(users, shard_rows=SHARD_ROWS)
    with pytest.raises(Gone):
        stage.run(options, fails_at(6, Gone()))
    parts = sorted(place.out.glob("part-*"))
    assert len(parts) >= 3
    with parts[0].open("r+b") as file:
        file.truncate(parts[0].stat().st_size // 2)
    (place.out / "_xgr" / "shards" / parts[1].name).unlink()
    for folder in (place.out, place.out / "_xgr", place.out / "_xgr" / "shards"):
        (folder / ".xgr-tmp-1-2-part-00009-of-00010.parquet.tmp").write_bytes(b"PAR1")
    stage.run(options)
    assert sum(stage.calls) == SHARDS * SHARD_ROWS - (len(parts) - 2) * SHARD_ROWS
    assert same_output(place.out, whole)
    assert not list(place.out.rglob(".xgr-tmp*"))


@pytest.mark.parametrize("moment", ["lock", "create", "write_manifest", "merge", "audit", "succeed"])
def test_a_process_that_dies_at_an_awkward_moment(
    place: Place, stage: Stage, users: Path, whole: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xgr_engine.job import run
    from xgr_engine.job.shard_work import Finisher

    target = {"lock": OutDir, "create": OutDir, "succeed": OutDir, "merge": Finisher, "audit": Finisher}.get(
        moment, run
    )
    name = "sweep" if moment == "lock" else moment
    real = getattr(target, name)

    def dies(*given: Any) -> Any:
        if moment == "succeed":
            real(*given)
        raise Gone

    options = place.options(users, shard_rows=SHARD_ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, dies)
        with pytest.raises(Gone):
            stage.run(options)
    (place.out / "_xgr").mkdir(parents=True, exist_ok=True)
    (place.out / "_xgr" / "lock").write_text("left behind")
    report = stage.run(options)
    assert report.failure is None and same_output(place.out, whole)
    if moment in ("merge", "audit", "succeed"):
        assert stage.calls == [], "nothing is computed again"
    assert not (place.out / "_xgr" / "shards").exists()


def test_a_flipped_byte_in_an_unfinished_run_costs_only_its_shard(place: Place, stage: Stage, users: Path) -> None:
    """In the state of a shard it is found at the start, in a part by the audit, which says what helps."""
    rejected = [[]] + [[100 + at, 101 + at] for at in range(29)]
    options = place.options(place.users(rejected), shard_rows=10)

    def flip(path: Path) -> None:
        start = pq.read_metadata(path).row_group(0).column(0).data_page_offset
        data = bytearray(path.read_bytes())
        data[start : start + 16] = bytes(16)
        path.write_bytes(data)

    with pytest.raises(Gone):
        stage.run(options, fails_at(2, Gone()))
    flip(place.out / "_xgr" / "shards" / "part-00000-of-00003.parquet")
    with pytest.raises(Gone):
        stage.run(options, fails_at(2, Gone()))
    part = place.out / "part-00000-of-00003.parquet"
    flip(part)
    with pytest.raises(AuditError, match="remove this file and run the same command"):
        stage.run(options)
    part.unlink()
    report = stage.run(options)
    assert report.record["state"] == "too-many-rejects" and stage.calls == [9]


@pytest.mark.parametrize("notes", [None, b"{", b"[]", b"{}", b'{"counts": {"rows": "1"}, "batch_seconds": []}'])
def test_a_shard_whose_state_has_no_sound_notes_is_done_again(
    place: Place, stage: Stage, users: Path, whole: Path, notes: bytes | None
) -> None:
    """They are in the metadata of a Parquet file, which no checksum covers."""
    options = place.options(users, shard_rows=SHARD_ROWS)
    with pytest.raises(Gone):
        stage.run(options, fails_at(3, Gone()))
    state = place.out / "_xgr" / "shards" / f"part-00000-of-{SHARDS:05d}.parquet"
    table = pq.read_table(state)
    pq.write_table(table.replace_schema_metadata(None if notes is None else {NOTES_KEY: notes}), state)
    assert stage.run(options).record["state"] == "done"
    assert stage.calls[0] == SHARD_ROWS and same_output(place.out, whole)


def test_shard_states_that_cannot_be_removed_fail_no_finished_run(place: Place, stage: Stage, users: Path) -> None:
    """As over NFS while a backup reads one: the file gets another name, and its directory stays."""
    held = place.out / "_xgr" / "shards" / ".nfs0001"
    report = stage.run(place.options(users), lambda number: held.mkdir(exist_ok=True))
    assert report.failure is None and (place.out / "_SUCCESS").exists() and place.manifest()["state"] == "done"
    assert stage.run(place.options(users)).record["state"] == "nothing-to-do"


def test_a_stop_just_after_the_first_manifest_is_in_it(
    place: Place, stage: Stage, users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said running, of a run that had ended in good order."""
    write = run_module.write_manifest

    def stopped_once(path: Path, record: Any) -> None:
        write(path, record)
        if record["state"] == "running":
            raise Stopped("SIGTERM", 143)

    monkeypatch.setattr(run_module, "write_manifest", stopped_once)
    with pytest.raises(Stopped):
        stage.run(place.options(users))
    assert (place.manifest()["state"], place.manifest()["attempts"][-1]["signal"]) == ("interrupted", "SIGTERM")


@pytest.mark.parametrize("error", [Stopped("SIGTERM", 143), OutputWriteError("no space for the directory")])
def test_what_ends_a_run_after_success_leaves_its_manifest_done(
    place: Place, stage: Stage, users: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Nothing would mend it: the same command finds nothing to do."""
    stop = Stop()
    with monkeypatch.context() as patch:
        patch.setattr(OutDir, "tidy", raises(error))
        with pytest.raises(type(error)):
            stage.run(place.options(users), stop=stop)
    assert (place.out / "_SUCCESS").exists() and place.manifest()["state"] == "done"
    stop.request("SIGTERM", 143, 0)
    stop.last_words()
    record = place.manifest()
    assert (record["state"], record["attempts"][-1]["state"]) == ("done", "done") and "error" not in record
    assert stage.run(place.options(users)).record["state"] == "nothing-to-do"


def test_fresh_after_an_interruption_begins_anew(place: Place, stage: Stage, users: Path, whole: Path) -> None:
    options = place.options(users, shard_rows=SHARD_ROWS)
    with pytest.raises(Gone):
        stage.run(options, fails_at(4, Gone()))
    first = place.manifest()["run_id"]
    stage.run(place.options(users, shard_rows=SHARD_ROWS, fresh=True))
    assert sum(stage.calls) == SHARDS * SHARD_ROWS and same_output(place.out, whole)
    assert place.manifest()["run_id"] != first and len(place.manifest()["attempts"]) == 1


def test_an_unfinished_run_of_other_options_refuses_naming_the_option(place: Place, stage: Stage, users: Path) -> None:
    with pytest.raises(Gone):
        stage.run(place.options(users, shard_rows=SHARD_ROWS), fails_at(4, Gone()))
    with pytest.raises(OutputExistsError, match="--shard-rows was 40, is 50") as refused:
        stage.run(place.options(users, shard_rows=50))
    assert refused.value.exit_code == 2 and stage.calls == []
    harmless = place.options(users, shard_rows=SHARD_ROWS, max_memory=10**8, threads=1, max_rejects="50%")
    assert stage.run(harmless).failure is None


def test_dry_run_tells_what_is_left(place: Place, stage: Stage, users: Path) -> None:
    options = place.options(users, shard_rows=SHARD_ROWS)
    with pytest.raises(Gone):
        stage.run(options, fails_at(4, Gone()))
    output = plan_job(options).record["output"]
    assert output["state"] == "partial" and output["shards_finished"] == len(list(place.out.glob("part-*")))

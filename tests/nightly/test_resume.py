"""Resuming, inside one process: what is computed again, what is not, and what refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import Place
from nightly_support import Stage, rows_of, same_output, write_users

from xgr_engine.errors import HistoryError, InputError, OutputExistsError, OutputWriteError, XgrError
from xgr_engine.job import run as run_module
from xgr_engine.job.engine import LoadedEngine
from xgr_engine.job.options import OperationOptions
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.read_back import AuditError
from xgr_engine.job.run import Caller, plan_job, run_job
from xgr_engine.job.stop import Stop, Stopped
from xgr_engine.metrics.recs import open_recommendations

SHARDS, SHARD_ROWS = 10, 40


class Gone(BaseException):
    """Stands for a process that ends without a word."""


def fails_at(batch: int, error: BaseException) -> Any:
    def before(number: int) -> None:
        if number == batch:
            raise error

    return before


def raises(error: BaseException) -> Any:
    def instead(*given: Any) -> None:
        raise error

    return instead


@pytest.fixture
def users(place: Place) -> Path:
    return write_users(place.root / "users.parquet", SHARDS * SHARD_ROWS, 80)


@pytest.fixture
def whole(place: Place, stage: Stage, users: Path) -> Path:
    """The output of an uninterrupted run."""
    out = place.root / "whole"
    report = stage.run(place.options(users, shard_rows=SHARD_ROWS, out=str(out)))
    assert report.failure is None and len(stage.calls) == report.record["counts"]["batches"]
    return out


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


def test_shard_states_that_cannot_be_removed_fail_no_finished_run(place: Place, stage: Stage, users: Path) -> None:
    """As over NFS while a backup reads one: the file gets another name, and its directory stays."""
    held = place.out / "_xgr" / "shards" / ".nfs0001"
    report = stage.run(place.options(users), lambda number: held.mkdir(exist_ok=True))
    assert report.failure is None and (place.out / "_SUCCESS").exists() and place.manifest()["state"] == "done"
    assert stage.run(place.options(users)).record["state"] == "nothing-to-do"


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


def test_a_part_that_vanished_from_a_finished_output_is_said(place: Place, stage: Stage, users: Path) -> None:
    options = place.options(users, shard_rows=SHARD_ROWS)
    stage.run(options)
    sorted(place.out.glob("part-*"))[2].unlink()
    with pytest.raises(OutputExistsError, match="part files are now missing"):
        stage.run(options)


def test_a_damaged_part_of_a_finished_output_is_said(place: Place, stage: Stage, users: Path, whole: Path) -> None:
    """Not 'nothing to do': whoever reads the output next would meet half a file, or another run's rows."""
    options = place.options(users, shard_rows=SHARD_ROWS, out=str(whole))
    part = min(whole.glob("part-*"))
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2])
    with pytest.raises(OutputExistsError, match=f"missing or damaged: {part.name}"):
        stage.run(options)
    pq.write_table(pa.table({"user_id": ["x"]}), part)
    with pytest.raises(OutputExistsError, match=f"missing or damaged: {part.name}"):
        stage.run(options)


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_byte_inside_a_part_is_noticed_by_recommend_and_eval(
    place: Place, stage: Stage, users: Path, whole: Path
) -> None:
    """Size and footer are those that were written; both commands used to exit 0 with it."""
    options = place.options(users, shard_rows=SHARD_ROWS, out=str(whole))
    part = sorted(whole.glob("part-*"))[4]
    with pq.ParquetFile(part) as file:
        group = file.metadata.row_group(0)
        chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.endswith("item_id"))
    middle = (chunk.data_page_offset + chunk.total_compressed_size / 2 - 8) / part.stat().st_size
    flip(part, middle)
    with pytest.raises(OutputExistsError, match=f"missing or damaged: {part.name}"):
        stage.run(options)
    with pytest.raises(InputError, match=part.name):
        for _ in open_recommendations(whole, None).chunks():
            pass


def test_a_copy_of_a_part_under_the_name_of_another_is_noticed(
    place: Place, stage: Stage, users: Path, whole: Path
) -> None:
    options = place.options(users, shard_rows=SHARD_ROWS, out=str(whole))
    first, second = sorted(whole.glob("part-*"))[:2]
    shutil.copy(first, second)
    with pytest.raises(OutputExistsError, match=f"missing or damaged: {second.name}"):
        stage.run(options)
    with pytest.raises(InputError, match=f"{second.name} .* is a copy of another part"):
        open_recommendations(whole, None)


def test_a_copied_output_is_complete_although_its_times_are_new(
    place: Place, stage: Stage, users: Path, whole: Path
) -> None:
    shutil.copytree(whole, place.root / "copy", copy_function=shutil.copyfile)
    report = stage.run(place.options(users, shard_rows=SHARD_ROWS, out=str(place.root / "copy")))
    assert report.record["state"] == "nothing-to-do"


@pytest.mark.parametrize("text", ["", '{"kind": "recomm', "{}", "[1]"])
def test_a_damaged_manifest_is_said_and_fresh_begins_anew(
    place: Place, stage: Stage, users: Path, whole: Path, text: str
) -> None:
    """It used to be called the output of somebody else, and --fresh refused as well."""
    (whole / "_xgr" / "manifest.json").write_text(text)
    given = {"shard_rows": SHARD_ROWS, "out": str(whole)}
    with pytest.raises(OutputExistsError, match=r"manifest\.json is damaged") as caught:
        stage.run(place.options(users, **given))
    assert "--fresh" in caught.value.hint
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        open_recommendations(whole, None)
    foreign = whole / "notes.txt"
    foreign.write_text("mine")
    with pytest.raises(OutputExistsError, match=r"did not write: notes\.txt"):
        stage.run(place.options(users, fresh=True, **given))
    foreign.unlink()
    assert stage.run(place.options(users, fresh=True, **given)).record["state"] == "done"


def test_a_manifest_of_another_program_is_not_called_damaged(place: Place, stage: Stage, users: Path) -> None:
    (place.out / "_xgr").mkdir(parents=True)
    (place.out / "_xgr" / "manifest.json").write_text('{"kind": "something else"}')
    for fresh in (False, True):
        with pytest.raises(OutputExistsError, match="did not write"):
            stage.run(place.options(users, fresh=fresh))


# ---- inputs that change or are damaged ------------------------------------------------------------------------------


def test_an_input_cut_short_during_the_run_is_noticed(place: Place, stage: Stage, users: Path) -> None:
    def cut(number: int) -> None:
        if number == 2:
            with users.open("r+b") as file:
                file.truncate(users.stat().st_size // 3)

    with pytest.raises(HistoryError, match="changed during the run"):
        stage.run(place.options(users, shard_rows=SHARD_ROWS), cut)
    assert not (place.out / "_SUCCESS").exists() and place.manifest()["state"] == "failed"


@pytest.mark.parametrize("how", ["renamed over", "written over"])
def test_nothing_is_committed_from_an_input_that_was_replaced(
    place: Place, stage: Stage, users: Path, whole: Path, how: str
) -> None:
    """What was committed before is what the fingerprint says: with the old file back the run goes on."""
    copy, other = place.root / "copy", place.root / "other"
    shutil.copyfile(users, copy)
    write_users(other, SHARDS * SHARD_ROWS, 80, seed=1)
    options = place.options(users, shard_rows=SHARD_ROWS)

    def replace(number: int) -> None:
        if number == 2:
            if how == "renamed over":
                other.replace(users)
            else:
                users.write_bytes(other.read_bytes())

    with pytest.raises(HistoryError, match="changed during the run"):
        stage.run(options, replace)
    expected = dict(rows_of(whole))
    assert all(table.equals(expected[name]) for name, table in rows_of(place.out))
    with pytest.raises(OutputExistsError, match=r"contents of users.parquet changed"):
        stage.run(options)
    shutil.copyfile(copy, users)
    stage.run(options)
    assert same_output(place.out, whole)


def damage(path: Path, group: int) -> None:
    """Flips bytes in the middle of a row group's list column."""
    column = pq.read_metadata(path).row_group(group).column(1)
    with path.open("r+b") as file:
        file.seek(column.data_page_offset + column.total_compressed_size // 2)
        file.write(bytes([0xA5] * 16))


@pytest.mark.parametrize("how", [{"compression": "zstd"}, {"compression": "none", "write_page_checksum": True}])
def test_a_corrupt_row_group_costs_only_its_shards(
    place: Place, stage: Stage, users: Path, whole: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other shard is finished; with a good copy in place the same command computes the rest."""
    write_users(users, SHARDS * SHARD_ROWS, 80, **how)
    good = place.root / "good.parquet"
    shutil.copyfile(users, good)
    damage(users, 1)
    options = place.options(users, shard_rows=SHARD_ROWS)
    report = stage.run(options)
    assert isinstance(report.failure, InputError) and report.failure.exit_code == 2
    assert "could not be read" in report.failure.what and "users.parquet" in report.failure.what
    record = place.manifest()
    lost = record["unreadable"][0]["shards"]
    assert record["state"] == "unreadable" and not (place.out / "_SUCCESS").exists()
    assert record["shards_finished"] == record["shards"] - len(lost) == len(list(place.out.glob("part-*")))
    assert isinstance(stage.run(options).failure, InputError) and stage.calls == []
    # nor does an attempt that ends before it reads the damage again
    with pytest.raises(Gone), monkeypatch.context() as patch:
        patch.setattr(run_module, "_pipeline", raises(Gone()))
        stage.run(options)
    shutil.copyfile(good, users)
    # a kill between the two changes nothing
    with pytest.raises(Gone):
        stage.run(options, fails_at(1, Gone()))
    report = stage.run(options)
    assert report.failure is None and same_output(place.out, whole)
    assert "unreadable" not in place.manifest()
    assert stage.run(options).record["state"] == "nothing-to-do"


def test_a_mended_input_must_be_the_same_where_it_was_read(place: Place, stage: Stage, users: Path) -> None:
    damage(users, 1)
    options = place.options(users, shard_rows=SHARD_ROWS)
    assert isinstance(stage.run(options).failure, InputError)
    write_users(users, SHARDS * SHARD_ROWS, 80, seed=1)
    with pytest.raises(OutputExistsError, match=r"contents of users.parquet changed"):
        stage.run(options)


def test_on_error_fail_stops_at_the_first_damaged_row_group(place: Place, stage: Stage, users: Path) -> None:
    damage(users, 1)
    with pytest.raises(HistoryError, match="cannot be read"):
        stage.run(place.options(users, shard_rows=SHARD_ROWS, on_error="fail"))


def test_a_damaged_model_is_named_and_does_not_touch_a_started_output(
    place: Place, stage: Stage, users: Path, tmp_path: Path
) -> None:
    """A flipped byte in the model directory: the tensor is named, exit 2; the run goes on with a good copy."""
    model = Path(shutil.copytree(place.model, tmp_path / "m"))
    options = place.options(users, shard_rows=SHARD_ROWS, model=str(model))
    with pytest.raises(Gone):
        stage.run(options, fails_at(4, Gone()))
    before = (place.out / "_xgr" / "manifest.json").read_bytes()
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(XgrError, match=r"damaged: norm\.weight") as failure:
        stage.run(options)
    assert failure.value.exit_code == 2 and (place.out / "_xgr" / "manifest.json").read_bytes() == before
    data[-5] ^= 1
    weights.write_bytes(data)
    assert stage.run(options).failure is None


def test_a_file_under_another_partition_is_another_input(place: Place, stage: Stage) -> None:
    """The value in the directory's name is a column of its rows."""
    for day in ("1", "2"):
        (place.root / f"dt={day}").mkdir()
        write_users(place.root / f"dt={day}" / "users.parquet", 40, 40)
    stage.run(place.options(place.root / "dt=1", keep=("dt",)))
    with pytest.raises(OutputExistsError, match="inputs: other files"):
        stage.run(place.options(place.root / "dt=2", keep=("dt",)))


# ---- rows that make the engine raise --------------------------------------------------------------------------------


def test_only_the_row_that_makes_the_engine_raise_is_rejected(place: Place, stage: Stage, users: Path) -> None:
    """Its batch is cut until the row is found; the others get what they get without it."""
    whole = place.root / "whole"
    stage.run(place.options(users, shard_rows=SHARD_ROWS, out=str(whole)))
    bad = [7, 8, 133]
    table = pq.read_table(users).to_pylist()
    for row in bad:
        table[row]["history"] = [139] * 9
    prompts_of_bad = 9 * 3

    def fails(prompts: list[Any]) -> bool:
        return any(len(prompt) == prompts_of_bad for prompt in prompts)

    pq.write_table(pa.Table.from_pylist(table, schema=pq.read_schema(users)), users, row_group_size=80)
    report = stage.run(place.options(users, shard_rows=SHARD_ROWS, max_rejects="3"), fails=fails)
    assert report.failure is None and report.record["audit"]["misplaced"] == 0
    assert [(row["row"], row["user"], row["reason"]) for row in place.rejects()] == [
        (row, f"u{row}", "engine-error") for row in bad
    ]
    assert all("a row that makes the engine raise" in row["detail"] for row in place.rejects())
    mine, theirs = (pa.concat_tables([part for _, part in rows_of(out)]) for out in (place.out, whole))
    for row in range(SHARDS * SHARD_ROWS):
        assert (mine["items"][row].as_py() is None) if row in bad else mine.slice(row, 1).equals(theirs.slice(row, 1))


def test_memory_that_is_short_is_an_event_and_not_a_reject(place: Place, stage: Stage, users: Path) -> None:
    """cases.md: LC-Rec: out of memory in a batch: split and retried; the event is in the manifest and the metrics."""
    metrics = place.root / "xgr.prom"

    def short(number: int) -> None:
        if number == 1:
            raise MemoryError("no memory left")

    operation = OperationOptions(metrics_file=str(metrics))
    report = stage.run(place.options(users, shard_rows=SHARD_ROWS, operation=operation), short)
    assert report.failure is None and report.record["counts"]["rejects"] == 0
    [event] = report.record["events"]
    assert event["kind"] == "out-of-memory" and event["attempt"] == 1 and event["users"] > 1
    assert 'xgr_events{name="xgr",kind="out-of-memory"} 1\n' in metrics.read_text()


def test_a_run_with_nothing_to_do_leaves_the_figures_of_the_one_that_worked(
    place: Place, stage: Stage, users: Path
) -> None:
    """A schedule starts the job again each hour; a second start must not empty the series that alerts look at."""
    metrics = place.root / "xgr.prom"
    options = place.options(users, operation=OperationOptions(metrics_file=str(metrics)))

    def written() -> list[str]:
        assert stage.run(options).failure is None
        return [line for line in metrics.read_text().splitlines() if "xgr_last_run_timestamp" not in line]

    first = written()
    assert any(line.startswith('xgr_duration_seconds{name="xgr",stage="total"} ') for line in first)
    assert written() == first

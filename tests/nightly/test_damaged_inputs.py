"""Inputs that change while they are read, or are damaged, and rows that the engine cannot compute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import Place
from nightly_support import SHARD_ROWS, SHARDS, Gone, Stage, fails_at, raises, rows_of, same_output, write_users

from xgr_engine.errors import HistoryError, InputError, OutputExistsError, XgrError
from xgr_engine.job import run as run_module
from xgr_engine.job.options import OperationOptions


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

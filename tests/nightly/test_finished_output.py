"""An output that was finished: what is missing or damaged in it is said, by recommend and by eval."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import Place
from nightly_support import SHARD_ROWS, Stage, flip

from xgr_engine.errors import InputError, OutputExistsError
from xgr_engine.job.options import OperationOptions
from xgr_engine.metrics.recs import open_recommendations


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

"""Directories partitioned by column values: read with their columns, written by --partition-by, resumed and audited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filter_support import ITEMS, make_assets, of_items, options_for

from xgr_engine.errors import HistoryError, OutputExistsError, UsageError
from xgr_engine.job.inputs import find_partitioned, open_inputs
from xgr_engine.job.options import HistoryOptions
from xgr_engine.job.partitions import folder_of, partition_of
from xgr_engine.job.run import run_job
from xgr_engine.metrics.recs import open_recommendations
from xgr_engine.options import SearchOptions


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_assets(tmp_path_factory.mktemp("partition-assets"))


def write(path: Path, users: list[str], **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    history = pa.array([[100 + i] for i in range(len(users))])
    pq.write_table(pa.table({"user_id": users, "history": history, **columns}), path)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "users"
    write(root / "dt=2026-11-29" / "country=AT" / "a.parquet", ["u0", "u1", "u2"])
    write(root / "dt=2026-11-29" / "country=DE" / "a.parquet", ["u3"])
    write(root / "dt=2026-11-30" / "country=__HIVE_DEFAULT_PARTITION__" / "a.parquet", ["u4", "u5"])
    write(root / "dt=2026-11-30" / "country=A%20B%3D" / "b.parquet", ["u6"])
    (root / "dt=2026-11-30" / "_SUCCESS").touch()
    return root


def parts(out: Path) -> list[Path]:
    return sorted(out.rglob("part-*.parquet"), key=lambda path: path.name)


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for part in parts(out) for row in pq.ParquetFile(part).read().to_pylist()]


def test_partition_columns_pass_through_and_can_be_matched(
    assets: tuple[Path, Path], tree: Path, tmp_path: Path
) -> None:
    options = options_for(tmp_path, *assets, tree, SearchOptions(beam=40, top_k=40), match=("country",), shard_rows=2)
    report = run_job(options)
    written = rows(tmp_path / "recs")
    assert list(written[0]) == ["user_id", "dt", "country", "items", "short"]
    expected = [("2026-11-29", "AT")] * 3 + [("2026-11-29", "DE"), ("2026-11-30", "A B=")] + [("2026-11-30", None)] * 2
    assert [(row["dt"], row["country"]) for row in written] == expected
    country = of_items("country")
    for row in written:
        mine = {item for item in ITEMS if row["country"] and country[item] == row["country"]}
        assert {item["item_id"] for item in row["items"]} == mine
    assert report.failure is None and report.record["counts"]["without_match"] == 3


@pytest.mark.parametrize("layout", ["nested", "long"])
def test_partitioned_output_and_its_readers(assets: tuple[Path, Path], tree: Path, tmp_path: Path, layout: Any) -> None:
    plain, divided = tmp_path / "plain", tmp_path / "divided"
    run_job(options_for(tmp_path, *assets, tree, layout=layout, out=str(plain)))
    options = options_for(tmp_path, *assets, tree, layout=layout, out=str(divided), partition_by=("dt", "country"))
    report = run_job(options)
    assert report.failure is None and (divided / "_SUCCESS").exists()
    folders = {str(part.parent.relative_to(divided)) for part in parts(divided)}
    assert folders == {
        "dt=2026-11-29/country=AT", "dt=2026-11-29/country=DE",
        "dt=2026-11-30/country=__HIVE_DEFAULT_PARTITION__", "dt=2026-11-30/country=A B%3D",
    }  # fmt: skip
    without = [{k: v for k, v in row.items() if k not in ("dt", "country")} for row in rows(plain)]
    assert rows(divided) == without
    # another reader finds the columns again
    frame = pl.read_parquet(f"{divided}/**/part-*.parquet", hive_partitioning=True, try_parse_hive_dates=False)
    assert sorted(map(str, frame["country"].to_list())) == sorted(str(row["country"]) for row in rows(plain))
    assert run_job(options).record["state"] == "nothing-to-do"
    assert [path.name for path in open_recommendations(divided, None).files] == [p.name for p in parts(divided)]


def test_an_interrupted_partitioned_run_completes_and_fresh_replaces_it(
    assets: tuple[Path, Path], tree: Path, tmp_path: Path
) -> None:
    options = options_for(tmp_path, *assets, tree, partition_by=("dt",), shard_rows=2)
    run_job(options)
    out = tmp_path / "recs"
    whole = rows(out)
    parts(out)[1].unlink()
    with pytest.raises(OutputExistsError, match="part files are now missing"):
        run_job(options)
    fresh = options_for(tmp_path, *assets, tree, partition_by=("country",), fresh=True)
    (out / "dt=2026-11-29" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"dt=2026-11-29/notes.txt"):
        run_job(fresh)
    (out / "dt=2026-11-29" / "notes.txt").unlink()
    run_job(fresh)
    assert not list(out.glob("dt=*")) and len(list(out.glob("country=*"))) == 4
    assert [row["user_id"] for row in rows(out)] == [row["user_id"] for row in whole]


def test_what_counts_as_a_partition(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the named directory on, its own name included; from a glob's first pattern on; never for a named file."""
    day = tree / "dt=2026-11-29"
    named = [dict(partition) for _, partition in find_partitioned((str(day),))]
    assert named == [{"dt": "2026-11-29", "country": "AT"}, {"dt": "2026-11-29", "country": "DE"}]
    glob = [dict(partition) for _, partition in find_partitioned((str(tree / "dt=*-29" / "*" / "*.parquet"),))]
    folders = [dict(partition) for _, partition in find_partitioned((str(tree / "dt=*-29"),))]
    assert glob == folders == named
    assert find_partitioned((str(day / "country=AT" / "a.parquet"),))[0][1] == ()
    assert partition_of(["x", "a=1=2", "=b", "c=%2F"]) == (("a", "1=2"), ("c", "/"))
    assert folder_of((("a", "1=2/3"), ("c d", None))) == "a=1%3D2%2F3/c%20d=__HIVE_DEFAULT_PARTITION__"
    with pytest.raises(HistoryError, match="two directories"):
        partition_of(["a=1", "a=2"])


def test_the_directory_has_the_last_word(tmp_path: Path) -> None:
    root = tmp_path / "users"
    write(root / "dt=a" / "x.parquet", ["u0"], dt=["file"], other=[1])
    write(root / "dt=b" / "x.parquet", ["u1"], dt=["file"], other=[2])
    for keep in ((), ("dt",), ("*",)):
        inputs = open_inputs(HistoryOptions((str(root),), keep=keep))
        assert inputs.schema.names.count("dt") == 1 and inputs.schema.field("dt").type == pa.string()


def test_files_that_disagree_and_columns_that_are_no_partition_are_refused(
    assets: tuple[Path, Path], tree: Path, tmp_path: Path
) -> None:
    for name in ("user_id", "history", "nothing"):
        with pytest.raises(UsageError, match=f"--partition-by {name}"):
            run_job(options_for(tmp_path, *assets, tree, partition_by=(name,)))
    write(tree / "plain.parquet", ["u9"])
    with pytest.raises(HistoryError, match="not in every input file") as caught:
        open_inputs(HistoryOptions((str(tree),)))
    assert "by themselves" in str(caught.value.hint), "--keep does not help: partition columns are always copied"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_text_files_in_partitions(assets: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "users" / "hour=05"
    folder.mkdir(parents=True)
    text = 'user_id,history\nu0,"[100]"\n' if kind == "csv" else '{"user_id": "u0", "history": [100]}\n'
    (folder / f"a.{kind}").write_text(text)
    given: dict[str, Any] = {"list_text": "json"} if kind == "csv" else {}
    run_job(options_for(tmp_path, *assets, tmp_path / "users", keep=("hour",), **given))
    assert [row["hour"] for row in rows(tmp_path / "recs")] == ["05"]


def test_a_partition_column_can_be_the_user_column(assets: tuple[Path, Path], tree: Path, tmp_path: Path) -> None:
    report = run_job(options_for(tmp_path, *assets, tree, user_col="dt"))
    assert report.failure is None and [row["dt"] for row in rows(tmp_path / "recs")][:4] == ["2026-11-29"] * 4

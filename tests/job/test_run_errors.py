"""Jobs that fail, reject rows, refuse an output or find nothing to do, and what their manifest says."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import Place, make_vocabulary

from xgr_engine.errors import HistoryError, OutputExistsError, TooManyRejectsError, UsageError, XgrError
from xgr_engine.job.run import plan_job
from xgr_engine.options import SearchOptions
from xgr_engine.system import cpu_name


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

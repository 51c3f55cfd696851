"""``xgr recommend`` as a user meets it: options, exit codes, one result on stdout; and the fixture's golden lists."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gated import Gate
from job_support import Place

from xgr_cli.main import run


def xgr(place: Place, *more: str, users: Path | None = None) -> int:
    paths = ["--model", str(place.model), "--vocab", str(place.vocab), "--out", str(place.out), "--device", "cpu"]
    given = ["--in", str(users)] if users is not None else []
    return run(["recommend", *given, *paths, "--beam", "16", "--top-k", "5", *more])


def test_a_run_as_json_then_nothing_to_do(place: Place, capsys: Any) -> None:
    users = place.users([[100], [101, 102], []], country=["a", "b", "c"])
    code = xgr(place, "--json", "--exclude-seen", "--keep", "country", "--max-rejects", "1", users=users)
    record = json.loads(capsys.readouterr().out)
    assert code == 0 and record["state"] == "done" and record["counts"]["rejects_by_reason"] == {"empty-history": 1}
    assert record["audit"]["line"] == "users=2, items=10, invalid=0, duplicate=0, seen=0, short=0"
    assert record["options"]["search.beam"] == {"value": 16, "origin": "command line"}
    assert record["options"]["search.score_over"]["origin"] == "default"
    assert record["options"]["histories.paths"]["origin"] == "command line"
    assert record["engine"]["dtype"] == "float32" and record["engine"]["device"] == "cpu"
    assert place.written().column_names == ["user_id", "country", "items", "short"]
    code = xgr(place, "--json", "--exclude-seen", "--keep", "country", "--max-rejects", "1", users=users)
    assert code == 0 and json.loads(capsys.readouterr().out)["state"] == "nothing-to-do"


def test_exit_codes(place: Place, capsys: Any) -> None:
    users = place.users([[100], []])
    assert xgr(place, users=place.root / "nothing.parquet") == 2
    assert xgr(place, "--beam", "2", users=users) == 2
    assert xgr(place, "--history-format", "prompt", "--exclude-seen", users=users) == 2
    assert "--exclude-col" in capsys.readouterr().err
    assert xgr(place, "--max-rejects", "0", users=users) == 3
    shown = capsys.readouterr()
    assert "audit: users=1" in shown.out and "1 of 2 rows were rejected" in shown.err
    assert xgr(place, "--max-rejects", "1", users=users) == 0
    assert xgr(place, "--max-rejects", "1", "--top-k", "6", users=users) == 2
    assert "--top-k was 5, is 6" in capsys.readouterr().err
    assert xgr(place, "--max-rejects", "1", "--top-k", "6", "--fresh", users=users) == 0


def test_a_finished_output_is_held_to_a_stricter_limit(place: Place, capsys: Any) -> None:
    """Exit 3, as if the limit had been there from the start; the output itself stays."""
    users = place.users([[100], []])
    assert xgr(place, "--max-rejects", "1", users=users) == 0
    manifest = (place.out / "_xgr" / "manifest.json").read_bytes()
    capsys.readouterr()
    assert xgr(place, "--max-rejects", "0", users=users) == 3
    shown = capsys.readouterr()
    assert "1 of 2 rows were rejected, but --max-rejects 0 allows 0" in shown.err and "nothing to do" not in shown.out
    assert xgr(place, "--max-rejects", "0", "--json", users=users) == 3
    assert json.loads(capsys.readouterr().out)["state"] == "too-many-rejects"
    assert (place.out / "_xgr" / "manifest.json").read_bytes() == manifest and (place.out / "_SUCCESS").exists()
    assert xgr(place, "--max-rejects", "50%", users=users) == 0


def test_a_quiet_run_still_warns_of_what_it_could_not_write(place: Place, capsys: Any) -> None:
    users = place.users([[100]])
    for option in ("--metrics-file", "--trace"):
        # no file can be made there
        assert xgr(place, "--quiet", "--fresh", option, "/proc/xgr-file", users=users) == 0
        assert f"warning: {option} /proc/xgr-file cannot be written: " in capsys.readouterr().err
        looped = place.root / "loop"
        looped.unlink(missing_ok=True)
        looped.symlink_to(looped)
        assert xgr(place, "--quiet", "--fresh", option, str(looped), users=users) == 0
        assert f"{option} {looped} cannot be written: Too many levels" in capsys.readouterr().err


def test_an_output_of_another_scheme_is_refused(place: Place, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become a directory that is called ``gs:``."""
    monkeypatch.chdir(place.root)
    assert xgr(place, "--out", "gs://bucket/recs", users=place.users([[100]])) == 2
    assert "--out gs://bucket/recs: only s3:// is known" in capsys.readouterr().err
    assert not (place.root / "gs:").exists()


def test_a_dry_run_leaves_the_metrics_of_the_last_run(place: Place) -> None:
    users, metrics = place.users([[100]]), place.root / "job.prom"
    metrics.write_text("last night's")
    given = ("--metrics-file", str(metrics), "--max-rejects", "x")
    assert xgr(place, *given, "--dry-run", users=users) == 2 and metrics.read_text() == "last night's"
    assert xgr(place, *given, users=users) == 2 and 'exit_code{name="job"} 2' in metrics.read_text()


def test_dry_run_and_environment(place: Place, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    users = place.users([[100]] * 5)
    monkeypatch.setenv("XGR_SHARD_ROWS", "2")
    assert xgr(place, "--dry-run", "--json", "--max-memory", "64MB", users=users) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["shards"] == 3 and record["memory_plan"]["budget_bytes"] == 64_000_000
    assert record["memory_plan"]["largest_batch_bytes"] <= 64_000_000 and not place.out.exists()
    assert xgr(place, "--dry-run", users=users) == 0
    assert "Nothing was written" in capsys.readouterr().out


def test_a_run_from_the_paths_of_the_documentation(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default paths: ./vocab ./model ./recs."""
    place.users([[100]])
    monkeypatch.chdir(place.root)
    (place.root / "vocab").symlink_to(place.vocab)
    (place.root / "model").symlink_to(place.model)
    assert run(["recommend", "--in", "users.parquet", "--device", "cpu", "-q"]) == 0
    assert len(pq.ParquetFile("recs/part-00000-of-00001.parquet").read()["items"].to_pylist()[0]) == 40


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stopped_run_leaves_no_half_file(place: Place, stop: signal.Signals) -> None:
    users = place.users([[100 + (i + j) % 40 for j in range(8)] for i in range(8_000)])
    gate = Gate(place.root / "gate", 2)
    command = [
        *gate.command, "recommend", "--in", str(users), "--model", str(place.model),
        "--vocab", str(place.vocab), "--out", str(place.out), "--beam", "16", "--top-k", "5", "--shard-rows", "500",
    ]  # fmt: skip
    # a signal that this process ignores, as SIGINT in the background of a script, would be ignored by the child too
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(stop, signal.SIG_DFL),
    )
    try:
        while len(list(place.out.glob("part-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(stop)
        assert process.stderr is not None
        while "stopping within" not in (line := process.stderr.readline()):
            assert line, "it ended without a word"
        gate.open()
        assert process.wait() == (143 if stop == signal.SIGTERM else 130)
    finally:
        process.kill()
        process.communicate()
    parts = sorted(place.out.glob("part-*.parquet"))
    assert 2 <= len(parts) < 16 and not (place.out / "_SUCCESS").exists()
    for number, part in enumerate(parts):
        rows = pq.ParquetFile(part).read()
        assert rows["user_id"].to_pylist() == [f"u{i}" for i in range(500 * number, 500 * number + 500)]


@pytest.mark.shared_data
def test_the_fixture_gives_the_golden_lists(shared_data: Path, tmp_path: Path, capsys: Any) -> None:
    """All golden users of the industrial fixture through the command line: SIDs, scores and order of transformers."""
    data = shared_data / "industrial"
    vocab, model, out = (str(tmp_path / name) for name in ("vocab", "model", "recs"))
    assert run(["build-vocab", str(data / "catalog.index.json"), "--out", vocab, "-q"]) == 0
    assert run(["convert", str(data / "qwen3"), "--out", model, "--prompt", "minionerec-eval", "-q"]) == 0
    paths = ["--model", model, "--vocab", vocab, "--out", out, "--device", "cpu", "--collisions", "first", "-q"]
    golden = json.loads((data / "golden_qwen3.json").read_text())["users"]
    users = ["--in", str(data / "users.parquet"), "--limit", str(len(golden)), "--beam", "50", "--top-k", "50"]
    assert run(["recommend", *users, *paths]) == 0
    rows = pq.ParquetFile(Path(out) / "part-00000-of-00001.parquet").read().to_pylist()
    for row, user in zip(rows, golden, strict=True):
        expected = [(tuple(map(int, re.findall(r"_(\d+)>", text))), score) for text, score in user["beams"]]
        found = [(tuple(item["sid"]), item["score"]) for item in row["items"]]
        assert row["user_id"] == user["user_id"] and {sid for sid, _ in found} == {sid for sid, _ in expected}
        scores = dict(expected)
        assert max(abs(score - scores[sid]) for sid, score in found) < 1e-4
        assert all(scores[a] > scores[b] - 2e-5 for (a, _), (b, _) in pairwise(found))


@pytest.mark.shared_data
def test_minionerec_csv_and_parquet_agree(shared_data: Path, tmp_path: Path) -> None:
    """cases.md: MiniOneRec CSV: lists as Python text are the same histories as the Parquet file's."""
    from xgr_engine.job.inputs import RowReader, open_inputs
    from xgr_engine.job.lists import read_lists
    from xgr_engine.job.options import HistoryOptions

    data = shared_data / "industrial"
    csv = open_inputs(HistoryOptions((str(data / "users.head.csv"),), history_col="history_item_id"))
    parquet = open_inputs(HistoryOptions((str(data / "users.parquet"),)))
    rows = RowReader(csv).read(0, 0, csv.rows)
    same = RowReader(parquet).read(0, 0, csv.rows)
    assert rows.table["user_id"].cast(pa.large_string()).equals(same.table["user_id"])
    mine = read_lists(rows.lists["history_item_id"], "history_item_id", "python")
    theirs = read_lists(same.lists["history"], "history", None)
    assert mine.offsets.tolist() == theirs.offsets.tolist()
    assert [str(value) for value in mine.values.to_pylist()] == theirs.values.to_pylist()

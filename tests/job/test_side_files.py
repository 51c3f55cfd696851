"""``--metrics-file`` and ``--trace``, and what any file of xgr may replace: files alone, and links never."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_support import Place

from xgr_cli.main import run
from xgr_engine.errors import UsageError
from xgr_engine.files import destination, write_text
from xgr_engine.job.metrics_file import write_metrics


def recommend(place: Place, *more: str) -> int:
    given = ["--model", str(place.model), "--vocab", str(place.vocab), "--out", str(place.out), "--device", "cpu"]
    return run(["recommend", "--in", str(place.root / "users.parquet"), *given, "--beam", "8", "--top-k", "3", *more])


@pytest.fixture
def files(place: Place) -> dict[str, Path]:
    """What a run reads and writes, by what it is."""
    allowed = place.root / "allowed.txt"
    allowed.write_text("100\n101\n102\n103\n")
    link = place.root / "link.prom"
    link.symlink_to("users.parquet")
    return {
        "users": place.users([[100]]),
        "link to users": link,
        "items": allowed,
        "in the model": place.model / "xgr.json",
        "new in the vocabulary": place.vocab / "new.prom",
        "new in the output": place.out / "_xgr" / "run.prom",
        "above the output": place.out.parent,
    }


NAMES = ["users", "link to users", "items", "in the model", "new in the vocabulary", "new in the output"]


@pytest.mark.parametrize("option", ["--metrics-file", "--trace"])
@pytest.mark.parametrize("name", [*NAMES, "above the output"])
@pytest.mark.parametrize("wrong", [[], ["--top-k", "0"], ["--max-rejects", "x"]], ids=["run", "parser", "options"])
def test_nothing_that_a_run_reads_or_writes_is_overwritten(
    place: Place, files: dict[str, Path], capsys: Any, option: str, name: str, wrong: list[str]
) -> None:
    """Also where the command fails before its job begins, which the metrics would say."""
    path = files[name]
    before = path.read_bytes() if path.is_file() else None
    assert recommend(place, option, str(path), "--allow-items", str(files["items"]), *wrong) == 2
    error = capsys.readouterr().err
    assert wrong or f"error: {option} {path} is " in error or f"error: {option} {path} lies inside" in error
    assert (path.read_bytes() if path.is_file() else None) == before and not place.out.exists()


@pytest.mark.parametrize("spelling", ["same.txt", "sub/../same.txt", "link.txt"])
def test_two_files_of_one_name_are_refused(place: Place, files: dict[str, Path], capsys: Any, spelling: str) -> None:
    (place.root / "sub").mkdir()
    (place.root / "link.txt").symlink_to("same.txt")
    same = place.root / "same.txt"
    assert recommend(place, "--metrics-file", str(same), "--trace", f"{place.root}/{spelling}") == 2
    assert f"{spelling} is --metrics-file {same}" in capsys.readouterr().err
    assert 'xgr_last_run_exit_code{name="same"} 2' in same.read_text()  # the metrics may be written, and tell it


def test_a_file_that_a_pattern_finds_is_an_input(place: Place, files: dict[str, Path], capsys: Any) -> None:
    pattern = str(place.root / "user*.parquet")
    given = ["--model", str(place.model), "--vocab", str(place.vocab), "--out", str(place.out)]
    assert run(["recommend", "--in", pattern, *given, "--metrics-file", str(files["users"])]) == 2
    assert f"{files['users']} is --in {pattern}" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["nights/*", "nights/../nights/*", "night*"])
def test_a_file_that_a_pattern_would_find_is_refused_before_it_is_there(
    place: Place, files: dict[str, Path], capsys: Any, pattern: str
) -> None:
    """The next night would read it as an input."""
    (place.root / "nights").mkdir()
    files["users"].rename(place.root / "nights" / "users.parquet")
    pattern, metrics = f"{place.root}/{pattern}", place.root / "nights" / "job.prom"
    given = ["--model", str(place.model), "--vocab", str(place.vocab), "--out", str(place.out), "--device", "cpu"]
    command = ["recommend", "--in", pattern, *given, "--beam", "8", "--top-k", "3", "--metrics-file"]
    assert run([*command, str(metrics)]) == 2
    assert f"error: --metrics-file {metrics} would be found by --in {pattern}" in capsys.readouterr().err
    assert not metrics.exists() and not place.out.exists()
    assert run([*command, str(place.root / "job.prom")]) == 0


def test_a_pattern_of_files_leaves_the_directories_beside_them_to_others(place: Place, files: dict[str, Path]) -> None:
    metrics = place.root / "logs" / "job.prom"
    metrics.parent.mkdir()
    files["users"].rename(place.root / "logs.parquet")
    given = ["--model", str(place.model), "--vocab", str(place.vocab), "--out", str(place.out), "--device", "cpu"]
    command = ["recommend", "--in", f"{place.root}/logs*", *given, "--beam", "8", "--top-k", "3"]
    assert run([*command, "--metrics-file", str(metrics)]) == 0


def test_an_input_that_cannot_be_looked_for_is_told_in_the_metrics(place: Place) -> None:
    """Looking for it before the job begins used to end the command without them."""
    metrics = place.root / "job.prom"
    given = ["--model", str(place.model), "--vocab", str(place.vocab), "--out", str(place.out)]
    code = run(["recommend", "--in", "n" * 300, *given, "--metrics-file", str(metrics)])
    assert code != 0 and f'xgr_last_run_exit_code{{name="job"}} {code}' in metrics.read_text()


def test_a_link_stays_a_link(place: Place) -> None:
    place.users([[100]])
    real = place.root / "elsewhere"
    real.mkdir()
    metrics, trace = place.root / "job.prom", place.root / "trace.json"
    metrics.symlink_to(real / "job.prom")  # not there yet
    (real / "old.json").write_text("old")
    trace.symlink_to(real / "old.json")
    assert recommend(place, "--metrics-file", str(metrics), "--trace", str(trace), "-q") == 0
    assert metrics.is_symlink() and trace.is_symlink()
    assert 'xgr_last_run_exit_code{name="job"} 0' in (real / "job.prom").read_text()
    assert json.loads((real / "old.json").read_text())["traceEvents"]
    assert sorted(path.name for path in real.iterdir()) == ["job.prom", "old.json"]


@pytest.mark.parametrize("option", ["--metrics-file", "--trace"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_run_refuses_what_is_no_file(place: Place, capsys: Any, option: str, kind: str) -> None:
    """A pipe used to become a file, and so did a device where root runs the job."""
    path = {"pipe": place.root / "pipe", "device": Path("/dev/null"), "directory": place.root / "folder"}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    place.users([[100]])
    assert recommend(place, option, str(path)) == 2
    assert f"error: {option} {path} is a {kind}" in capsys.readouterr().err
    assert path.exists() and not path.is_file() and not place.out.exists()


def test_writing_refuses_what_is_no_file(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(UsageError, match="is a pipe"):
            write_text(path, "x")
        with pytest.raises(UsageError, match="is a pipe"):
            write_metrics(path, {}, 0)  # and does not wait for somebody who writes into it
        assert path.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    with pytest.raises(UsageError, match="--html page is a directory"):
        destination(tmp_path, "--html page")


@pytest.mark.parametrize("name", ["/dev/stdout", "log.txt"])
def test_the_file_that_a_command_prints_to_is_not_replaced(tmp_path: Path, name: str) -> None:
    code = f"from pathlib import Path; from xgr_engine.files import write_text; write_text(Path({name!r}), 'x')"
    log = tmp_path / "log.txt"
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=stream, stderr=subprocess.PIPE, timeout=60
        )
    assert b"is where this command prints" in done.stderr and log.read_text() == ""


def test_a_name_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    """The temporary name used to be longer, and everything was lost at the last step."""
    path = tmp_path / ("n" * 255)
    write_text(path, "x")
    assert path.read_text() == "x" and list(tmp_path.iterdir()) == [path]

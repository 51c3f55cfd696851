"""``xgr eval`` from the command line: one JSON object, a readable table, usage errors, and no heavy imports."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from eval_support import make_vocabulary, nested, write_output, write_users

from xgr_cli.main import run


@pytest.fixture()
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output in a directory with a blank in its name; the vocabulary is found through the manifest."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my job"
    folder.mkdir()
    vocab = make_vocabulary(folder)
    users = write_users(folder, user_id=[1, 2, 3], history=[[20], [10], [21]], target=[10, 10, 11])
    write_output(folder, nested([1, 2, 3], [[10, 20], [10], [20, 10]]), inputs=[users], vocab=vocab)
    return folder


def test_json_is_one_object(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "--recs", f"{output}/recs", "--truth", f"{output}/users.parquet", "--k", "1,2", "--json"]
    assert run(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema_version"] == 1
    assert record["k"] == [1, 2]
    figure = record["metrics"]["item"]["all"]["recall@1"]
    assert figure["mean"] == pytest.approx(2 / 3)
    assert figure["low"] <= figure["mean"] <= figure["high"]
    assert record["metrics"]["sid"]["all"]["recall@2"]["mean"] == 1
    assert record["metrics"]["item"]["target_not_in_history"]["recall@1"]["mean"] == pytest.approx(1 / 2)
    assert record["bootstrap"]["resamples"] == 1000


def test_table_names_both_levels_and_both_sets_of_rows(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--recs", f"{output}/recs", "--truth", f"{output}/users.parquet", "--k", "1"]) == 0
    text = capsys.readouterr().out
    for part in ("item level", "SID level", "All 3 rows", "The 2 rows whose target is not in the history", "coverage"):
        assert part in text
    assert "0.6667" in text
    lines = [line.strip() for line in text.splitlines()]
    assert not any(first == second == "" for first, second in pairwise(lines))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "ten"], "--k ten"),
        (["--k", "5,1"], "ascending"),
        (["--truth-col", "next"], "no column 'next'"),
        (["--vocab", "nowhere"], "nowhere"),
        (["--truth", "gone.parquet"], "check --truth"),
        (["--user-col", "customer"], "no column 'customer'"),
        (["--history-col", "past"], "no column 'past'"),
    ],
)
def test_usage_and_input_errors_exit_with_2(
    output: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    command = ["eval", "--recs", f"{output}/recs", "--truth", f"{output}/users.parquet", *arguments]
    assert run(command) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_no_such_output(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--recs", "nothing", "--truth", f"{output}/users.parquet"]) == 2
    assert "no such file or directory" in capsys.readouterr().err


def test_evaluation_needs_no_torch(output: Path) -> None:
    code = (
        "import sys; from xgr_cli.main import run; "
        f"code = run(['eval', '--recs', {str(output / 'recs')!r}, '--truth', {str(output / 'users.parquet')!r}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

"""Progress: lines off a terminal, a bar on one, nothing with -q, and never a half line at the end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from xgr_cli import progress
from xgr_cli.output import Output
from xgr_cli.progress import BarProgress, LineProgress, make_progress

BAR = """
import sys
from xgr_cli.output import Output
from xgr_cli.progress import make_progress
output = Output()
bar = make_progress(output, 60.0)
print(type(bar).__name__)
bar.start(3_000, "users")
for n in range(3):
    bar.advance(1000, rejects=n)
    output.note(f"note {n}")
bar.finish()
bar.finish()
output.note("the end")
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_one_is_no_plural(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    sink = LineProgress(Output(), log_every=10)
    sink.start(2, "rows")
    sink.advance(1)
    clock[0] = 2.0
    sink.finish()
    assert capsys.readouterr().err == "1 row in 2.0 s, 0.5 rows/s\n"


def test_pieces_that_are_unlike_have_no_rate(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    sink = make_progress(Output(), 10, with_rate=False)
    sink.start(4, "rows")
    clock[0] = 20.0
    sink.advance(1)
    sink.finish()
    assert capsys.readouterr().err.splitlines() == ["1 of 4 rows (25%), 60 s left", "1 row in 20.0 s"]


def test_lines_tell_done_rate_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    sink = LineProgress(Output(), log_every=10)
    sink.start(4000, "users")
    for _ in range(25):
        clock[0] += 1
        sink.advance(50, rejects=2)
    sink.finish()
    sink.finish()
    assert capsys.readouterr().err.splitlines() == [
        "500 of 4,000 users (12%), 50 users/s, 70 s left  rejects=2",
        "1,000 of 4,000 users (25%), 50 users/s, 60 s left  rejects=2",
        "1,250 users in 25.0 s, 50 users/s",
    ]


def test_unknown_total(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    sink = LineProgress(Output(), log_every=1)
    sink.start(0, "files")
    clock[0] = 2.0
    sink.advance(6)
    assert capsys.readouterr().err == "6 files, 3 files/s\n"


def test_finish_without_start_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    LineProgress(Output(), 1).finish()
    BarProgress(Output()).finish()
    assert capsys.readouterr().err == ""


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    sink = make_progress(Output(quiet=True), 0.1)
    sink.start(1, "users")
    sink.advance(1)
    sink.finish()
    assert capsys.readouterr().err == ""


def test_no_terminal_means_lines() -> None:
    assert isinstance(make_progress(Output(), 60), LineProgress)


def _on_terminal(variables: dict[str, str], program: str = BAR) -> tuple[str, bytes]:
    """Sink chosen and bytes shown when stderr is a terminal."""
    leader, follower = pty.openpty()
    env = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", **variables}
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=follower, env=env, timeout=60)
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # the end of a pseudo-terminal
        pass
    os.close(leader)
    assert done.returncode == 0
    return done.stdout.decode().strip(), shown


def _screen(shown: bytes) -> list[str]:
    """Lines as they stand in the end: a carriage return goes back to the first column, an up arrow a line up."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\r\n\x1b]+", shown.decode()):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif part == "\x1b[A":
            row -= 1
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_bar_on_a_terminal_leaves_nothing_behind(variables: dict[str, str]) -> None:
    """Only the notes stay, each on a line of its own."""
    sink, shown = _on_terminal(variables)
    assert sink == "BarProgress"
    assert "3,000/3,000 users" in shown.decode() and "rejects 2" in shown.decode()
    assert _screen(shown) == ["note 0", "note 1", "note 2", "the end", ""]


def test_unknown_total_on_a_terminal() -> None:
    sink, shown = _on_terminal({}, BAR.replace("3_000", "0"))
    assert sink == "BarProgress" and "3,000 users" in shown.decode()
    assert _screen(shown)[-2:] == ["the end", ""]


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"TERM": "dumb"}])
def test_no_bar_in_ci_or_on_a_dumb_terminal(variables: dict[str, str]) -> None:
    assert _on_terminal(variables)[0] == "LineProgress"

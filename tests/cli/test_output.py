"""stdout holds the result and nothing else; everything else goes to stderr, in the asked form."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from cli_support import RunCli

from xgr_cli.output import Output, jsonable, show

Child = Callable[..., subprocess.CompletedProcess[bytes]]

TOY = """
import sys, types
from typing import Annotated
from xgr_cli import main
from xgr_cli.options import option
from xgr_cli.output import Output
module = types.ModuleType("xgr_cli.commands.toy")
module.__doc__, module.EXAMPLES = "Toy.", ("xgr toy",)
def toy(output: Output, lines: Annotated[int, option("--lines", help="n")] = 3) -> int:
    for n in range(lines):
        output.note(f"note {n}")
    output.result({"title": "Größe ½ 日本"}, lambda view: view.print("Größe ½ 日本 [bold]x[/bold]"))
    return 75
module.toy = toy
sys.modules[module.__name__] = module
main.COMMANDS["toy"] = main._Entry("toy", "toy", "Run")
main.main()
"""


def test_json_mode_writes_one_object_with_its_schema_version(cli: RunCli, toy: ModuleType) -> None:
    def behaviour(output: Output, values: object) -> int:
        output.note("chatter")
        output.result({"score": float("nan"), "path": Path("a/b"), "n": np.int64(3), "list": np.arange(2)}, print)
        return 0

    toy.behaviour = behaviour  # type: ignore[attr-defined]
    outcome = cli("toy", "--in", "a", "--json")
    assert outcome.json == {"schema_version": 1, "score": None, "path": "a/b", "n": 3, "list": [0, 1]}
    assert "chatter" in outcome.err


def test_a_second_result_is_refused() -> None:
    output = Output(json_mode=True)
    output.result({}, print)
    with pytest.raises(RuntimeError, match="one result"):
        output.result({}, print)


def test_text_is_never_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.table(["title"], [["[red]Blood[/red] :smile:"]])
    output.fields({"a": "[b]"})
    output.print("[i]")
    output.warn("[bold]w[/bold]", file="[x]")
    captured = capsys.readouterr()
    assert "[red]Blood[/red] :smile:" in captured.out and "[b]" in captured.out and "[i]" in captured.out
    assert "[bold]w[/bold]  file=[x]" in captured.err


def test_quiet_hides_notes_and_keeps_warnings_and_result(cli: RunCli, toy: ModuleType) -> None:
    def behaviour(output: Output, values: object) -> int:
        output.debug("deep")
        output.note("chatter")
        output.warn("careful")
        output.result({}, lambda view: view.print("the result"))
        return 0

    toy.behaviour = behaviour  # type: ignore[attr-defined]
    plain, quiet, verbose = (cli("toy", "--in", "a", *flags) for flags in ((), ("-q",), ("-v",)))
    assert [("chatter" in o.err, "careful" in o.err, "deep" in o.err) for o in (plain, quiet, verbose)] == [
        (True, True, False),
        (False, True, False),
        (True, True, True),
    ]
    assert {o.out for o in (plain, quiet, verbose)} == {"the result\n"}


def test_json_log_lines_carry_time_level_and_run_id(cli: RunCli, toy: ModuleType) -> None:
    def behaviour(output: Output, values: object) -> int:
        output.bind(run_id="r1")
        output.note("part written", rows=7)
        logging.getLogger("xgr_engine.job").warning("from the engine: %d", 5)
        logging.getLogger("xgr_engine.job").debug("too deep")
        return 0

    toy.behaviour = behaviour  # type: ignore[attr-defined]
    lines = [json.loads(line) for line in cli("toy", "--in", "a", "--log-format", "json").err.splitlines()]
    assert [(line["level"], line["message"], line["run_id"]) for line in lines] == [
        ("info", "part written", "r1"),
        ("warning", "from the engine: 5", "r1"),
    ]
    assert lines[0]["rows"] == 7 and lines[0]["time"].endswith("Z")


@pytest.mark.parametrize(
    ("flags", "variables", "colored"),
    [
        ([], {}, False),
        (["--color", "always"], {}, True),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "0"}, False),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
        (["--color", "always"], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
        ([], {"XGR_COLOR": "always"}, True),
    ],
)
def test_color_follows_flag_then_variables(
    cli: RunCli,
    toy: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    variables: dict[str, str],
    colored: bool,
) -> None:
    toy.behaviour = lambda output, values: output.warn("careful") or 0  # type: ignore[attr-defined]
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in cli("toy", "--in", "a", *flags).err) is colored


@pytest.mark.parametrize("arguments", [["toy", "--show-config"], ["toy", "--help"], ["nothing"]])
def test_no_color_wins_over_force_color_everywhere(child: Child, arguments: list[str]) -> None:
    """no-color.org: a value that is not empty means no colours; here it means no bold and dim either."""
    forced = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    styled, plain = (child(TOY, *arguments, env={**forced, **more}) for more in ({}, {"NO_COLOR": "1"}))
    assert b"\x1b[" in styled.stdout + styled.stderr
    assert b"\x1b" not in plain.stdout + plain.stderr and plain.stdout + plain.stderr


@pytest.mark.parametrize("columns", ["0", "00"])
def test_a_width_of_nothing_hides_nothing(child: Child, columns: str) -> None:
    """Where nothing knows the terminal's size, COLUMNS is 0 at times."""
    plain, narrow = (child(TOY, "--help", env=more) for more in ({}, {"COLUMNS": columns}))
    assert len(narrow.stdout) > 100 and narrow.stdout == plain.stdout
    failed = child(TOY, "toy", "--no-such-option", env={"COLUMNS": columns})
    assert failed.returncode == 2 and b"no such option" in failed.stderr


def test_a_terminal_without_colours_gets_neither_colours_nor_bold(monkeypatch: pytest.MonkeyPatch) -> None:

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    output = Output()
    output.error("wrong")
    assert "\x1b" not in sys.stderr.getvalue()
    assert "wrong" in sys.stderr.getvalue()


def test_reader_that_goes_away_is_no_error_and_does_not_stop_the_job(child: Child) -> None:
    for gone in ("stdout", "stderr"):
        read, write = os.pipe()
        os.close(read)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, gone: write}
        outcome = child(TOY, "toy", "--lines", "500", capture_output=False, **streams)
        os.close(write)
        assert outcome.returncode == 75  # the job's own exit code: it ran to its end
        if gone == "stdout":
            assert outcome.stderr.splitlines()[-1] == b"note 499"
        else:
            assert "Größe" in outcome.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        ("toy", ">&-", 1),
        ("toy --json", ">&-", 1),
        ("--help", ">&-", 1),
        ("--version", ">&-", 1),
        ("toy", ">&- 2>&-", 1),
        ("toy", "2>&-", 75),
        ("toy $(printf '\\377')", "2>&-", 2),
        ("toy --no-such", ">&-", 2),
    ],
)
def test_closed_streams(arguments: str, closed: str, code: int) -> None:
    """A result that nobody gets is an error; notes that nobody gets are not."""
    script = f'exec {shlex.quote(sys.executable)} -c "$TOY" {arguments} {closed}'
    variables = {"PATH": os.environ["PATH"], "TOY": TOY}
    outcome = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, timeout=60)
    assert outcome.returncode == code
    lost = b"error: standard output: closed, so the result cannot be printed" in outcome.stderr
    assert lost is (code == 1 and "2>&-" not in closed) and b"Traceback" not in outcome.stderr
    assert (b"Gr" in outcome.stdout) is (code == 75)


def test_a_full_disk_under_the_result_is_an_error(child: Child) -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in (["toy"], ["toy", "--json"], ["--help"]):
            outcome = child(TOY, *arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
            assert outcome.returncode == 1 and outcome.stderr.count(b"No space left on device") == 1
        assert (
            b"error: standard output: "
            in child(TOY, "toy", capture_output=False, stdout=full, stderr=subprocess.PIPE).stderr
        )


def test_a_full_disk_under_the_notes_is_none(child: Child) -> None:
    with Path("/dev/full").open("w") as full:
        outcome = child(TOY, "toy", capture_output=False, stdout=subprocess.PIPE, stderr=full)
    assert outcome.returncode == 75 and "Größe" in outcome.stdout.decode()


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}])
def test_no_home_and_any_locale(child: Child, locale: dict[str, str]) -> None:
    text = child(TOY, "toy", env=locale)
    assert text.returncode == 75 and text.stdout.strip()
    record = child(TOY, "toy", "--json", env=locale)
    assert json.loads(record.stdout)["title"] == "Größe ½ 日本"


def test_long_lines_are_not_broken_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/".join(["directory"] * 30)
    Output().note(f"wrote {path}")
    Output().print(path)
    captured = capsys.readouterr()
    assert captured.err == f"wrote {path}\n" and captured.out == f"{path}\n"


def test_shown_values() -> None:
    assert [show(v) for v in (None, True, 1234567, 0.123456, 12345.6, [1, 2], "x", ())] == [
        "-",
        "yes",
        "1,234,567",
        "0.1235",
        "12,346",
        "1, 2",
        "x",
        "-",
    ]


def test_jsonable_keeps_json_valid() -> None:
    given = {1: {2}, "f": np.float32("inf"), "nested": [{"p": Path("x")}]}
    assert json.dumps(jsonable(given), allow_nan=False) == '{"1": [2], "f": null, "nested": [{"p": "x"}]}'


def test_ctrl_c_ends_with_130_and_one_line(tmp_path: Path) -> None:
    sleep = "    output.note('begun')\n    __import__('time').sleep(60)\n"
    waiting = TOY.replace("    for n in range(lines):\n", f"{sleep}    for n in []:\n")
    process = subprocess.Popen(
        [sys.executable, "-c", waiting, "toy"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # ignored in the background of a script, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read() == "error: stopped by Ctrl-C\n"
    process.stderr.close()

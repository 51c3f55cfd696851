"""The commands there are, what importing them costs, and what --help shows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise

import pytest
import typer
from cli_support import RunCli

import xgr_engine
from xgr_cli import main

Child = Callable[..., subprocess.CompletedProcess[bytes]]
COMMANDS = ["build-vocab", "convert", "recommend", "eval", "bench", "inspect", "doctor"]
HEAVY = ["torch", "polars", "pyarrow", "numpy", "transformers", "tokenizers", "triton", "safetensors", "jinja2"]

LOADED = f"""
import json, sys
from xgr_cli import main
code = main.run(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(child: Child, arguments: list[str]) -> None:
    outcome = child(LOADED, *arguments)
    code, heavy = json.loads(outcome.stdout.splitlines()[-1])
    assert (code, heavy) == (0, []), outcome.stderr.decode()


def test_help_lists_the_commands_in_their_panels(cli: RunCli) -> None:
    shown = cli("--help").out
    panels = [shown.index(f"─ {panel} ─") for panel in ("Options", "Prepare", "Run", "Look")]
    assert shown.index("Examples") < panels[0] and panels == sorted(panels)
    listed = [shown.index(f"│ {name} ") for name in COMMANDS]
    assert listed == sorted(listed) and listed[0] > panels[1]


def test_no_arguments_show_help(cli: RunCli) -> None:
    assert cli() == cli("--help")


def test_version(cli: RunCli) -> None:
    outcome = cli("--version")
    assert outcome.code == 0 and outcome.out.startswith("xgr ")
    assert xgr_engine.__version__ == outcome.out.split()[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_variable_and_panel(name: str) -> None:
    command = typer.main.get_command(main.build_app()).commands[name]  # type: ignore[attr-defined]
    for param in command.params:
        assert param.help, param.name
        if param.param_type_name == "option":
            assert str(param.envvar).startswith("XGR_") and param.show_envvar, param.name
            assert any(flag.startswith("--") for flag in param.opts)
            assert param.rich_help_panel, f"{name} {param.opts[0]} stands under no heading"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_starts_with_examples_and_shows_variables_and_defaults(cli: RunCli, name: str) -> None:
    shown = cli(name, "-h").out
    assert shown.index(f"$ xgr {name}") < shown.index("--json")
    assert "XGR_JSON" in shown and "default: auto" in shown


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_paragraphs_of_a_help_page_fill_the_width(cli: RunCli, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks of the source would cut each paragraph a second time in a narrower terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(*filter(None, [name]), "-h").out
    text = shown[: shown.index("╭")].splitlines()
    for line, following in pairwise(text):
        a_command = line.lstrip().startswith("$") or following.lstrip().startswith("$")
        if line.strip() and following.strip() and not a_command:
            assert len(line.rstrip()) + 1 + len(following.split()[0]) > 78, (line, following)


def test_shared_variables_mean_the_same_place() -> None:
    """XGR_OUT would be a vocabulary for one command and recommendations for the next."""
    commands = typer.main.get_command(main.build_app()).commands  # type: ignore[attr-defined]
    variables = {
        name: {param.opts[-1]: param.envvar for param in command.params if param.envvar}
        for name, command in commands.items()
    }
    assert variables["build-vocab"]["--out"] == variables["recommend"]["--vocab"] == "XGR_VOCAB"
    assert variables["convert"]["--out"] == variables["recommend"]["--model"] == "XGR_MODEL"
    assert variables["recommend"]["--out"] == variables["eval"]["--recs"] == "XGR_RECS"


@pytest.mark.parametrize(
    ("arguments", "inputs"),
    [
        (["--in", "a"], ["a"]),
        (["--in", "a", "b", "c", "--beam", "3"], ["a", "b", "c"]),
        (["--beam", "3", "--in=a", "b", "--in", "c", "d"], ["a", "b", "c", "d"]),
        (["--in", "a", "-q", "--in", "b"], ["a", "b"]),
    ],
)
def test_several_inputs_may_follow_one_flag(cli: RunCli, arguments: list[str], inputs: list[str]) -> None:
    """As a shell leaves ``--in users/*.parquet``."""
    settings = cli("recommend", *arguments, "--show-config", "--json").json["settings"]
    assert settings["in"]["value"] == inputs
    assert settings["beam"]["value"] == (3 if "--beam" in arguments else 512)


def test_a_stray_word_is_still_an_error(cli: RunCli) -> None:
    outcome = cli("recommend", "--in", "a", "--beam", "3", "stray")
    assert outcome.code == 2 and "stray" in outcome.err

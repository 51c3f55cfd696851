"""A small command of its own, registered beside the real ones, to test what every command shares."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from cli_support import Outcome, RunCli

from xgr_cli import main
from xgr_cli.options import LogEvery, argument, option
from xgr_cli.output import Output


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run ``xgr`` in this process, in an empty working directory, with wide help pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main.run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The command ``xgr toy``. ``module.behaviour`` may be replaced by what it should do."""
    module = types.ModuleType("xgr_cli.commands.toy")
    module.__doc__ = "Toy with options.\n\nMore about toys."
    module.EXAMPLES = ("xgr toy --in users.parquet",)  # type: ignore[attr-defined]
    module.behaviour = lambda output, values: None  # type: ignore[attr-defined]

    def toy(
        output: Output,
        inputs: Annotated[list[str], option("--in", help="users [one or more]", panel="Input")],
        paths: Annotated[list[Path] | None, argument(metavar="PATH...", help="more")] = None,
        beam: Annotated[int, option("--beam", help="width", panel="Search", min=1)] = 512,
        top: Annotated[str, option("--k", help="cut-offs", panel="Search")] = "1,5",
        exclude_seen: Annotated[bool, option("--exclude-seen/--no-exclude-seen", help="rule", panel="Search")] = False,
        out: Annotated[Path, option("--out", help="result", panel="Output", env="XGR_VOCAB")] = Path("vocab"),
        log_every: LogEvery = 60.0,
    ) -> int | None:
        values = {
            "inputs": inputs,
            "paths": paths,
            "beam": beam,
            "k": top,
            "exclude_seen": exclude_seen,
            "out": out,
            "log_every": log_every,
        }
        code: int | None = module.behaviour(output, values)
        if code is None:
            output.result(values, lambda view: view.fields(values))
        return code

    module.toy = toy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(main.COMMANDS, "toy", main._Entry("toy", "toy", "Run"))
    return module


@pytest.fixture
def child(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run Python in a child process, in an empty working directory, without HOME and locale unless given."""

    def run(
        code: str, *arguments: str, env: dict[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        given = {"PATH": os.environ["PATH"], **(env or {})}
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=given, timeout=120, stdin=subprocess.DEVNULL, **({"capture_output": True} | more)
        )

    return run

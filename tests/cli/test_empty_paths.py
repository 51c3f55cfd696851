"""Texts that are no path where one is wanted: an empty one would mean the working directory, a URI a directory s3:."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from cli_support import RunCli

from xgr_cli import main
from xgr_cli.command import as_command

GIVEN = [
    (("build-vocab", "", "--out", "q"), "CATALOG"),
    (("build-vocab", "c.csv", ""), "CATALOG"),
    (("build-vocab", "c.csv", "--out", ""), "--out"),
    (("convert", ""), "SOURCE"),
    (("convert", "source", "--vocab", ""), "--vocab"),
    (("convert", "source", "--prompts="), "--prompts"),
    (("convert", "source", "--prompt", ""), "--prompt"),
    (("recommend", "--in", ""), "--in"),
    (("recommend", "--in", "a", ""), "--in"),
    (("recommend", "--in", "a", "--model="), "--model"),
    (("recommend", "--in", "a", "--out", ""), "--out"),
    (("recommend", "--in", "a", "--deny-items", "b", "--deny-items", ""), "--deny-items"),
    (("recommend", "--in", "a", "--metrics-file", ""), "--metrics-file"),
    (("recommend", "--in", "a", "--config", ""), "--config"),
    (("eval", "--truth", "a", "--recs", ""), "--recs"),
    (("eval", "--truth", ""), "--truth"),
    (("eval", "--truth", "a", "--vocab", ""), "--vocab"),
    (("bench", "--in", ""), "--in"),
    (("bench", "--html", ""), "--html"),
    (("bench", "compare", "a.json", ""), "ACTION"),
    (("inspect", ""), "PATH"),
]


@pytest.mark.parametrize(("arguments", "name"), GIVEN, ids=[" ".join(arguments) for arguments, _ in GIVEN])
def test_an_empty_path_is_an_error(cli: RunCli, tmp_path: Path, arguments: tuple[str, ...], name: str) -> None:
    (tmp_path / "c.csv").write_text("item_id,sid\n1,1-2\n")
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert outcome.err == f"error: {name} is empty\n  next: give a path; '.' is the working directory\n"
    assert [path.name for path in tmp_path.iterdir()] == ["c.csv"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend", "--in", "s3://b/users", "--out", "s3://b/recs", "--metrics-file", "s3://b/x"),
        ("recommend", "--in", "s3://b/users", "--deny-items", "s3://b/x"),
        ("recommend", "--in", "s3://b/users", "--model", "s3://b/x"),
        ("eval", "--truth", "s3://b/truth", "--recs", "s3://b/x"),
        ("build-vocab", "s3://b/x"),
        ("build-vocab", "c.csv", "--out", "s3://b/x"),
        ("inspect", "s3://b/x"),
    ],
    ids=" ".join,
)
def test_what_must_be_local_is_no_uri(cli: RunCli, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """It was written to, or looked for in, a directory called s3:."""
    outcome = cli(*arguments)
    assert outcome.code == 2 and "s3://b/x: must be a local path\n  next: " in outcome.err
    assert not list(tmp_path.iterdir())


def test_an_empty_path_in_the_configuration_is_an_error(cli: RunCli, toy: ModuleType) -> None:
    Path("xgr.toml").write_text('[toy]\nin = ["a", ""]\n')
    assert cli("toy").code == 2
    Path("xgr.toml").write_text('vocab = ""\n')
    outcome = cli("toy", "--in", "a")
    assert outcome.code == 2 and "--out is empty" in outcome.err


def test_empty_variables_and_other_empty_texts_stay_as_they_were(
    cli: RunCli, toy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XGR_VOCAB", "")
    values = cli("toy", "--in", "a", "--in", "b", "--k", "", "more", ".", "--json").json
    assert (values["out"], values["k"], values["inputs"], values["paths"]) == ("vocab", "", ["a", "b"], ["more", "."])


def test_every_path_of_every_command_is_guarded() -> None:
    """A new option of type ``Path`` is covered by itself; what is text may be no path that nobody thought of."""
    unguarded = []
    for name, entry in main.COMMANDS.items():
        module = importlib.import_module(f"xgr_cli.commands.{entry.module}")
        for parameter, hint in as_command(getattr(module, entry.function)).__annotations__.items():
            for extra in getattr(hint, "__metadata__", ()):
                words = set(str(extra.help).replace(",", "").split())
                kind = str(get_args(hint)[0])
                wants_path = "Path" in kind or ("str" in kind and words & {"file", "files", "directory", "vocabulary"})
                if wants_path and extra.parser is None:
                    unguarded.append(f"{name} {parameter}")
    assert unguarded == ["recommend items_col", "eval history_col"]  # columns of such files

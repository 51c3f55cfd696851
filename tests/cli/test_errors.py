"""Exit codes and the three lines of an error."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from cli_support import RunCli

from xgr_engine import errors as engine

CASES = [
    (engine.XgrError("broken"), 1),
    (engine.UsageError("bad option"), 2),
    (engine.CatalogError("bad catalog"), 2),
    (engine.CheckpointError("bad checkpoint"), 2),
    (engine.HistoryError("bad history"), 2),
    (engine.OutputExistsError("exists"), 2),
    (engine.BackendUnavailableError("no triton"), 2),
    (engine.TooManyRejectsError("too many"), 3),
    (engine.OutputLockedError("locked"), 75),
    (FileNotFoundError(2, "No such file or directory", "users.parquet"), 1),
    (ValueError("surprise"), 1),
    (MemoryError(), 1),
    (KeyboardInterrupt(), 130),
]


def _raising(error: BaseException):  # type: ignore[no-untyped-def]
    def behaviour(output: object, values: object) -> None:
        raise error

    return behaviour


@pytest.mark.parametrize(("error", "code"), CASES, ids=[type(error).__name__ for error, _ in CASES])
def test_exit_code_and_message(cli: RunCli, toy: ModuleType, error: BaseException, code: int) -> None:
    toy.behaviour = _raising(error)  # type: ignore[attr-defined]
    outcome = cli("toy", "--in", "a", "--json")
    assert outcome.code == code
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
    assert len(outcome.err.splitlines()) <= 3


def test_what_why_and_next_stand_on_their_own_lines(cli: RunCli, toy: ModuleType) -> None:
    toy.behaviour = _raising(engine.InputError("what [x]", why="because", hint="do this"))  # type: ignore[attr-defined]
    assert cli("toy", "--in", "a").err == "error: what [x]\n  why: because\n  next: do this\n"


def test_unexpected_errors_tell_how_to_see_the_traceback(
    cli: RunCli, toy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.behaviour = _raising(ValueError("surprise"))  # type: ignore[attr-defined]
    assert "XGR_DEBUG=1" in cli("toy", "--in", "a").err
    assert "Traceback" in cli("toy", "--in", "a", "-v").err
    monkeypatch.setenv("XGR_DEBUG", "1")
    assert "Traceback" in cli("toy", "--in", "a").err
    monkeypatch.setenv("XGR_DEBUG", "0")
    assert "Traceback" not in cli("toy", "--in", "a").err


def test_panics_that_are_no_exceptions_are_caught(cli: RunCli, toy: ModuleType) -> None:
    """polars raises a PanicException, a BaseException, from its I/O border."""

    class PanicException(BaseException):
        pass

    toy.behaviour = _raising(PanicException("panicked"))  # type: ignore[attr-defined]
    outcome = cli("toy", "--in", "a")
    assert outcome.code == 1 and "panicked" in outcome.err


def test_missing_file_names_it(cli: RunCli, toy: ModuleType) -> None:
    toy.behaviour = _raising(PermissionError(13, "Permission denied", "/locked"))  # type: ignore[attr-defined]
    assert "/locked: Permission denied" in cli("toy", "--in", "a").err


def test_a_place_that_may_not_be_written_is_said_with_why_and_what_next(cli: RunCli, toy: ModuleType) -> None:
    toy.behaviour = _raising(PermissionError(13, "Permission denied", "/locked/recs"))  # type: ignore[attr-defined]
    outcome = cli("toy", "--in", "a")
    assert outcome.code == 1
    assert [line.split(":")[0].strip() for line in outcome.err.splitlines()] == ["error", "why", "next"]
    assert "may not read or write" in outcome.err and "traceback" not in outcome.err


def test_an_output_below_a_file_is_said(cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "c.csv").write_text("item_id,sid\n1,1-2\n")
    outcome = cli("build-vocab", str(tmp_path / "c.csv"), "--out", str(tmp_path / "file" / "vocab"))
    assert outcome.code != 0 and "Traceback" not in outcome.err and "did not expect" not in outcome.err
    assert "  next: " in outcome.err and "XGR_DEBUG" not in outcome.err


@pytest.mark.parametrize("arguments", [("recommend", "--layout", "wide"), ("eval", "--align", "left")])
def test_a_mistyped_choice_is_said_in_plain_words(cli: RunCli, arguments: tuple[str, ...]) -> None:
    """The parser's own check used to show through: 'Value error, ...'."""
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {arguments[1]}: '{arguments[2]}' is not one of")


def test_returned_code_becomes_the_exit_code(cli: RunCli, toy: ModuleType) -> None:
    toy.behaviour = lambda output, values: 3  # type: ignore[attr-defined]
    assert cli("toy", "--in", "a").code == 3

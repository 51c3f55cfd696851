"""Precedence and origins of settings, and what a bad configuration file or variable says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from cli_support import RunCli

pytestmark = pytest.mark.usefixtures("toy")


def test_command_line_beats_environment_beats_file_beats_default(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("toy", "--in", "a", "--json").json["beam"] == 512
    Path("xgr.toml").write_text("[toy]\nbeam = 3\n")
    assert cli("toy", "--in", "a", "--json").json["beam"] == 3
    monkeypatch.setenv("XGR_BEAM", "4")
    assert cli("toy", "--in", "a", "--json").json["beam"] == 4
    assert cli("toy", "--in", "a", "--json", "--beam", "5").json["beam"] == 5


def test_empty_variable_counts_as_not_set(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XGR_BEAM", "")
    assert cli("toy", "--in", "a", "--json").json["beam"] == 512


def test_show_config_names_every_origin_and_needs_no_required_option(
    cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("xgr.toml").write_text('vocab = "v"\n[toy]\nexclude_seen = true\n')
    monkeypatch.setenv("XGR_BEAM", "4")
    shown = cli("toy", "--k", "7", "--show-config", "--json")
    assert shown.code == 0
    settings = shown.json["settings"]
    assert settings["k"] == {"value": "7", "origin": "command line"}
    assert settings["beam"] == {"value": 4, "origin": "environment XGR_BEAM"}
    assert settings["exclude-seen"] == {"value": True, "origin": "xgr.toml [toy]"}
    assert settings["out"] == {"value": "v", "origin": "xgr.toml"}
    assert settings["log-every"] == {"value": 60.0, "origin": "default"}
    text = cli("toy", "--show-config")
    assert "environment XGR_BEAM" in text.out and "xgr.toml [toy]" in text.out


def test_show_config_does_not_run_the_command(cli: RunCli, toy: ModuleType) -> None:
    toy.behaviour = lambda output, values: pytest.fail("must not run")  # type: ignore[attr-defined]
    assert cli("toy", "--show-config").code == 0


def test_section_beats_shared_key_and_both_spellings_work(cli: RunCli) -> None:
    Path("xgr.toml").write_text('vocab = "shared"\nbeam = 9\n[toy]\nout = "mine"\nlog_every = 2\n')
    got = cli("toy", "--in", "a", "--json").json
    assert (got["out"], got["beam"], got["log_every"]) == ("mine", 9, 2.0)


def test_lists_fill_repeated_options_and_join_for_others(cli: RunCli) -> None:
    Path("xgr.toml").write_text('[toy]\nin = ["a", "b"]\nk = [1, 5, 10]\npath = ["x", "y"]\n')
    got = cli("toy", "--json").json
    assert (got["inputs"], got["k"], got["paths"]) == (["a", "b"], "1,5,10", ["x", "y"])


def test_named_file_replaces_the_one_in_the_directory(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("xgr.toml").write_text("[toy]\nbeam = 3\n")
    Path("other.toml").write_text("[toy]\nk = 9\n")
    got = cli("toy", "--in", "a", "--json", "--config", "other.toml").json
    assert (got["beam"], got["k"]) == (512, "9")
    monkeypatch.setenv("XGR_CONFIG", "other.toml")
    assert cli("toy", "--in", "a", "--json").json["k"] == "9"


def test_pyproject_table_is_the_last_resort(cli: RunCli) -> None:
    Path("pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert cli("toy", "--in", "a", "--json").json["beam"] == 512
    Path("pyproject.toml").write_text("[tool.xgr.toy]\nbeam = 8\n")
    assert cli("toy", "--in", "a", "--json").json["beam"] == 8
    shown = cli("toy", "--show-config", "--json").json["settings"]["beam"]
    assert shown["origin"] == "pyproject.toml [tool.xgr] [toy]"
    Path("xgr.toml").write_text("[toy]\nbeam = 3\n")
    assert cli("toy", "--in", "a", "--json").json["beam"] == 3


def test_broken_pyproject_of_somebody_else_is_left_alone(cli: RunCli) -> None:
    Path("pyproject.toml").write_text("not toml [")
    assert cli("toy", "--in", "a").code == 0


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("[toy]\nbaem = 3\n", ['[toy]: unknown key "baem"', 'did you mean "beam"?']),
        ("vocb = 3\n", ['unknown key "vocb"', 'did you mean "vocab"?']),
        ("[toi]\nbeam = 3\n", ["unknown section [toi]", 'did you mean "toy"?']),
        # A mistake in another command's section is reported too: tomorrow that command runs with it.
        ("[doctor]\nbaem = 3\n", ['[doctor]: unknown key "baem"']),
        ("[toy]\nbeam = 'many'\n", ['error: xgr.toml [toy]: key "beam"', "valid int"]),
        ("[toy]\nbeam = 0\n", ['error: xgr.toml [toy]: key "beam"', "1"]),
        ("[toy]\nbeam = true\n", ['error: xgr.toml [toy]: key "beam"', "valid int"]),
        ("[toy]\nexclude-seen = 'yes'\n", ["exclude-seen", "must be true or false"]),
        ("[toy]\nk = [[1]]\n", ["k: must be a single value or a list"]),
        ("beam = \n", ["not valid TOML", "line 1"]),
    ],
)
def test_bad_file_is_a_usage_error_that_names_the_place(cli: RunCli, text: str, complaints: list[str]) -> None:
    Path("xgr.toml").write_text(text)
    outcome = cli("toy", "--in", "a")
    assert outcome.code == 2
    assert outcome.out == ""
    for complaint in complaints:
        assert complaint in outcome.err


def test_a_link_to_a_file_that_is_gone_is_an_error(cli: RunCli) -> None:
    """The settings would be missed in silence."""
    Path("xgr.toml").symlink_to("gone.toml")
    outcome = cli("toy", "--in", "a")
    assert outcome.code == 2 and "error: configuration file xgr.toml cannot be read" in outcome.err
    assert cli("toy", "--in", "a", "--config", "/dev/null").code == 0


def test_help_works_beside_a_broken_file(cli: RunCli) -> None:
    Path("xgr.toml").write_text("beam = \n")
    assert cli("toy", "--help").code == 0


def test_named_file_that_is_missing(cli: RunCli) -> None:
    outcome = cli("toy", "--in", "a", "--config", "nowhere.toml")
    assert outcome.code == 2
    assert "nowhere.toml" in outcome.err and "--config" in outcome.err


@pytest.mark.parametrize(
    ("variable", "value"), [("XGR_BEAM", "many"), ("XGR_BEAM", "0"), ("XGR_JSON", "perhaps"), ("XGR_COLOR", "pink")]
)
def test_bad_variable_is_an_error_that_names_it(
    cli: RunCli, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    outcome = cli("toy", "--in", "a")
    assert outcome.code == 2
    assert f"{variable}={value}" in outcome.err


def test_bad_option_is_named(cli: RunCli) -> None:
    outcome = cli("toy", "--in", "a", "--beam", "many")
    assert outcome.code == 2
    assert "--beam" in outcome.err and "XGR_BEAM" not in outcome.err and "toy --help" in outcome.err


def test_required_option_may_come_from_anywhere(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = cli("toy")
    assert missing.code == 2
    assert "xgr toy needs --in" in missing.err and "XGR_IN" in missing.err
    monkeypatch.setenv("XGR_IN", "from/environment")
    assert cli("toy", "--json").json["inputs"] == ["from/environment"]


def test_command_sees_its_merged_settings(cli: RunCli, toy: ModuleType) -> None:
    seen = {}

    def behaviour(output, values):  # type: ignore[no-untyped-def]
        seen.update({setting.key: setting.origin for setting in output.settings})

    toy.behaviour = behaviour  # type: ignore[attr-defined]
    cli("toy", "--in", "a")
    assert seen["in"] == "command line" and seen["beam"] == "default"


def test_unknown_option_command_and_missing_value_get_a_hint(cli: RunCli) -> None:
    for arguments, hint in (
        (["toy", "--baem", "3"], '"--beam"'),
        (["tooy"], "toy"),
        (["toy", "--beam"], "--beam"),
    ):
        outcome = cli(*arguments)
        assert outcome.code == 2
        assert hint in outcome.err


def test_mistyped_variable_is_warned_about(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XGR_BAEM", "3")
    monkeypatch.setenv("XGR_SOMETHING_ELSE", "3")
    outcome = cli("toy", "--in", "a")
    assert outcome.code == 0
    assert "XGR_BAEM" in outcome.err and "did you mean XGR_BEAM?" in outcome.err
    assert "XGR_SOMETHING_ELSE" not in outcome.err

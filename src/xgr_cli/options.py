"""How commands declare their options: ``option`` and ``argument``, and the options that every command shares.

A command is one function in ``xgr_cli/commands``; its first parameter is the ``Output`` it reports to and the others
are its options::

    def recommend(
        output: Output,
        inputs: Annotated[list[str], option("--in", help="users: file, glob or directory", panel="Input")],
        beam: Annotated[int, option("--beam", help="prefixes kept a level", panel="Search", min=1)] = 512,
    ) -> int | None:

An option without a default must come from the command line, the environment or the configuration file. The shared
options below (``--json``, ``-q``, ``-v``, ``--color``, ``--config``, ``--show-config``, ``--log-format``) are added to
every command by ``xgr_cli.command`` and must not be declared again. The function may return an exit code.

Every option has an environment variable, ``XGR_`` and its name: ``--top-k`` has ``XGR_TOP_K``. Where options of
different commands mean the same thing they share one, given with ``env``: ``build-vocab --out`` is ``XGR_VOCAB``, the
place where ``recommend --vocab`` looks. Options that mean the same in several commands are declared here once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from xgr_cli.settings import load_config
from xgr_engine.options import HistoryFormat, ListText, ScoreOver

ENV_PREFIX = "XGR_"
GENERAL_PANEL = "General"
INPUT_PANEL = "Input"
SEARCH_PANEL = "Search"
MACHINE_PANEL = "Machine"

ColorMode = Literal["auto", "always", "never"]
LogFormat = Literal["text", "json"]


def env_name(*flags: str) -> str:
    """``XGR_TOP_K`` for ``("-k", "--top-k")``: from the first long flag, without a ``/--no-...`` part."""
    long_flag = next(flag for flag in flags if flag.startswith("--")).split("/")[0]
    return ENV_PREFIX + long_flag.removeprefix("--").replace("-", "_").upper()


def _literal(text: str) -> str:
    """Help text as it stands: square brackets are no markup."""
    return text.replace("[", r"\[")


def option(*flags: str, help: str, panel: str | None = None, env: str | None = None, **more: Any) -> Any:
    """A ``typer.Option`` with its environment variable and help panel.

    Args:
        flags: ``"--top-k"``, ``"-k", "--top-k"``, or ``"--exclude-seen/--no-exclude-seen"``.
        help: one sentence, no full stop needed; the default and the variable are shown after it.
        panel: heading in ``--help`` under which the option stands.
        env: another variable than ``XGR_<NAME>``, where commands share a path (``XGR_VOCAB``, ``XGR_MODEL``,
            ``XGR_RECS``).
        more: passed to ``typer.Option`` (``min``, ``max``, ``metavar``, ``callback``, ``show_default``...).
    """
    return typer.Option(
        *flags, help=_literal(help), envvar=env or env_name(*flags), show_envvar=True, rich_help_panel=panel, **more
    )


def argument(*, help: str, metavar: str, **more: Any) -> Any:
    """A ``typer.Argument``. The configuration file may give it too, under its metavar in lower case."""
    return typer.Argument(help=_literal(help), metavar=metavar, **more)


JsonFlag = Annotated[bool, option("--json", help="print the result as one JSON object", panel=GENERAL_PANEL)]
QuietFlag = Annotated[
    bool, option("--quiet", "-q", help="no progress or notes; still print warnings and the result", panel=GENERAL_PANEL)
]
VerboseFlag = Annotated[bool, option("--verbose", "-v", help="more notes, and tracebacks", panel=GENERAL_PANEL)]
Color = Annotated[
    ColorMode,
    option("--color", help="colour; auto follows NO_COLOR, then FORCE_COLOR, then the terminal", panel=GENERAL_PANEL),
]
ConfigFile = Annotated[
    Path | None,
    option(
        "--config",
        help="configuration file (TOML)",
        panel=GENERAL_PANEL,
        metavar="FILE.toml",
        show_default="./xgr.toml, else [tool.xgr] of ./pyproject.toml",
        # Eager: the file must be read before the other options look for their defaults.
        is_eager=True,
        callback=load_config,
    ),
]
ShowConfig = Annotated[
    bool, option("--show-config", help="print every setting with its origin, and exit", panel=GENERAL_PANEL)
]
LogFormatOption = Annotated[LogFormat, option("--log-format", help="format of notes on stderr", panel=GENERAL_PANEL)]

# Declared by the commands that run long, and handed to xgr_cli.progress.make_progress.
LogEvery = Annotated[
    float,
    option(
        "--log-every",
        help="seconds between progress lines when no bar can be shown",
        panel=GENERAL_PANEL,
        min=0.1,
        metavar="SECONDS",
    ),
]

# ---- shared by several commands -------------------------------------------------------------------------------------


def _history_format(**more: Any) -> Any:
    return option("--history-format", help="what the history column holds", panel=INPUT_PANEL, **more)


def _list_text(**more: Any) -> Any:
    help = "lists are stored as text in this syntax; it is parsed, never evaluated"
    return option("--list-text", help=help, panel=INPUT_PANEL, **more)


# Shown as the default of options of `xgr eval` that default to those of the run being measured.
OF_THE_RUN = "the run's"

HistoryColumn = Annotated[str, option("--history-col", help="list column, oldest item first", panel=INPUT_PANEL)]
HistoryFormatOption = Annotated[HistoryFormat, _history_format()]
HistoryFormatOfRun = Annotated[HistoryFormat | None, _history_format(show_default=OF_THE_RUN)]
ListTextOption = Annotated[ListText | None, _list_text()]
ListTextOfRun = Annotated[ListText | None, _list_text(show_default=OF_THE_RUN)]
ScoreOverOption = Annotated[
    ScoreOver,
    option(
        "--score-over",
        help="softmax of a level over the model's vocabulary, over the level's codes, or over those the user may get",
        panel=SEARCH_PANEL,
    ),
]
Device = Annotated[str, option("--device", help="auto, cpu, cuda or cuda:N", panel=MACHINE_PANEL)]
Threads = Annotated[
    int | None, option("--threads", help="CPU threads", panel=MACHINE_PANEL, min=1, show_default="torch's choice")
]

# Name of the wrapper's keyword -> (type, default); see xgr_cli.command.
SHARED_OPTIONS: dict[str, tuple[Any, object]] = {
    "json_mode": (JsonFlag, False),
    "quiet": (QuietFlag, False),
    "verbose": (VerboseFlag, False),
    "color": (Color, "auto"),
    "config": (ConfigFile, None),
    "show_config": (ShowConfig, False),
    "log_format": (LogFormatOption, "text"),
}

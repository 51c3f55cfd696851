"""The ``xgr`` command line: a table of commands, one module each.

Importing this module, or a command's module, imports neither torch nor polars nor pyarrow: commands import the engine
when they run.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from xgr_cli import errors
from xgr_cli.command import as_command
from xgr_cli.output import Output, silence
from xgr_cli.signals import end_on_signals
from xgr_engine.system import keep_few_kernels, let_waiting_threads_sleep
from xgr_engine.system import version as installed_version


@dataclass(frozen=True)
class _Entry:
    """A command: ``xgr_cli.commands.<module>``, function ``<function>``, its heading in ``xgr --help``."""

    module: str
    function: str
    panel: str


COMMANDS: dict[str, _Entry] = {
    "build-vocab": _Entry("build_vocab", "build_vocab", "Prepare"),
    "convert": _Entry("convert", "convert", "Prepare"),
    "recommend": _Entry("recommend", "recommend", "Run"),
    "eval": _Entry("evaluate", "evaluate", "Run"),
    "bench": _Entry("bench", "bench", "Run"),
    "inspect": _Entry("inspect", "inspect", "Look"),
    "doctor": _Entry("doctor", "doctor", "Look"),
}

_HELP = """Batch recommendations from generative recommenders: semantic-ID beam search for every user.

[bold]Examples[/bold]

  $ xgr build-vocab catalog.parquet --out vocab
  $ xgr convert checkpoint/ --vocab vocab --out model
  $ xgr recommend --in users.parquet --model model --vocab vocab --out recs --beam 512 --top-k 50
  $ xgr eval --recs recs --truth users.parquet --truth-col target
  $ xgr bench --beam 512
  $ xgr inspect recs

Settings: command line, then XGR_* variables, then xgr.toml, then defaults; --show-config tells where each came from.

Exit codes: 0 done or nothing to do; 1 failed; 2 bad usage, configuration or input; 3 more rejects than --max-rejects; \
75 another run holds the output; 130 and 143 stopped by a signal."""


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"xgr {installed_version('xgr') or 'from source, not installed'}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """The options of ``xgr`` itself."""


def build_app() -> typer.Typer:
    """The Typer application with every command of ``COMMANDS``."""
    app = typer.Typer(
        name="xgr",
        help=_HELP,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_root)
    for name, entry in COMMANDS.items():
        module = importlib.import_module(f"xgr_cli.commands.{entry.module}")
        app.command(name, help=_command_help(module), rich_help_panel=entry.panel)(
            as_command(getattr(module, entry.function))
        )
    return app


def _command_help(module: Any) -> str:
    """First paragraph of the module's docstring, its ``EXAMPLES``, then the rest of the docstring.

    A paragraph is one line: the help page keeps line breaks, and wraps at the terminal's width by itself.
    """
    first, *rest = ((module.__doc__ or "").strip().replace("[", r"\[")).split("\n\n")
    examples = "\n".join(f"  $ {line}" for line in module.EXAMPLES).replace("[", r"\[")
    paragraphs = (" ".join(paragraph.split()) for paragraph in (first, *rest))
    return "\n\n".join([next(paragraphs), "[bold]Examples[/bold]", examples, *paragraphs])


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        group: Any = typer.main.get_command(build_app())
        # standalone_mode=False: errors come here instead of being printed in the parser's own style.
        code = group(_spread(arguments, group) or ["--help"], prog_name="xgr", standalone_mode=False)
        return code if isinstance(code, int) else errors.DONE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else errors.FAILED
    except typer.Abort:
        return errors.INTERRUPTED
    except BaseException as error:  # a bad command line, a bad configuration file, Ctrl-C while importing
        return errors.report(error, Output(verbose="-v" in arguments or "--verbose" in arguments))


def _spread(arguments: Sequence[str], group: Any) -> list[str]:
    """``--in a b c`` as ``--in a --in b --in c``, so that the shell may expand a pattern after ``--in``.

    Only for commands without positional arguments, where the meaning is plain; the parser takes one value an option.
    """
    command = group.commands.get(arguments[0]) if arguments else None
    if command is None or any(param.param_type_name == "argument" for param in command.params):
        return list(arguments)
    repeatable = {flag for param in command.params if param.multiple for flag in param.opts}
    spread, flag, values = [arguments[0]], "", 0
    for word in arguments[1:]:
        if word.startswith("-") and word != "-":
            name, equals, _ = word.partition("=")
            flag, values = (name, int(bool(equals))) if name in repeatable else ("", 0)
        elif flag:
            spread += [flag] if values else []
            values += 1
        spread.append(word)
    return spread


def main() -> None:
    """Entry point of the ``xgr`` script."""
    _use_utf8()
    end_on_signals()
    let_waiting_threads_sleep()
    keep_few_kernels()
    _prepare_streams()
    if os.environ.get("NO_COLOR"):
        os.environ.pop("FORCE_COLOR", None)  # with both set, help pages would come out bold
    for size in ("COLUMNS", "LINES"):
        if not os.environ.get(size, "").strip("0"):
            os.environ.pop(size, None)  # some environments set 0 or nothing; rich would then show nothing at all
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            silence(stream)
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                code = code or errors.FAILED
    sys.exit(code)


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has another encoding, such as LC_ALL=C.

    There Python keeps the bytes of a name that the locale cannot spell as lone surrogates, which Arrow, tokenizers and
    files in UTF-8 refuse.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


class _ClosedStdout(io.TextIOWrapper):
    """Stands in for a standard output that was closed before the command began (``>&-``): printing is an error."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "closed, so the result cannot be printed", "standard output")


def _prepare_streams() -> None:
    """Point closed streams (``>&-``) at the null device, or the next file opened would take their place.

    Notes to a closed stderr are lost; a result for a closed stdout is an error, like any that cannot be written. Text
    that the locale cannot spell is escaped instead of failing.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:
            null = open(os.devnull, "wb")  # noqa: PTH123, SIM115
            kind = _ClosedStdout if name == "stdout" else io.TextIOWrapper
            setattr(sys, name, kind(null, encoding="utf-8", errors="backslashreplace"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()

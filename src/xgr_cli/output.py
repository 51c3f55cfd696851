"""The one place that prints. The result goes to stdout, once; notes, warnings, progress and errors go to stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from xgr_cli.settings import Setting

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SCHEMA_VERSION = 1
# Width of tables where no terminal gives one: wide enough that paths are not cut.
PLAIN_WIDTH = 160
_LEAST_VALUE_WIDTH = 24  # columns that a value needs beside its name


class Output:
    """Where a command reports to.

    Args:
        json_mode: the result is one JSON object instead of text.
        quiet: no notes, no progress. Warnings, errors and the result stay.
        verbose: debug notes as well, and tracebacks.
        color: ``always``, ``never``, or ``auto``: like ``never`` if NO_COLOR is set and not empty, else coloured on a
            terminal or if FORCE_COLOR is set.
        log_format: ``text``, or ``json``: one JSON object a line on stderr.
        settings: merged settings of the command with their origins, for manifests.

    Attributes:
        around_lines: entered while a line goes to stderr; a progress bar makes room for it.
    """

    def __init__(
        self,
        json_mode: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        *,
        color: str = "auto",
        log_format: str = "text",
        settings: Sequence[Setting] = (),
    ) -> None:
        self.json_mode = json_mode
        self.quiet = quiet
        self.verbose = verbose
        self.color = color
        self.log_format = log_format
        self.settings = tuple(settings)
        self._context: dict[str, object] = {}
        self._result_written = False
        self.around_lines: Callable[[], AbstractContextManager[object]] = nullcontext

    # ---- the result -------------------------------------------------------------------------------------------------

    def result(self, record: Mapping[str, object], table: Callable[[Output], None]) -> None:
        """Write the command's one result: ``record`` as JSON, or what ``table`` prints with ``print`` and ``table``."""
        if self._result_written:
            raise RuntimeError("a command has one result")
        self._result_written = True
        if not self.json_mode:
            table(self)
            return
        text = json.dumps(
            jsonable({"schema_version": SCHEMA_VERSION, **record}),
            indent=2,
            ensure_ascii="utf" not in str(getattr(sys.stdout, "encoding", "")).lower(),
        )
        _write(sys.stdout, text + "\n")

    def print(self, *renderables: RenderableType) -> None:
        """Text, tables or any other rich renderable to stdout; strings are not read as markup."""
        for renderable in renderables:
            self._show(sys.stdout, renderable)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
        """A table, numeric columns aligned to the right."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        cells = [list(row) for row in rows]
        view = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for at, column in enumerate(columns):
            numeric = bool(cells) and all(_is_number(row[at]) or row[at] is None for row in cells)
            view.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in cells:
            view.add_row(*(Text(show(cell)) for cell in row))
        self.print(view)

    def fields(self, values: Mapping[str, object], *, title: str = "") -> None:
        """Names and values, one a line."""
        from rich.table import Table
        from rich.text import Text

        if title:
            self.print(Text(title, style="bold"))
        if self._console(sys.stdout).width < max(map(len, values), default=0) + _LEAST_VALUE_WIDTH:
            for name, value in values.items():  # too narrow for two columns: let the terminal break the lines
                self.print(Text(f"  {name}: {show(value)}"))
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in values.items():
            grid.add_row(Text(f"  {name}"), Text(show(value)))
        self.print(grid)

    # ---- notes ------------------------------------------------------------------------------------------------------

    def bind(self, **context: object) -> None:
        """Fields that every later JSON log line carries, such as ``run_id``."""
        self._context.update(context)

    def debug(self, text: str, **details: object) -> None:
        """For somebody who asked with ``-v``."""
        if self.verbose and not self.quiet:
            self._log("debug", text, details)

    def note(self, text: str, **details: object) -> None:
        """What is going on."""
        if not self.quiet:
            self._log("info", text, details)

    def warn(self, text: str, **details: object) -> None:
        """Something the user should look at; shown with ``-q`` too."""
        self._log("warning", text, details)

    def error(self, what: str, why: str = "", hint: str = "") -> None:
        """What went wrong, why, and what to do next."""
        self._log("error", what, {"why": why, "next": hint})

    def _log(self, level: str, text: str, details: Mapping[str, object]) -> None:
        given = {name: value for name, value in details.items() if value not in ("", None)}
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self.log_format == "json":
            line = {"time": stamp, "level": level, "message": text, **self._context, **given}
            _write(sys.stderr, json.dumps(jsonable(line)) + "\n")
            return
        from rich.text import Text

        label, style = {"warning": ("warning: ", "yellow"), "error": ("error: ", "bold red")}.get(level, ("", ""))
        body = Text.assemble((self._log_prefix(stamp), "dim"), (label, style), text)
        if level == "error":
            for name, value in given.items():
                body.append(f"\n  {name}: {value}")
        elif given:
            body.append("  " + "  ".join(f"{name}={show(value)}" for name, value in given.items()), style="dim")
        with self.around_lines():
            self._show(sys.stderr, body)

    def _log_prefix(self, stamp: str) -> str:
        """Time and run, so that a log file makes sense the next morning; on a terminal they would be in the way."""
        run = self._context.get("run_id")
        return f"{stamp} {str(run)[:8]} " if run and not sys.stderr.isatty() else ""

    # ---- terminals --------------------------------------------------------------------------------------------------

    @property
    def interactive(self) -> bool:
        """Whether a progress bar makes sense on stderr."""
        return (
            not self.quiet
            and self.log_format == "text"
            and sys.stderr.isatty()
            and not os.environ.get("CI")
            and os.environ.get("TERM", "") != "dumb"
        )

    def _show(self, stream: IO[str], renderable: RenderableType) -> None:
        from rich.text import Text

        console = self._console(stream)
        # Captured first: rich ends the process when the reader of a pipe is gone, which a job must not do.
        with console.capture() as captured:
            lines = isinstance(renderable, str | Text)
            console.print(renderable, markup=False, highlight=False, soft_wrap=lines)
        text = captured.get()
        if not stream.isatty():  # rich pads lines with spaces up to the width
            text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        _write(stream, text)

    def _console(self, stream: IO[str]) -> Console:
        from rich.console import Console

        forced: dict[str, Any] = {}
        if self.color == "never" or (self.color == "auto" and os.environ.get("NO_COLOR")):
            # neither colours nor bold, whatever FORCE_COLOR says
            forced = {"no_color": True, "color_system": None, "force_terminal": stream.isatty()}
        elif self.color == "always":
            forced = {"no_color": False, "force_terminal": True}
        width = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
        return Console(file=stream, width=width, emoji=False, **forced)


def show(value: object) -> str:
    """A value for people: thousands separators, short floats, lists joined."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(show(entry) for entry in value) or "-"
    return str(value)


def jsonable(value: object) -> object:
    """``value`` in JSON's own types; paths become text, NaN and infinities become null."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return jsonable(value.tolist())
    return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def silence(stream: IO[str]) -> None:
    """Point a stream whose reader is gone at the null device, so that later writes and the last flush succeed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _write(stream: IO[str], text: str) -> None:
    """Write and flush. A reader that went away (``| head``), or a full log, ends the printing and not the job.

    Raises:
        OSError: the result cannot be written.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        silence(stream)  # otherwise the interpreter would try to write it again on exit
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error

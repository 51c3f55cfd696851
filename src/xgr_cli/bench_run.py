"""A run of ``xgr bench``: its progress on the terminal, and what becomes of its record, even if the run is stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xgr_cli.bench_views import show_bench
from xgr_cli.output import Output, jsonable
from xgr_engine.bench.options import BenchWishes
from xgr_engine.bench.record import has_figures, write_record
from xgr_engine.errors import OutputWriteError, UsageError
from xgr_engine.job.stop import Stop, Stopped
from xgr_engine.progress import ProgressSink


@dataclass
class BenchRun:
    """One run: :meth:`measure` it, and if that is stopped, tell the user with :meth:`stopped`."""

    output: Output
    html: Path | None
    out: Path | None
    progress: ProgressSink
    record: dict[str, Any] | None = None
    older: set[str] = field(default_factory=set)  # options whose files were there before the run
    unwritten: set[str] = field(default_factory=set)  # options whose files were not written when last tried
    _ours: tuple[int, int] | None = None  # tells the file of --out, as the run found or last wrote it, from others

    def measure(
        self, wishes: BenchWishes, configured: set[str], device: str, threads: int | None, stop: Stop
    ) -> int | None:
        """Measure all that was asked for; returns the exit code."""
        # otherwise torch's profiler reports its start and end on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        from xgr_engine.bench.choices import choose_options, open_device
        from xgr_engine.bench.places import check_places
        from xgr_engine.bench.run import BenchCaller, run_bench

        def note(text: str) -> None:
            stop.check()  # in case a signal's exception got lost, in a destructor say
            self.output.note(text)

        stop.on_forced = self._last_words
        place = open_device(device, threads, self.output.note)
        options = choose_options(place, wishes, configured)
        files = {flag: path for flag, path in (("--html", self.html), ("--out", self.out)) if path is not None}
        check_places(files, options)
        self.older = {flag for flag, path in files.items() if path.exists()}
        self._ours = _identity(self.out) if self.out else None
        caller = BenchCaller(tuple(sys.argv[1:]), self.progress, note, self._keep)
        try:
            record = run_bench(options, place, caller)
        except Exception:
            if self.record is not None and self.record["rows"]:
                self._show(self.record)
            raise
        self._show(record)
        if record["state"] == "failed":
            self.output.error("nothing that was asked for could be measured", why=_first_reason(record))
        return 1 if self.unwritten or record["state"] == "failed" else None

    def stopped(self, stopped: Stopped) -> int:
        """Show what there is, and say how far the run came."""
        record = self.record
        if record is None:
            self.output.error(f"{stopped}: nothing was measured yet")
            return stopped.exit_code
        if self.output.json_mode or ("ceilings" in record and (record["rows"] or has_figures(record))):
            self._show(record)
        at, seconds, rows = record["stopped"], record["seconds"], len(record["rows"])
        is_kept = self.out is not None and "--out" not in self.unwritten
        kept = f"; the record so far, state interrupted: {self.out}" if is_kept else ""
        planned = f": {rows} of {at['rows_planned']} rows measured" if at["rows_planned"] else ""
        self.output.error(f"{stopped} after {seconds:,.0f} s, at {at['part']}{planned}{kept}")
        return stopped.exit_code

    def _keep(self, record: dict[str, Any]) -> None:
        first, self.record = self.record is None, record
        if (out := self.out) is None:
            return
        found = _identity(out)
        if self._ours and found and self._ours != found:
            self._not_written("--out", f"{out} cannot be written: another run writes it too")
            return
        if self._write("--out", out, record, lambda: write_record(out, jsonable(record))):
            self._ours = _identity(out)
        elif first and self.unwritten:
            raise OutputWriteError(f"--out {out}: cannot be written", hint="name a file somewhere else")

    def _write(self, flag: str, path: Path, record: dict[str, Any], write: Callable[[], object]) -> bool:
        """Write a file; returns whether it was written. An older file stays until there are figures to replace it.

        A file that cannot be written is only a warning: what was measured is shown all the same.
        """
        if flag in self.older and not has_figures(record):
            if record["state"] != "running":
                self._not_written(flag, f"{path} stays as it was before: nothing was measured")
            return False
        try:
            write()
        except (OSError, UsageError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            self._not_written(flag, f"{path} cannot be written: {why}")
            return False
        self.unwritten.discard(flag)
        return True

    def _not_written(self, flag: str, text: str) -> None:
        if flag not in self.unwritten:
            self.output.warn(f"{flag} {text}")
        self.unwritten.add(flag)

    def _last_words(self, stopped: Stopped) -> None:
        """Called just before the process is ended by force."""
        from xgr_engine.bench.foreign.process import end_all

        end_all()
        if self.record is not None:
            self._keep({**self.record, "state": "interrupted"})

    def _show(self, record: dict[str, Any]) -> None:
        from xgr_engine.bench.report.page import write_page

        if self.output.json_mode:  # as text, the result holds them
            for text in record["warnings"]:
                self.output.warn(text)
        self.output.result(record, lambda out: show_bench(out, record))
        html = self.html if "ceilings" in record else None
        if html is not None and self._write("--html", html, record, lambda: write_page(html, record)):
            self.output.note(f"report: {html}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from one that another run put in its place; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _first_reason(record: dict[str, Any]) -> str:
    """Why a run measured nothing: its first reason."""
    found = [(part["part"], part["reason"]) for part in record["left_out"]]
    for row in record["rows"]:
        found += [(one["name"], one.get("reason") or one["status"]) for one in row["contenders"]]
    if record["constraint"]:
        found += [(f"{one['items']:,} items", one.get("reason", "")) for one in record["constraint"]["sizes"]]
    return ": ".join(found[0]) if found else ""

"""Progress of a long run on stderr: a bar on a terminal, else one plain line every ``--log-every`` seconds."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from typing import Any

from xgr_cli.output import Output, show
from xgr_engine.progress import NoProgress, ProgressSink

_UNKNOWN_COLUMNS, _UNKNOWN_ROWS = 80, 24


def make_progress(output: Output, log_every: float = 60.0, *, with_rate: bool = True) -> ProgressSink:
    """The sink that suits the terminal: bar, plain lines, or nothing with ``-q``.

    Args:
        with_rate: show pieces per second; off where pieces differ so much that a rate means nothing.
    """
    if output.quiet:
        return NoProgress()
    if output.interactive:
        return BarProgress(output, with_rate=with_rate)
    return LineProgress(output, log_every, with_rate=with_rate)


class LineProgress:
    """Lines such as ``1,200 of 4,533 users (26 %), 35.1 users/s, 95 s left``. For logs, pipes and CI."""

    def __init__(self, output: Output, log_every: float, *, with_rate: bool = True) -> None:
        self._output = output
        self._log_every = log_every
        self._with_rate = with_rate
        self._total = 0
        self._unit = ""
        self._done = 0
        self._started = self._last_line = 0.0
        self._running = False

    def start(self, total: int, unit: str) -> None:
        self._total, self._unit, self._done = total, unit, 0
        self._started = self._last_line = time.monotonic()
        self._running = True

    def advance(self, n: int, **info: object) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._last_line < self._log_every:
            return
        self._last_line = now
        rate = self._done / max(now - self._started, 1e-9)
        of_total = f" of {self._total:,}" if self._total else ""
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        left = f", {(self._total - self._done) / rate:,.0f} s left" if self._total and rate else ""
        self._output.note(f"{self._done:,}{of_total} {self._unit}{share}{self._rate(rate)}{left}", **info)

    def finish(self) -> None:
        if not self._running:
            return
        self._running = False
        seconds = time.monotonic() - self._started
        rate = self._done / max(seconds, 1e-9)
        unit = self._unit.removesuffix("s") if self._done == 1 else self._unit
        self._output.note(f"{self._done:,} {unit} in {seconds:,.1f} s{self._rate(rate)}")

    def _rate(self, rate: float) -> str:
        return f", {show(rate)} {self._unit}/s" if self._with_rate else ""


class BarProgress:
    """A bar that leaves nothing behind."""

    def __init__(self, output: Output, *, with_rate: bool = True) -> None:
        self._output = output
        self._with_rate = with_rate
        self._bar: Any = None

    def start(self, total: int, unit: str) -> None:
        from tqdm import tqdm

        self.finish()
        # 0 columns and rows in a container whose terminal nobody sized: tqdm would show nothing
        sized = os.get_terminal_size(sys.stderr.fileno()).columns > 0
        rate = "  {rate_noinv_fmt}" if self._with_rate else ""
        known = "{bar:12} {n:,}/{total:,} " + unit + rate + "  {remaining} left{postfix}"
        self._bar = tqdm(
            total=total or None,
            unit=f" {unit}",
            leave=False,
            dynamic_ncols=sized,
            ncols=None if sized else _UNKNOWN_COLUMNS,
            nrows=None if sized else _UNKNOWN_ROWS,
            miniters=1,
            file=sys.stderr,
            bar_format=known if total else "{n:,} " + unit + rate + "{postfix}",
        )
        # a line printed meanwhile takes the bar's place, and the bar comes back below it
        self._output.around_lines = lambda: tqdm.external_write_mode(file=sys.stderr)

    def advance(self, n: int, **info: object) -> None:
        if self._bar is not None:
            shown = "  ".join(f"{name} {show(value)}" for name, value in info.items())
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(n)

    def finish(self) -> None:
        if self._bar is not None:
            self._output.around_lines = nullcontext
            self._bar.close()
            self._bar = None

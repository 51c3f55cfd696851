"""Quotes of a CSV file that are never closed, found before the file is parsed.

Arrow's parser accepts a file that ends inside a quoted field, and text after a closing quote. One quote too many then
swallows line ends, and rows with them, without an error. A quoted field that spans lines and is closed is legal, and so
are quotes inside a field that does not begin with one (12" pipe). But a field of very many lines is more often a stray
quote that happens to meet another one: that gives a warning, and an error if the number of lines is absurd.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import IO

import numpy as np
from numpy.typing import NDArray

from xgr_engine.errors import InputError

_BLOCK = 4 << 20
_BOM = b"\xef\xbb\xbf"
_QUOTE = 0x22
_LINE_END = re.compile(rb"[\r\n]")
_NEWLINE = 0x0A
# Lines in one field that are worth a warning, and that no real text has: descriptions and prompts have a few dozen.
_MANY_LINES = 100
_TOO_MANY_LINES = 10_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuoteFault:
    """A quoted field that swallows lines.

    Attributes:
        offset: bytes before the quote that opens it.
        why: what is wrong with its end.
    """

    offset: int
    why: str


@dataclass(frozen=True)
class QuotedField:
    """A quoted field that is closed.

    Attributes:
        offset: bytes before the quote that opens it; lines: that it is spread over.
    """

    offset: int
    lines: int


def check_quotes(
    name: object,
    open_stream: Callable[[], AbstractContextManager[IO[bytes]]],
    error: type[InputError],
    delimiter: str = ",",
) -> None:
    """Raises ``error``, with the file's name and the line of the quote, if a quoted field of the file swallows lines.

    A field of more than 100 lines is logged as a warning, one of more than 10,000 is refused.

    Args:
        open_stream: opens the (decompressed) bytes; called twice where there is something to say.
    """
    with open_stream() as stream:
        found = scan_quotes(stream, delimiter)
    if isinstance(found, QuotedField) and found.lines <= _MANY_LINES:
        return
    with open_stream() as stream:
        place = f"{name}, line {_line_of(stream, found.offset)}"
    if isinstance(found, QuoteFault):
        raise error(
            f"{place}: a quoted field begins there, and {found.why}",
            why="everything after it would be read as the text of one field, and those rows would be lost",
            hint='close the quote, or double a quote that belongs to the text: "12"" pipe"',
        )
    if found.lines > _TOO_MANY_LINES:
        raise error(
            f"{place}: a quoted field of {found.lines:,} lines begins there",
            why="a quote that does not belong there turns all rows up to the next quote into one text",
            hint="fix the quote; if a field really is that long, write the file as Parquet",
        )
    _warn_once(
        f"{place}: a quoted field of {found.lines:,} lines begins there; if its quote does not belong there, the rows "
        "in it are lost"
    )


@cache
def _warn_once(text: str) -> None:
    """Once per text: a file may be checked several times in a run."""
    _log.warning("%s", text)


def scan_quotes(stream: IO[bytes], delimiter: str = ",") -> QuoteFault | QuotedField:
    """The first quoted field that is open at the end of the file, or that spans lines and does not end at its quote.

    Exact for Arrow's dialect: a quote opens a field only as its first byte, two quotes inside it are one of its text.

    Returns:
        Where there is no such field, the quoted one with the most lines (of 0 lines where none is quoted).
    """
    scan = _Scan(delimiter.encode())
    for start, window in _windows(stream):
        fault = scan.window(start, window)
        if fault is not None:
            return fault
    return QuoteFault(scan.opened, "the quote is never closed") if scan.inside else scan.longest


def _line_of(stream: IO[bytes], offset: int) -> int:
    """Number of the line, from 1, that the byte ``offset`` is in."""
    lines = 1
    while offset > 0 and (block := stream.read(min(_BLOCK, offset))):
        lines += block.count(b"\n")
        offset -= len(block)
    return lines


def _windows(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Overlapping windows and the offset of each, so that every byte is once neither the first nor the last of one."""
    first = stream.read(_BLOCK)
    start = -1
    if first.startswith(_BOM):
        first, start = first[len(_BOM) :], len(_BOM) - 1
    tail, block = b"\n", first
    while block:
        window = tail + block
        yield start, window
        tail = window[-2:]
        start += len(window) - len(tail)
        block = stream.read(_BLOCK)
    yield start, tail + b"\n"


class _Scan:
    """The state between two windows.

    A quote inside a field ends it, and one directly behind that goes on with it: so two quotes of its text need no
    looking ahead.
    """

    def __init__(self, delimiter: bytes) -> None:
        self.inside = False
        self.opened = 0
        self.longest = QuotedField(0, 0)
        self._lines = 0  # line ends before the window
        self._opened_line = 0
        self._closed = -2  # offset of the last closing quote
        self._spans = False  # whether the open field has a line end in an earlier window
        self._ends = np.zeros(256, np.bool_)
        self._ends[list(delimiter + b"\r\n")] = True

    def window(self, start: int, window: bytes) -> QuoteFault | None:
        """Takes the quotes of one window but those at its ends."""
        fault = None
        if b'"' in window:
            data = np.frombuffer(window, np.uint8)
            at = np.flatnonzero(data[1:-1] == _QUOTE) + 1
            before, after = self._ends[data[at - 1]], self._ends[data[at + 1]] | (data[at + 1] == _QUOTE)
            lines = self._lines + np.searchsorted(np.flatnonzero(data[1:-1] == _NEWLINE) + 1, at)
            if not self._take_regular(start + at, before, after, lines):
                fault = self._take_each(start, window, at, before, after, lines)
        self._lines += window.count(b"\n", 1, len(window) - 1)
        may_go_on = self.inside or self._closed == start + len(window) - 2
        if may_go_on and not self._spans:
            self._spans = _LINE_END.search(window, max(0, self.opened - start)) is not None
        return fault

    def _take_regular(
        self, at: NDArray[np.int64], before: NDArray[np.bool_], after: NDArray[np.bool_], lines: NDArray[np.int64]
    ) -> bool:
        """Quotes that open and close in turn, each where it may; False, and nothing taken, if they do not."""
        if not len(at):
            return True
        closing = np.arange(len(at)) % 2 == (0 if self.inside else 1)
        goes_on = np.diff(at, prepend=self._closed) == 1
        opening = ~closing & ~goes_on
        if not (before[opening].all() and after[closing].all()):
            return False
        self._find_longest(at, opening, closing, lines)
        if opening.any():
            self.opened, self._spans = int(at[opening][-1]), False
            self._opened_line = int(lines[opening][-1])
        if closing.any():
            self._closed = int(at[closing][-1])
        self.inside = not closing[-1]
        return True

    def _find_longest(
        self, at: NDArray[np.int64], opening: NDArray[np.bool_], closing: NDArray[np.bool_], lines: NDArray[np.int64]
    ) -> None:
        """Looks at every field that a quote of the window may close."""
        if not closing.any():
            return
        opener = np.maximum.accumulate(np.where(opening, np.arange(len(at)), -1))[closing]  # -1: before the window
        spread = lines[closing] - np.where(opener < 0, self._opened_line, lines[opener]) + 1
        most = int(spread.argmax())
        if spread[most] > self.longest.lines:
            offset = self.opened if opener[most] < 0 else int(at[opener[most]])
            self.longest = QuotedField(offset, int(spread[most]))

    def _take_each(
        self,
        start: int,
        window: bytes,
        at: NDArray[np.int64],
        before: NDArray[np.bool_],
        after: NDArray[np.bool_],
        lines: NDArray[np.int64],
    ) -> QuoteFault | None:
        """The same one by one, for windows with quotes inside unquoted fields."""
        each = zip(at.tolist(), before.tolist(), after.tolist(), lines.tolist(), strict=True)
        for place, begins, ends, line in each:
            offset = start + place
            if self.inside:
                self.inside, self._closed = False, offset
                if line - self._opened_line >= self.longest.lines:
                    self.longest = QuotedField(self.opened, line - self._opened_line + 1)
                if not ends and self._has_line_end(start, window, place):
                    return QuoteFault(self.opened, "the next quote, some lines later, does not end the field")
            elif offset == self._closed + 1:
                self.inside = True
            elif begins:
                self.inside, self.opened, self._spans = True, offset, False
                self._opened_line = line
        return None

    def _has_line_end(self, start: int, window: bytes, stop: int) -> bool:
        return self._spans or _LINE_END.search(window, max(0, self.opened - start), stop) is not None

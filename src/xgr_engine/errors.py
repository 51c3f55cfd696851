"""One tree of exceptions. Each says what happened, why, and what to do next.

The command line maps a class to an exit code (``exit_code``) and prints the three parts; a library user catches
``XgrError`` or one of its children.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class XgrError(Exception):
    """Root of everything this package raises on purpose.

    Args:
        what: one line: what went wrong, with the name of the file, column, token or option.
        why: the cause, if it is not plain from ``what``.
        hint: what to do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.hint) if part)

    def name_arguments(self) -> None:
        """Rewrites the texts for a caller in Python: :func:`with_arguments`."""
        self.what, self.why, self.hint = map(with_arguments, (self.what, self.why, self.hint))
        self.args = (self.what, *self.args[1:])


# A command line in backticks, which stays as it is, or a flag.
_FLAG = re.compile(r"`[^`]*`|--([a-z][a-z-]*[a-z]|[a-z])")
# Where the keyword of the Python interface is not the flag's name.
_ARGUMENTS = {"exclude-col": "exclude"}


def with_arguments(text: str) -> str:
    """A message that names flags (``--top-k``), naming keyword arguments (``top_k``) instead."""
    return _FLAG.sub(lambda found: _ARGUMENTS.get(found[1], found[1].replace("-", "_")) if found[1] else found[0], text)


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Errors raised inside speak to a caller in Python: they name arguments where they named flags."""
    try:
        yield
    except XgrError as error:
        error.name_arguments()
        raise


class UsageError(XgrError):
    """A bad option, a bad combination of options, or a bad configuration file."""

    exit_code = 2


class InputError(XgrError):
    """A catalog, history, checkpoint or other input that cannot be used as it is."""

    exit_code = 2


class CatalogError(InputError):
    """The catalog cannot become a vocabulary."""


class CheckpointError(InputError):
    """The checkpoint cannot be converted, or the model directory cannot be read."""


class HistoryError(InputError):
    """The users' histories cannot be read (a column, a type, a file)."""


class UnreadableRowsError(HistoryError):
    """Some rows of a file of histories are damaged; the rest of it can be read."""


class OutputExistsError(InputError):
    """The output directory holds something that this run must not overwrite."""


class TooManyRejectsError(XgrError):
    """The run finished, but more rows were set aside than ``--max-rejects`` allows."""

    exit_code = 3


class OutputLockedError(XgrError):
    """Another run holds the output directory (EX_TEMPFAIL)."""

    exit_code = 75


class OutputWriteError(XgrError):
    """A file of the output cannot be written: no space, a quota, a limit on file sizes, a failing disk."""


class BackendUnavailableError(XgrError):
    """An implementation asked for by name cannot run on this machine."""

    exit_code = 2

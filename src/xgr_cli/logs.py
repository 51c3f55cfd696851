"""Log records of the engine (standard ``logging``) come out like the command's own notes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from xgr_cli.output import Output


class _ToOutput(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR:
            self._output.error(text)
        elif record.levelno >= logging.WARNING:
            self._output.warn(text)
        elif record.levelno >= logging.INFO:
            self._output.note(text)
        else:
            self._output.debug(text)


@contextmanager
def engine_logs_to(output: Output) -> Iterator[None]:
    """While a command runs, records of the ``xgr_engine`` loggers become its notes and warnings on stderr."""
    logger = logging.getLogger("xgr_engine")
    handler, level, propagate = _ToOutput(output), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if output.verbose else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate

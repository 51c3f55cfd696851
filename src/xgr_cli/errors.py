"""From an exception to an exit code and three short lines: what, why, what to do next.

Exit codes: 0 done or nothing to do; 1 failed; 2 bad usage, configuration or input; 3 more rejects than allowed;
75 another run holds the output; 130 / 143 stopped by a signal.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any

from xgr_cli.output import Output
from xgr_cli.settings import config_place, environment_variable, near_miss, option_key
from xgr_engine.errors import XgrError
from xgr_engine.job.stop import Stopped

DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130

# The parser puts this before the text of an exception; it says nothing to someone who mistyped a value.
_PREFIX = "Value error, "

REPORT_HINT = "run again with -v or XGR_DEBUG=1 for the traceback"

_NO_PERMISSION = "the user running xgr may not read or write there", "grant that permission, or use another place"
_FILE_IN_PATH = "there is a file where the path needs a directory", "check the path, or use another place"
_FULL = "the disk or the quota is full", "make room, or use another place; then run the same command"
# System errors that a user can fix: why, and what to do next.
_SYSTEM_ERRORS = {
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: ("the file system is mounted read-only", "use a place on another one"),
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENOTDIR: _FILE_IN_PATH,
    errno.EEXIST: _FILE_IN_PATH,
    errno.ENOENT: ("a file or directory of the path is missing", "check the path"),
    errno.EBADF: ("nobody would get it", "send it to a file, or to /dev/null"),
    errno.ENAMETOOLONG: ("the file system allows no name of that length", "use a shorter one"),
}


def report(error: BaseException, output: Output) -> int:
    """Say on stderr what happened, and return the exit code."""
    if isinstance(error, Stopped):
        output.error(str(error), hint="run the same command again: it continues with what is not finished")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        output.error("stopped by Ctrl-C")
        return INTERRUPTED
    if output.verbose or os.environ.get("XGR_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, XgrError):
        output.error(error.what, error.why, error.hint)
        return error.exit_code
    if is_parser_error(error):
        output.error(*_explain_parser_error(error))
        return USAGE
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        output.error(
            f"not valid UTF-8: {error.object[max(0, error.start - 60) : error.end + 60]}",
            why="file names and texts must be UTF-8",
            hint="rename the file or directory, or correct the text",
        )
        return USAGE
    if isinstance(error, OSError) and error.strerror:
        output.error(*_explain_system_error(error))
        return FAILED
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        first_line = (str(error) or "no memory left").splitlines()[0]
        output.error(f"out of memory: {first_line}", hint="let the job use less with --max-memory, or add memory")
        return FAILED
    output.error(
        f"{type(error).__name__}: {error}", why="xgr did not expect this: probably a bug in xgr", hint=REPORT_HINT
    )
    return FAILED


def _explain_system_error(error: OSError) -> tuple[str, str, str]:
    """What, why and next for a file or directory that the system refuses."""
    place = f"{error.filename}: " if error.filename else ""
    why, hint = _SYSTEM_ERRORS.get(error.errno or 0, ("", REPORT_HINT))
    return f"{place}{error.strerror}", why, hint


def is_parser_error(error: BaseException) -> bool:
    """Whether the option parser raised this. Its classes have no public name, their two members are documented."""
    return isinstance(error, Exception) and hasattr(error, "format_message") and hasattr(error, "exit_code")


def _explain_parser_error(error: Any) -> tuple[str, str, str]:
    """What, why and next for a bad command line, variable or configuration value."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    help_hint = f"see {ctx.command_path} --help" if ctx else "see xgr --help"
    unknown = getattr(error, "option_name", None)
    if unknown and ctx is not None and type(error).__name__ == "NoSuchOption":
        flags = [flag for known in ctx.command.params for flag in known.opts if flag.startswith("--")]
        return f"{ctx.command_path}: no such option: {unknown}", "", f"{near_miss(unknown, flags)} ({help_hint})"
    message = str(getattr(error, "message", "") or error.format_message()).replace(_PREFIX, "")
    if param is None or ctx is None:
        return _first_lower(error.format_message().replace(_PREFIX, "")), "", help_hint
    source = ctx.get_parameter_source(param.name)
    origin = source.name if source else ""
    if type(error).__name__ == "MissingParameter":
        return f"{ctx.command_path} needs {_spelled(param)}", "", help_hint
    if origin == "ENVIRONMENT":
        variable = environment_variable(param) or ""
        return f"{variable}={os.environ.get(variable, '')}: {message}", "", f"correct or unset {variable}"
    if origin == "DEFAULT_MAP":
        place = config_place(ctx, param.name)
        return f'{place}: key "{option_key(param)}": {message}', "", f"correct it there, or give {_spelled(param)}"
    return f"{_spelled(param)}: {message}", "", help_hint


def _spelled(param: Any) -> str:
    flags = [flag for flag in param.opts if flag.startswith("--")]
    return str(flags[0]) if flags else str(param.metavar or param.name)


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]

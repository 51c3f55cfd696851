"""The result of a benchmark: as a file, and whether its figures can be believed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xgr_engine.errors import InputError, XgrError
from xgr_engine.files import write_text

KIND = "bench"
SCHEMA_VERSION = 1
_HINT = "give files that xgr bench wrote with --out, or printed with --json"

# The figure, its unit, and what may have made its ceiling too low.
_CEILINGS = (
    ("tflops", "TFLOP/s", "its measurement was disturbed"),
    ("tbs", "TB/s", "its measurement was disturbed, or a row's data stays in caches"),
)


def write_record(path: Path, record: Any) -> None:
    """Replace ``path`` as a whole; a run that is stopped leaves what it had by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"schema_version": SCHEMA_VERSION, **record}, indent=1) + "\n")


def has_figures(record: dict[str, Any]) -> bool:
    """Whether a run measured anything of what it was asked for; ceilings and a timeline alone are nothing."""
    entries = [one for row in record["rows"] for one in row["contenders"]] + record["online"] + record["attention"]
    if record["constraint"]:
        entries += record["constraint"]["sizes"]
    if record["ablations"]:
        entries.append(record["ablations"]["whole"])
    return any(entry["status"] == "ok" for entry in entries)


def exceeded(ceilings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each ceiling (TFLOP/s, TB/s) that a contender of these rows lies above."""
    ran = [one for row in rows for one in row["contenders"] if one["status"] == "ok"]
    found = []
    for name, unit, cause in _CEILINGS:
        ceiling = ceilings[name]
        above = [one for one in ran if one[name] > ceiling]
        if above:
            who = ", ".join(dict.fromkeys(one["name"] for one in above))
            most = max(one[name] for one in above)
            found.append(
                f"the measured ceiling of {ceiling:.3g} {unit} is too low, {who} reached up to {most:.3g}: {cause}; "
                "percentages of it mean nothing"
            )
    return found


def read_record(path: Path) -> dict[str, Any]:
    """A record that ``--json`` or ``--out`` wrote.

    Raises:
        InputError: no such file, not JSON, or not the record of a benchmark that this version reads.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError(f"{path}: is not a regular file", hint=_HINT)
        record = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        found = record.get("kind") if isinstance(record, dict) else None
        why = f"its kind is {json.dumps(found)[:40]}, not {KIND}" if found is not None else "it names no kind"
        raise InputError(f"{path}: is not the result of a benchmark", why=why, hint=_HINT)
    version = record.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:  # true == 1
        raise InputError(
            f"{path}: has schema version {json.dumps(version)[:40]}, this xgr reads {SCHEMA_VERSION}",
            hint="measure again with this xgr, or compare with the xgr that wrote the file",
        )
    return record


def one_line(error: BaseException) -> str:
    """An error as a record states it: one line, cut to 300 characters."""
    text = error.what if isinstance(error, XgrError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def _unreadable(path: Path, error: Exception) -> InputError:
    """Why the file cannot be read, in our words instead of the system's or the decoder's."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return InputError(f"{path}: there is no such file", hint=_HINT)
    if isinstance(error, OSError):
        return InputError(f"{path}: cannot be read", why=error.strerror or type(error).__name__, hint=_HINT)
    if isinstance(error, json.JSONDecodeError):
        why = f"it is not JSON: line {error.lineno}, column {error.colno}" if error.doc.strip() else "it is empty"
    elif isinstance(error, RecursionError):
        why = "its JSON is nested too deeply"
    elif isinstance(error, UnicodeDecodeError):
        why = "it is not UTF-8 text, so it is not JSON"
    else:
        why = "it holds a number with too many digits"
    return InputError(f"{path}: is not the result of a benchmark", why=why, hint=_HINT)

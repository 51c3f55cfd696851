"""The result of a benchmark as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xgr_engine.errors import InputError
from xgr_engine.files import write_text

KIND = "bench"
SCHEMA_VERSION = 1


def write_record(path: Path, record: Any) -> None:
    """Replace ``path`` as a whole; a run that is stopped leaves what it had by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"schema_version": SCHEMA_VERSION, **record}, indent=1) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """A record that ``--json`` or ``--out`` wrote.

    Raises:
        InputError: no such file, no JSON, or not the record of a benchmark that this version reads.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError(f"{path}: is no regular file", hint="give files of xgr bench --json or --out")
        record = json.loads(path.read_text(encoding="utf-8-sig"))  # editors of some systems put a byte order mark
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as the result of a benchmark", why=str(error)) from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise InputError(f"{path}: is not the result of a benchmark", hint="give files of xgr bench --json or --out")
    version = record.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:  # true == 1
        raise InputError(f"{path}: has schema version {json.dumps(version)[:40]}, this xgr reads {SCHEMA_VERSION}")
    return record

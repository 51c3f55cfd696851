"""Fingerprint of a run, and ``_xgr/manifest.json``: what was asked, what ran, what came out.

Two runs with the same fingerprint write the same rows. It covers every option but those named in
``options.NOT_IN_FINGERPRINT``, and the contents of input files, model and vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xgr_engine.errors import InputError
from xgr_engine.files import misfit, parse_json
from xgr_engine.job.commit import commit_text
from xgr_engine.job.inputs import Inputs
from xgr_engine.job.options import RecommendOptions, fingerprinted
from xgr_engine.job.partitions import folder_of
from xgr_engine.system import machine

SCHEMA_VERSION = 1
KIND = "recommendations"

_NUMBER = (int, float)
_TEXT = {"value": str}
# What is read of a manifest later: by a run that resumes, inspect and eval. See xgr_engine.files.misfit.
_SHAPE: dict[str, Any] = {
    "state": str,
    "run_id": str,
    "started": str,
    "finished?": str,
    "error?": str,
    "options": {
        str: {"value": object},
        **{f"histories.{name}": _TEXT for name in ("user_col", "history_col", "history_format")},
        "histories.list_text": {"value": (None, str)},
        "histories.exclude_seen": {"value": bool},
        **{f"search.{name}": {"value": object} for name in ("beam", "top_k", "score_over", "collisions")},
    },
    "fingerprint": str,
    "fingerprint_fields": dict,
    "earlier_fingerprints?": [str],
    "model": {"path": str, "fingerprint": str},
    "vocab": {"path": str, "content_hash": str},
    "inputs": [{"path": str, "bytes": int, "sha256": str}],
    "unreadable?": [{"file": int, "group_rows": [int], "group_sha256": [str]}],
    "rows": int,
    "shards": int,
    "shards_finished": int,
    "parts?": {str: {"bytes": int, "mtime_ns": int}},
    "counts?": {"rejects": int, "unknown_items?": int, "rejects_by_reason": {str: int}},
    "filters?": {str: int},
    "engine?": ({str: ()}, dict.fromkeys(("device", "device_name", "dtype", "implementation"), str)),  # may be empty
    "audit?": (None, {"line": str, "users": int, "items": int, "short": int}),
    "environment": {"versions": {str: (None, str)}},
    "durations": {str: _NUMBER},
    "batches?": {"count": int, "seconds?": {str: _NUMBER}},
    "memory?": {str: (None, int)},
    "events?": [dict],
    "attempts?": [{"state": str}],
}


def fingerprint_fields(options: RecommendOptions, inputs: Inputs, model: str, vocab: str) -> dict[str, Any]:
    """All that decides what is written, by name.

    Args:
        model: fingerprint of the model directory; vocab: content hash of the vocabulary.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        **{f"option {name}": value for name, value in fingerprinted(options).items()},
        "inputs": input_fields(inputs),
        "model": model,
        "vocab": vocab,
    }


def input_fields(inputs: Inputs) -> list[list[str]]:
    """Name and SHA-256 of each input file.

    The name and the values of its partition, which are data, but not the whole path: a file that was moved is still the
    same input.
    """
    return [["/".join(filter(None, (folder_of(file.partition), file.path.name))), file.sha256] for file in inputs.files]


def fingerprint(fields: Mapping[str, Any]) -> str:
    """SHA-256 over :func:`fingerprint_fields`."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``--beam was 512, is 256`` for each field that differs."""
    lines = []
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            if name == "inputs":
                lines.append(_input_difference(old.get(name) or [], new.get(name) or []))
            else:
                lines.append(f"{_shown_name(name)} was {_short(old.get(name))}, is {_short(new.get(name))}")
    return lines


def _shown_name(field: str) -> str:
    """``option search.top_k`` as the command line calls it: the flags are the last part of the options' names."""
    if field in ("model", "vocab"):
        return f"the content of --{field}"
    name = field.removeprefix("option ")
    return f"--{name.rpartition('.')[2].replace('_', '-')}" if name != field else field


def _input_difference(old: list[Any], new: list[Any]) -> str:
    if [entry[0] for entry in old] != [entry[0] for entry in new]:
        return "inputs: other files"
    changed = [entry[0] for entry, other in zip(old, new, strict=True) if entry != other]
    return f"inputs: contents of {', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''} changed"


def _short(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


def environment() -> dict[str, Any]:
    """The machine, and the versions of packages without importing them; the engine's record names the device."""
    facts = asdict(machine())
    del facts["gpus"]  # asking the driver takes seconds where it is in trouble
    return {"host": platform.node(), **facts}


def write_manifest(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces the manifest as a whole."""
    commit_text(path, json.dumps(record, indent=2, default=str) + "\n")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none of xgr's.

    Raises:
        InputError: one of a later xgr, or one that was edited; names what is wrong with it.
    """
    record = own_record(path)
    if record is not None and (fault := fault_of(record)):
        raise InputError(
            f"{path} is damaged",
            why=fault,
            hint="restore a good copy of it, or let xgr recommend write the output again with --fresh",
        )
    return record


def fault_of(record: Mapping[str, Any]) -> str:
    """What is wrong with a manifest of xgr's; nothing for one that nobody edited."""
    if wrong := misfit(record, _SHAPE):
        return f'"{wrong}" is missing or has the wrong type'
    if fingerprint(record["fingerprint_fields"]) != record["fingerprint"]:
        return '"fingerprint" is not that of "fingerprint_fields"'
    return ""


def own_record(path: Path) -> dict[str, Any] | None:
    """What is in a manifest of xgr's, as it is; None where there is none.

    Raises:
        InputError: one of a later xgr.
    """
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("kind") != KIND:
        return None
    if record.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema version {record.get('schema_version')}, this xgr reads {SCHEMA_VERSION}",
            hint="use the xgr that wrote it, or another --out",
        )
    return record


def is_damaged(path: Path) -> bool:
    """Whether there is a file that should be a manifest and cannot be read as one. Another program's is not damaged."""
    if not path.is_file():
        return False
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(record, dict) or "kind" not in record

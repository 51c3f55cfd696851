"""What an earlier attempt at the same run left behind, and how much of it counts.

A shard is finished when its state file and its part file are there; the part is written last, gets its name only when
complete, and says in its metadata which fingerprint it belongs to. Everything else is computed again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.errors import OutputExistsError
from xgr_engine.files import misfit, parse_json
from xgr_engine.job.filesystems import parquet_source
from xgr_engine.job.inputs import InputFile, Inputs
from xgr_engine.job.manifest import differences, fingerprint, input_fields
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.shards import Shard

FINGERPRINT_KEY = b"xgr.fingerprint"
PART_KEY = b"xgr.part"
# In the state file of a shard, beside its rejects: what it adds to the sums of the run.
NOTES_KEY = b"xgr.notes"
_NOTES = {"counts": {str: int}, "batch_seconds": [(int, float)]}
_BLOCK = 1 << 20
_SHOWN = 5


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# ---- attempts -----------------------------------------------------------------------------------------------------


def new_attempt(earlier: Mapping[str, Any], argv: Sequence[str]) -> list[dict[str, Any]]:
    """The attempts so far and a new one at the end.

    One that still says ``running`` was killed: its lock is free.
    """
    attempts = [dict(attempt) for attempt in earlier.get("attempts", [])]
    for attempt in attempts:
        if attempt["state"] == "running":
            attempt["state"] = "killed"
    attempts.append(
        {
            "number": len(attempts) + 1,
            "state": "running",
            "started": now(),
            "argv": list(argv),
            "pid": os.getpid(),
            "machine": platform.node(),
            "python": sys.version.split()[0],
        }
    )
    return attempts


# ---- what is here ---------------------------------------------------------------------------------------------------

State = Literal["new", "done", "partial"]


@dataclass(frozen=True)
class Earlier:
    """What an output directory holds of the run that is asked for.

    Attributes:
        state: ``new``: nothing. ``done``: all of it. ``partial``: a run to resume.
        manifest: of the earlier attempt; empty for ``new``.
        finished: indexes of the shards that need not be computed.
        fingerprints: those that the parts of this run may carry, its own first.
    """

    state: State
    manifest: dict[str, Any]
    finished: frozenset[int]
    fingerprints: tuple[str, ...]


def look(out: OutDir, fields: Mapping[str, Any], inputs: Inputs, shards: Sequence[Shard]) -> Earlier:
    """Looks at an output directory. Writes nothing.

    Args:
        fields: the fingerprint's fields of the run that is asked for.

    Raises:
        OutputExistsError: it holds something else.
    """
    own = fingerprint(fields)
    manifest = out.earlier()
    if manifest is None:
        return Earlier("new", {}, frozenset(), (own,))
    known = (own, *manifest.get("earlier_fingerprints", ()))
    changed = differences(manifest.get("fingerprint_fields", {}), fields)
    if out.success.exists() and not changed:
        written = manifest.get("parts", {})
        spoilt = [part for part in map(out.part, shards) if not _is_intact(part, known, written.get(out.name(part)))]
        if not spoilt:
            return Earlier("done", manifest, frozenset(range(len(shards))), known)
        raise OutputExistsError(
            f"--out {out.root} was finished, but {len(spoilt)} of its part files are now missing or damaged: "
            + ", ".join(path.name for path in spoilt[:_SHOWN]),
            hint="compute it again with --fresh, or name another directory",
        )
    if changed:
        known = tuple(dict.fromkeys((*known, manifest["fingerprint"])))
    finished = [shard.index for shard in shards if is_finished(out.part(shard), out.sidecar(shard), known)]
    only_inputs = len(changed) == 1 and changed[0].startswith("inputs")
    if changed and not (only_inputs and inputs_repaired(manifest, inputs, shards, finished)):
        raise OutputExistsError(
            f"--out {out.root} holds the output of another run: {changed[0]}",
            why="; ".join(changed[1:_SHOWN]),
            hint="name another directory, or replace that output with --fresh",
        )
    return Earlier("partial", manifest, frozenset(finished), known)


def is_finished(part: Path, sidecar: Path, fingerprints: Collection[str]) -> bool:
    """Whether a shard's files are there, readable (the part as far as its footer goes), and of this run.

    Args:
        fingerprints: of the run, and those it had before an unreadable input was repaired.
    """
    return _is_good_state(sidecar) and is_of_run(part, fingerprints)


def is_of_run(part: Path, fingerprints: Collection[str]) -> bool:
    """Whether a part file is there, readable as far as its footer goes, of one of these runs, and under its own name.

    A part that was copied over another one is of the run, but its rows are not those of its name.
    """
    try:
        metadata = pq.read_metadata(part).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    if metadata.get(PART_KEY, part.stem.encode()) != part.stem.encode():
        return False
    return metadata.get(FINGERPRINT_KEY, b"").decode(errors="replace") in fingerprints


# ---- finished parts -------------------------------------------------------------------------------------------------


def part_stamps(out: OutDir, shards: Sequence[Shard]) -> dict[str, dict[str, int]]:
    """What the manifest keeps of the finished parts, by name: size in bytes, time of the last change in ns."""
    stamps = {}
    for part in map(out.part, shards):
        status = part.stat()
        stamps[out.name(part)] = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return stamps


def _is_intact(part: Path, fingerprints: Collection[str], stamp: Mapping[str, int] | None) -> bool:
    """Whether a part of a finished run is still what was written.

    Its pages are read only if size and time do not settle it: a copy is checked against its checksums, while a large
    output that nobody touched costs no more than its footers.

    Args:
        stamp: from :func:`part_stamps`; None if an older xgr wrote the output and kept none.
    """
    if not is_of_run(part, fingerprints):
        return False
    if stamp is None:
        return True
    status = part.stat()
    if status.st_size != stamp["bytes"]:
        return False
    return status.st_mtime_ns == stamp["mtime_ns"] or _has_good_pages(part)


def read_notes(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """``counts`` by name and ``batch_seconds`` of a shard, from the metadata of its state file.

    Raises:
        ValueError: they are not there, or damaged: no checksum of Parquet covers them.
    """
    notes: dict[str, Any] = parse_json((metadata or {}).get(NOTES_KEY, b""))
    if wrong := misfit(notes, _NOTES):
        raise ValueError(f'"{wrong}" is missing or has the wrong type')
    return notes


def _is_good_state(path: Path) -> bool:
    try:
        schema = pq.read_schema(path)
        read_notes(schema.metadata)
    except (OSError, ValueError, pa.ArrowException):
        return False
    return {"row", "reason"}.issubset(schema.names) and _has_good_pages(path)


def _has_good_pages(path: Path) -> bool:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for _ in file.iter_batches(use_threads=False):
                pass
    except (OSError, pa.ArrowException):
        return False
    return True


# ---- inputs that could not be read, and were repaired ---------------------------------------------------------------


def unreadable_record(inputs: Inputs, shards: Sequence[Shard], failed: Mapping[int, str]) -> list[dict[str, Any]]:
    """What the manifest says about shards that could not be read, by file.

    Args:
        failed: index of a shard -> why.
    """
    records = []
    for number in sorted({shards[index].file for index in failed}):
        source = inputs.files[number]
        here = [shards[index] for index in sorted(failed) if shards[index].file == number]
        records.append(
            {
                "file": number,
                "path": str(source.path),
                "rows": [[shard.start, shard.stop] for shard in here],
                "shards": [shard.index for shard in here],
                "error": failed[here[0].index],
                "group_rows": list(source.groups),
                "group_sha256": _group_digests(source),
            }
        )
    return records


def inputs_repaired(
    earlier: Mapping[str, Any], inputs: Inputs, shards: Sequence[Shard], finished: Iterable[int]
) -> bool:
    """Whether the inputs differ from the earlier attempt's only where that attempt could not read them.

    A Parquet file with a damaged row group is repaired by putting a good copy in its place. The finished shards stay if
    the row groups that they were read from have not changed by a byte.

    Args:
        finished: indexes of the shards whose files are there.
    """
    unreadable = {record["file"]: record for record in earlier.get("unreadable", [])}
    before = earlier.get("fingerprint_fields", {}).get("inputs") or []
    now_there = input_fields(inputs)
    if len(before) != len(now_there):
        return False
    changed = [number for number, pair in enumerate(zip(before, now_there, strict=True)) if pair[0] != pair[1]]
    if any(before[number][0] != now_there[number][0] or number not in unreadable for number in changed):
        return False
    done = [shards[index] for index in finished]
    return all(
        _same_groups(unreadable[number], inputs.files[number], [shard for shard in done if shard.file == number])
        for number in changed
    )


def _same_groups(record: Mapping[str, Any], source: InputFile, done: Sequence[Shard]) -> bool:
    if record["group_rows"] != list(source.groups) or not record["group_sha256"]:
        return False
    digests = _group_digests(source)
    start = 0
    for number, rows in enumerate(source.groups):
        used = any(shard.start < start + rows and shard.stop > start for shard in done)
        if used and digests[number] != record["group_sha256"][number]:
            return False
        start += rows
    return True


def _group_digests(source: InputFile) -> list[str]:
    """SHA-256 over the bytes of each row group of a Parquet file; nothing for other formats."""
    if source.format != "parquet":
        return []
    digests = []
    with pq.ParquetFile(parquet_source(source.path)) as file, source.path.open("rb") as stream:
        for number in range(file.metadata.num_row_groups):
            digest = hashlib.sha256()
            group = file.metadata.row_group(number)
            for column in range(group.num_columns):
                chunk = group.column(column)
                offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
                stream.seek(min(offset for offset in offsets if offset))
                left = chunk.total_compressed_size
                while left and (block := stream.read(min(_BLOCK, left))):
                    digest.update(block)
                    left -= len(block)
            digests.append(digest.hexdigest())
    return digests

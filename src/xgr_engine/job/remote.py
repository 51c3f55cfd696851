"""An output in an object store: computed and audited in a local directory, then published.

An object store has no rename, no fsync and no lock, but the end of an upload is atomic: an object is absent, old or
whole. So the job runs against a directory of its own below ``--cache-dir``, with everything that a local output has
(resume, lock, audit), and once it has succeeded its files are put into the store, the manifest first and ``_SUCCESS``
last. Readers that wait for ``_SUCCESS`` never see half an output. If publishing is interrupted, the same command
continues from the local directory, which is removed in the end.

The lock works between runs on one machine. Two machines that publish to one place at the same time are not kept apart.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from xgr_engine.errors import InputError, OutputExistsError, OutputWriteError, UsageError
from xgr_engine.files import parse_json
from xgr_engine.job.caches import writable_home
from xgr_engine.job.filesystems import Remote, is_remote, open_remote
from xgr_engine.job.lock import hold
from xgr_engine.job.manifest import KIND, differences, fault_of
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.record import JobReport

_SHOWN = 5
_BLOCK = 8 << 20
_OURS = re.compile(
    r"(?:[^/]+=[^/]*/)*part-\d{5,}-of-\d{5,}\.parquet|_SUCCESS|_xgr/manifest\.json|_xgr/rejects\.parquet"
)


@dataclass(frozen=True)
class RemoteOutput:
    """A prefix of an object store that holds, or will hold, one output."""

    uri: str
    place: Remote

    @classmethod
    def open(cls, uri: str) -> RemoteOutput:
        """
        Raises:
            InputError: not a usable URI; UsageError: no folder below the bucket.
        """
        place = open_remote(uri)
        if "/" not in place.key:
            raise UsageError(f"--out {uri}: name a folder in the bucket, such as s3://bucket/recs")
        return cls(uri, place)

    def sizes(self) -> dict[str, int]:
        """Size of each object, by its name below the prefix."""
        from pyarrow import fs

        selector = fs.FileSelector(self.place.key, recursive=True, allow_not_found=True)
        try:
            infos = self.place.filesystem.get_file_info(selector)
        except OSError as error:
            raise InputError(f"--out {self.uri}: the store does not answer: {error}") from error
        # empty objects that end in a slash are how some tools make folders
        return {info.path[len(self.place.key) + 1 :]: info.size for info in infos if info.is_file}

    def manifest(self) -> dict[str, Any] | None:
        """What an earlier run published first; None where there is none of xgr's, or one that was edited."""
        try:
            with self.place.filesystem.open_input_stream(f"{self.place.key}/_xgr/manifest.json") as stream:
                record = parse_json(stream.read())
        except (OSError, ValueError):
            return None
        ours = isinstance(record, dict) and record.get("kind") == KIND and not fault_of(record)
        return record if ours else None

    def check(self, fresh: bool) -> dict[str, Any] | None:
        """The manifest of what is here; None where nothing is.

        Raises:
            InputError: no such bucket, or the store does not answer.
            OutputExistsError: objects that xgr did not write, or a manifest that cannot be read.
        """
        self._check_bucket()
        names = self.sizes()
        manifest = self.manifest()
        others = [name for name in names if not _OURS.fullmatch(name)]
        damaged = manifest is None and "_xgr/manifest.json" in names and not others
        if damaged and not fresh:
            raise OutputExistsError(
                f"--out {self.uri}: its _xgr/manifest.json is damaged",
                why="it is no longer known which run this output belongs to",
                hint="compute it again with --fresh, or name another folder",
            )
        foreign = others if damaged or manifest is not None else list(names)
        if foreign:
            shown = ", ".join(sorted(foreign)[:_SHOWN])
            what = f"--fresh will not touch {self.uri}" if fresh else f"--out {self.uri} cannot be used"
            raise OutputExistsError(
                f"{what}: it holds objects that xgr did not write: {shown}", hint="name another folder"
            )
        return manifest

    def _check_bucket(self) -> None:
        """A bucket that does not exist lists like an empty one, and would be noticed once everything is computed."""
        from pyarrow import fs

        bucket = self.place.key.partition("/")[0]
        with suppress(OSError):  # who may write below a prefix need not be allowed to look at the bucket
            if self.place.filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
                raise InputError(
                    f"--out {self.uri}: there is no bucket {bucket}", hint="create it, or name another one"
                )

    def finished(self, fresh: bool, fields: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
        """The manifest of what is here if it is the complete output of the run that is asked for; else None.

        Args:
            fresh: what is here will be replaced.
            fields: the fingerprint's fields of that run.

        Raises:
            OutputExistsError: here is the output of another run or a damaged one, and see :meth:`check`.
        """
        manifest = self.check(fresh)
        if manifest is None or fresh:
            return None
        changed = differences(manifest.get("fingerprint_fields", {}), fields())
        if changed:
            raise OutputExistsError(
                f"--out {self.uri} holds the output of another run: {changed[0]}",
                why="; ".join(changed[1:_SHOWN]),
                hint="name another folder, or replace that output with --fresh",
            )
        sizes = self.sizes()
        if "_SUCCESS" not in sizes:
            return None
        _check_parts(self.uri, manifest.get("parts", {}), sizes)
        return manifest

    def clear(self) -> None:
        """Removes an earlier output, ``_SUCCESS`` first and the manifest last."""
        order = {"_SUCCESS": 0, "_xgr/manifest.json": 2}
        for name in sorted(self.sizes(), key=lambda name: order.get(name, 1)):
            self.place.filesystem.delete_file(f"{self.place.key}/{name}")

    def put(self, name: str, content: Path | bytes) -> int:
        """One object, whole or not at all; returns its size."""
        size = 0
        # The file first: a stream that was opened in vain leaves an empty object.
        with (
            io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source,
            self.place.filesystem.open_output_stream(f"{self.place.key}/{name}", compression=None) as stream,
        ):
            while block := source.read(_BLOCK):
                stream.write(block)
                size += len(block)
        return size


def staging_of(options: RecommendOptions) -> Path:
    """The local directory in which the output of a URI is computed: the same for every run of the same command."""
    home = writable_home()
    if options.operation.cache_dir is not None:
        root = Path(options.operation.cache_dir)
    elif home is not None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "xgr"
    else:
        root = Path(tempfile.gettempdir()) / "xgr"
    name = hashlib.sha256(options.out.rstrip("/").encode()).hexdigest()[:16]
    return root.absolute() / "outputs" / name


def staged(options: RecommendOptions) -> RecommendOptions:
    """The options of the local run; local outputs stay as they are.

    Raises:
        UsageError: the output lies in an input, or an input in it.
    """
    if not is_remote(options.out):
        return options
    out = options.out.rstrip("/") + "/"
    for text in options.histories.paths:
        other = text.rstrip("/") + "/"
        if is_remote(text) and (other.startswith(out) or out.startswith(other)):
            raise UsageError(f"--out {options.out} and --in {text}: one contains the other", hint="name another folder")
    return replace(options, out=str(staging_of(options)))


def run_published(
    options: RecommendOptions,
    run: Callable[[RecommendOptions], JobReport],
    fields_of: Callable[[RecommendOptions], Mapping[str, Any]],
    nothing_to_do: Callable[[dict[str, Any]], JobReport],
    note: Callable[[str], None],
    check: Callable[[], None],
) -> JobReport:
    """Runs the job in its staging directory and publishes what it made.

    Args:
        run: runs a local job; fields_of: the fingerprint's fields of a job.
        nothing_to_do: the report of a finished output, from its manifest.
        note: told if another run has to be waited for.
        check: called while waiting and between objects; may raise to stop.

    Raises:
        OutputExistsError: the place holds the output of another run, or objects that xgr did not write.
        OutputLockedError: another run on this machine computes or publishes this output.
        OutputWriteError: the store refused an object; the same command continues.
    """
    output = RemoteOutput.open(options.out)
    local = staged(options)

    def done_before() -> JobReport | None:
        manifest = output.finished(options.fresh, lambda: fields_of(local))
        return None if manifest is None else nothing_to_do(manifest)

    if report := done_before():
        return report
    staging = Path(local.out)
    staging.parent.mkdir(parents=True, exist_ok=True)
    # The staging directory's own lock ends with its run; until it is published nobody else may publish or remove it.
    lock = staging.with_name(f"{staging.name}.lock")
    with hold(lock, options.operation.wait, output=options.out, note=note, check=check):
        if "_SUCCESS" in output.sizes() and (report := done_before()):  # by the run that was waited for
            return report
        report = run(local)
        if report.failure is None:
            report.record["published"] = _publish(output, staging, check)
            shutil.rmtree(staging)
            if "out" in report.record:  # of a run that was computed before and had only to be published
                report.record["out"] = options.out
        return report


def _check_parts(uri: str, written: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]) -> None:
    """Raises OutputExistsError if a part of a finished output is gone or has another size."""
    spoilt = sorted(name for name, stamp in written.items() if sizes.get(name) != stamp["bytes"])
    if spoilt:
        raise OutputExistsError(
            f"--out {uri} was finished, but {len(spoilt)} of its part files are now missing or damaged: "
            + ", ".join(spoilt[:_SHOWN]),
            hint="compute it again with --fresh, or name another folder",
        )


def _publish(output: RemoteOutput, directory: Path, check: Callable[[], None]) -> dict[str, Any]:
    """Uploads a finished output and checks the sizes in the store. What was there before is removed first."""
    parts = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("part-*.parquet"))
    manifest = json.loads((directory / "_xgr" / "manifest.json").read_text("utf-8"))
    manifest["options"]["out"]["value"] = output.uri
    manifest["published"] = {"to": output.uri, "parts": len(parts)}
    try:
        output.clear()
        sent = {"_xgr/manifest.json": output.put("_xgr/manifest.json", json.dumps(manifest, indent=2).encode() + b"\n")}
        for name in [*parts, "_xgr/rejects.parquet"]:
            check()
            sent[name] = output.put(name, directory / name)
        found = output.sizes()
        if wrong := sorted(name for name, size in sent.items() if found.get(name) != size):
            name, there = wrong[0], found.get(wrong[0], "no")
            raise OutputWriteError(f"{output.uri}: {name} has {there} bytes in the store, but {sent[name]} were sent")
        output.put("_SUCCESS", b"")
    except (OSError, pa.ArrowException) as error:
        raise OutputWriteError(
            f"{output.uri}: the store refused an object: {error}",
            why=f"everything has been computed and is in {directory}",
            hint="run the same command again: it only has to publish",
        ) from error
    return {**manifest["published"], "bytes": sum(sent.values())}

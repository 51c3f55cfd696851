"""The output directory: where things lie, what an earlier run left, and what ``--fresh`` may remove.

::

    part-00017-of-00128.parquet     one a shard
    _SUCCESS                        last, empty
    _xgr/manifest.json              first
    _xgr/rejects.parquet            all rejects, in input order
    _xgr/shards/part-....parquet    rejects and counts of one shard, until the run has finished
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.errors import OutputExistsError, UsageError
from xgr_engine.job.commit import TEMPORARY_PREFIX, commit_text, sync
from xgr_engine.job.manifest import differences, read_manifest
from xgr_engine.job.shards import Shard

RUN_ID_KEY = b"xgr.run_id"
_PART = re.compile(r"part-\d{5,}-of-\d{5,}\.parquet")
_SHOWN = 5

State = Literal["new", "done", "computed"]


@dataclass(frozen=True)
class OutDir:
    """Paths in an output directory."""

    root: Path

    @property
    def success(self) -> Path:
        return self.root / "_SUCCESS"

    @property
    def manifest(self) -> Path:
        return self.root / "_xgr" / "manifest.json"

    @property
    def rejects(self) -> Path:
        return self.root / "_xgr" / "rejects.parquet"

    @property
    def shards(self) -> Path:
        return self.root / "_xgr" / "shards"

    def part(self, shard: Shard) -> Path:
        return self.root / f"{shard.name}.parquet"

    def sidecar(self, shard: Shard) -> Path:
        return self.shards / f"{shard.name}.parquet"

    def state(self, fields: Mapping[str, Any], shards: Sequence[Shard]) -> State:
        """What an earlier run left here.

        Returns:
            ``new``: nothing. ``done``: the same run, finished. ``computed``: the same run with all parts written and
            audited, held back for its rejects (or stopped just before ``_SUCCESS``).

        Raises:
            OutputExistsError: anything else.
        """
        if not self.root.exists() or (self.root.is_dir() and not any(self.root.iterdir())):
            return "new"
        if not self.root.is_dir():
            raise OutputExistsError(f"--out {self.root} is a file", hint="name a directory")
        manifest = read_manifest(self.manifest)
        if manifest is None:
            raise OutputExistsError(
                f"--out {self.root} is not empty, and xgr did not write it",
                hint="name another directory; --fresh never removes files of others",
            )
        changed = differences(manifest.get("fingerprint_fields", {}), fields)
        if changed:
            raise OutputExistsError(
                f"--out {self.root} holds the output of another run: {changed[0]}",
                why="; ".join(changed[1:_SHOWN]),
                hint="name another directory, or replace that output with --fresh",
            )
        whole = all(self.part(shard).exists() for shard in shards)
        if self.success.exists() and whole:
            return "done"
        if manifest.get("state") in ("too-many-rejects", "done") and whole and self._has_sidecars(shards):
            return "computed"
        raise OutputExistsError(
            f"--out {self.root} holds an unfinished run (state: {manifest.get('state')})",
            why="its part files are complete as far as they go, but some are missing" if not whole else "",
            hint="compute it again with --fresh, or name another directory",
        )

    def _has_sidecars(self, shards: Sequence[Shard]) -> bool:
        return all(self.sidecar(shard).exists() for shard in shards)

    def check_can_clear(self) -> None:
        """Raises OutputExistsError if anything in here was not written by xgr; removes nothing."""
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise OutputExistsError(f"--out {self.root} is a file", hint="name a directory")
        foreign = list(self._foreign())
        if foreign:
            shown = ", ".join(foreign[:_SHOWN]) + (
                f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
            )
            raise OutputExistsError(
                f"--fresh will not touch {self.root}: it holds files that xgr did not write: {shown}",
                hint="move them away, or name another directory",
            )

    def clear(self) -> None:
        """Removes what xgr wrote, ``_SUCCESS`` first and the manifest last.

        Raises:
            OutputExistsError: see :meth:`check_can_clear`.
        """
        self.check_can_clear()
        if not self.root.exists():
            return
        self.success.unlink(missing_ok=True)
        for path in sorted(self.root.iterdir()):
            if path.is_file():
                path.unlink()
        for folder in (self.shards, self.root / "_xgr"):
            if folder.is_dir():
                for path in sorted(folder.iterdir(), key=lambda path: path == self.manifest):
                    path.unlink()
                folder.rmdir()
        sync(self.root)

    def _foreign(self) -> Iterator[str]:
        ours = read_manifest(self.manifest) is not None
        for path in sorted(self.root.iterdir()):
            if path.is_symlink():
                yield path.name
            elif path.name == "_xgr" and path.is_dir() and ours:
                yield from self._foreign_state(path)
            elif not path.is_file() or not (_is_temporary(path) or (ours and self._is_ours(path))):
                yield path.name

    def _foreign_state(self, folder: Path) -> Iterator[str]:
        for path in sorted(folder.iterdir()):
            if path == self.shards and path.is_dir() and not path.is_symlink():
                inside = (entry for entry in sorted(path.iterdir()) if not self._is_state_file(entry))
                yield from (f"_xgr/shards/{entry.name}" for entry in inside)
            elif not (path in (self.manifest, self.rejects) or _is_temporary(path)) or not path.is_file():
                yield f"_xgr/{path.name}"

    def _is_state_file(self, path: Path) -> bool:
        return path.is_file() and (_PART.fullmatch(path.name) is not None or _is_temporary(path))

    def _is_ours(self, path: Path) -> bool:
        """``_SUCCESS``, or a part file that carries a run id: other tools use names like ours."""
        if path == self.success:
            return path.stat().st_size == 0
        if not _PART.fullmatch(path.name):
            return False
        try:
            metadata = pq.read_metadata(path).metadata
        except (OSError, pa.ArrowException):
            return False
        return RUN_ID_KEY in (metadata or {})

    def create(self) -> None:
        self.shards.mkdir(parents=True, exist_ok=True)

    def succeed(self) -> None:
        """Writes ``_SUCCESS`` and then removes the shard states, which nobody needs any more."""
        commit_text(self.success, "")
        for path in self.shards.iterdir():
            path.unlink()
        self.shards.rmdir()


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY_PREFIX)


def check_apart(out: Path, inputs: Sequence[Path], directories: Mapping[str, Path]) -> None:
    """Guards against an output that overwrites, or is later read as, something else.

    Args:
        inputs: input files and directories; directories: option -> model and vocabulary.

    Raises:
        UsageError: the output is, contains, or lies in one of them.
    """
    target = out.resolve()
    named = [("--in", path) for path in inputs] + list(directories.items())
    for option, path in named:
        other = path.resolve()
        if target == other:
            raise UsageError(f"--out {out} is {option} itself", hint="name another output directory")
        if target in other.parents:
            raise UsageError(f"--out {out} contains {option} {path}", hint="name another output directory")
        if other in target.parents and other.is_dir():
            raise UsageError(
                f"--out {out} lies inside {option} {path}",
                why="the next run would read it as its own input" if option == "--in" else "",
                hint="name an output directory outside it",
            )

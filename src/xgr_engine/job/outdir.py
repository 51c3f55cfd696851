"""The output directory: where things lie, what an earlier run left, and what ``--fresh`` may remove.

::

    part-00017-of-00128.parquet     one a shard; with --partition-by in a directory such as dt=2026-11-30
    _SUCCESS                        last, empty
    _xgr/manifest.json              first
    _xgr/lock                       while a run holds the directory
    _xgr/rejects.parquet            all rejects, in input order
    _xgr/shards/part-....parquet    rejects and counts of one shard, until the run has finished
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.errors import OutputExistsError, UsageError
from xgr_engine.files import TEMPORARY_PREFIX, sync
from xgr_engine.job.commit import commit_text
from xgr_engine.job.inputs import would_find
from xgr_engine.job.lock import hold
from xgr_engine.job.manifest import is_damaged, own_record, read_manifest
from xgr_engine.job.shards import Shard

RUN_ID_KEY = b"xgr.run_id"
_PART = re.compile(r"part-\d{5,}-of-\d{5,}\.parquet")
_SHOWN = 5


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
    def lock(self) -> Path:
        return self.root / "_xgr" / "lock"

    @property
    def rejects(self) -> Path:
        return self.root / "_xgr" / "rejects.parquet"

    @property
    def shards(self) -> Path:
        return self.root / "_xgr" / "shards"

    def part(self, shard: Shard) -> Path:
        return self.root / shard.folder / f"{shard.name}.parquet"

    def name(self, part: Path) -> str:
        """A part's name below the output, with slashes."""
        return part.relative_to(self.root).as_posix()

    def sidecar(self, shard: Shard) -> Path:
        return self.shards / f"{shard.name}.parquet"

    def earlier(self) -> dict[str, Any] | None:
        """The manifest that an earlier run left here; None where nothing is.

        Raises:
            OutputExistsError: something is here that xgr did not write, or a manifest that cannot be read.
            InputError: a manifest of a later xgr, or one that was edited.
        """
        if not self.root.exists():
            return None
        if not self.root.is_dir():
            raise OutputExistsError(f"--out {self.root} is a file", hint="name a directory")
        manifest = read_manifest(self.manifest)
        if manifest is None and self._is_ours_without_manifest():
            raise OutputExistsError(
                f"--out {self.root}: {self.manifest} is damaged",
                why="xgr wrote this output, but it can no longer tell for which run",
                hint="compute it again with --fresh, restore a good copy of the manifest, or name another directory",
            )
        if manifest is None and any(self._foreign()):
            raise OutputExistsError(
                f"--out {self.root} is not empty, and xgr did not write it",
                hint="name another directory; --fresh never removes files that xgr did not write",
            )
        return manifest

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
        """Removes what xgr wrote except the lock, ``_SUCCESS`` first and the manifest last.

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
        for folder in self._folders():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        self._remove_states()
        if self.manifest.parent.is_dir():
            inside = [path for path in self.manifest.parent.iterdir() if path != self.lock]
            for path in sorted(inside, key=lambda path: path == self.manifest):
                path.unlink()
        sync(self.root)

    def sweep(self) -> None:
        """Removes half-written files of attempts that were killed. Only for whoever holds the lock."""
        for folder in (self.root, self.manifest.parent, self.shards, *self._folders()):
            if folder.is_dir():
                for path in folder.iterdir():
                    if _is_temporary(path):
                        path.unlink()

    def _folders(self) -> list[Path]:
        """Directories of ``--partition-by``, the innermost first."""
        found = [path for path in self.root.rglob("*=*") if path.is_dir() and not path.is_symlink()]
        return sorted(found, key=lambda path: -len(path.parts))

    def _foreign(self) -> Iterator[str]:
        ours = own_record(self.manifest) is not None or self._is_ours_without_manifest()
        for path in sorted(self.root.iterdir()):
            if path.is_symlink():
                yield path.name
            elif path.name == "_xgr" and path.is_dir():
                yield from self._foreign_state(path, ours)
            elif path.name == "lost+found" and path.is_dir():
                continue  # a volume's own directory
            elif "=" in path.name and path.is_dir():
                yield from self._foreign_parts(path, ours)
            elif not path.is_file() or not (_is_temporary(path) or (ours and self._is_ours(path))):
                yield path.name

    def _foreign_parts(self, folder: Path, ours: bool) -> Iterator[str]:
        """Below a directory of ``--partition-by``: such directories and part files."""
        for path in sorted(folder.iterdir()):
            if "=" in path.name and path.is_dir() and not path.is_symlink():
                yield from self._foreign_parts(path, ours)
            elif not path.is_file() or not (_is_temporary(path) or (ours and self._is_ours(path))):
                yield str(path.relative_to(self.root))

    def _foreign_state(self, folder: Path, ours: bool) -> Iterator[str]:
        """In ``_xgr``. Without a manifest, only what a run writes before its manifest is ours."""
        for path in sorted(folder.iterdir()):
            if path == self.shards and path.is_dir() and not path.is_symlink():
                inside = (entry for entry in sorted(path.iterdir()) if not (ours and self._is_state_file(entry)))
                yield from (f"_xgr/shards/{entry.name}" for entry in inside)
            elif path.is_file() and (path == self.lock or _is_temporary(path)):
                continue
            elif not (ours and path in (self.manifest, self.rejects)) or not path.is_file():
                yield f"_xgr/{path.name}"

    def _is_ours_without_manifest(self) -> bool:
        """Whether the manifest is damaged, but the files beside it show that xgr wrote here."""
        parts = (path for path in self.root.rglob("part-*.parquet") if "_xgr" not in path.parts)
        return is_damaged(self.manifest) and (self.lock.is_file() or any(self._is_ours(path) for path in parts))

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

    def create(self, shards: Sequence[Shard] = ()) -> None:
        """The directories that a run writes into."""
        self.shards.mkdir(parents=True, exist_ok=True)
        for made in (self.shards.parent, self.root, self.root.parent):
            sync(made)  # otherwise a power loss may take the directories with everything in them
        for folder in sorted({shard.folder for shard in shards if shard.folder}):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            for made in (self.root / folder).relative_to(self.root).parents:
                sync(self.root / made)

    def succeed(self) -> None:
        """Writes ``_SUCCESS`` and then removes the shard states, which nobody needs any more."""
        commit_text(self.success, "")
        self.tidy()

    def tidy(self) -> None:
        """Removes the shard states of a finished output, now or after a run that was killed before it could."""
        if self.success.exists():
            # The output may be read-only by now, or a file be kept open over NFS: it is complete all the same.
            with suppress(OSError):
                self._remove_states()

    def _remove_states(self) -> None:
        if self.shards.is_dir():
            for path in self.shards.iterdir():
                path.unlink()
            self.shards.rmdir()

    @contextmanager
    def held(self, wait: float, note: Callable[[str], None], check: Callable[[], None]) -> Iterator[None]:
        """:func:`lock.hold` on this directory. What was made for the lock alone is removed again.

        Raises:
            OutputLockedError: another run holds it.
        """
        made = [path for path in (self.root, self.lock.parent) if not path.exists()]
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with hold(self.lock, wait, note=note, check=check):
                yield
        finally:
            for path in reversed(made):
                with suppress(OSError):  # not empty: a run has begun
                    path.rmdir()


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


def check_out_of_reach(out: Path, patterns: Sequence[str], files: Sequence[Path]) -> None:
    """Guards against an output that a pattern of ``--in`` would find once it is there: no run could resume it.

    Args:
        files: what the patterns find now.

    Raises:
        UsageError: one of the patterns finds files in it.
    """
    written = [out / name for name in ("part-0.parquet", "_xgr/rejects.parquet", "_xgr/shards/part-0.parquet")]
    for pattern in patterns:
        if any(would_find(pattern, path, files) for path in written):
            raise UsageError(
                f"--out {out} would be found by --in {pattern}",
                why="the next run would read it as its own input",
                hint="name an output directory that the pattern does not reach",
            )

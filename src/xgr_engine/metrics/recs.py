"""Recommendations as ``xgr recommend`` writes them, read back in pieces for the evaluation.

Any Parquet file or directory in the same layout can be evaluated, whoever wrote it: ``nested`` (column ``items``, a
list of structs with a field ``item_id``, best first; null for a rejected row) or ``long`` (columns ``row`` and
``item_id``, one row a recommendation, best first, ``row`` ascending).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import flat_values
from xgr_engine.catalog.ids import canonical, plain
from xgr_engine.errors import InputError
from xgr_engine.job.filesystems import InputPath
from xgr_engine.job.input_formats import parquet_batches
from xgr_engine.job.manifest import is_damaged, read_manifest
from xgr_engine.job.outdir import OutDir
from xgr_engine.job.resume import PART_KEY
from xgr_engine.options import ListText

CHUNK_ROWS = 32_768


@dataclass(frozen=True)
class RecChunk:
    """Consecutive rows of the output.

    Attributes:
        position: [n] ascending, place of each row among the rows of the run's input.
        users: the user column of these rows, None if the output has none.
        rejected: [n] rows without a list.
        row: [M] ascending, 0..n-1: the row each recommendation belongs to.
        item_id: [M] recommended ids, best first within a row.
    """

    position: NDArray[np.int64]
    users: pa.Array | None
    rejected: NDArray[np.bool_]
    row: NDArray[np.int64]
    item_id: pa.Array

    def __len__(self) -> int:
        return len(self.rejected)


@dataclass(frozen=True)
class RunInfo:
    """What the run's manifest tells an evaluation; the defaults stand for an output without a manifest.

    Attributes:
        rows: rows that the run was for, rejected ones included.
        inputs: (size in bytes, SHA-256) of each input file, in order.
        vocab, vocab_hash: where the vocabulary was, as given then, and its content hash.
        user_col, history_col, history_format, list_text: as in ``HistoryOptions``.
    """

    rows: int | None = None
    inputs: tuple[tuple[int, str], ...] = ()
    vocab: str | None = None
    vocab_hash: str | None = None
    user_col: str = "user_id"
    history_col: str = "history"
    history_format: str = "items"
    list_text: ListText | None = None

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> RunInfo:
        """From ``_xgr/manifest.json``."""
        histories = {
            name: manifest["options"][f"histories.{name}"]["value"]
            for name in ("user_col", "history_col", "history_format", "list_text")
        }
        return cls(
            rows=manifest["rows"],
            inputs=tuple((file["bytes"], file["sha256"]) for file in manifest["inputs"]),
            vocab=manifest["vocab"]["path"],
            vocab_hash=manifest["vocab"]["content_hash"],
            **histories,
        )


@dataclass(frozen=True)
class Recommendations:
    """An output, looked at.

    Attributes:
        path: as given.
        files: part files in order.
        layout: ``nested`` or ``long``.
        user_col: name of the user column if the output has it.
        run: what the manifest says.
    """

    path: Path
    files: tuple[Path, ...]
    layout: str
    user_col: str | None
    run: RunInfo

    def chunks(self) -> Iterator[RecChunk]:
        """All rows, in order."""
        return self._nested() if self.layout == "nested" else self._long()

    def rejected_users(self) -> pa.Array:
        """Users of the rejects file: the ``long`` layout has no row for them."""
        rejects = OutDir(self.path).rejects
        if not rejects.is_file():
            return pa.array([], pa.string())
        return plain(pq.read_table(rejects, columns=["user"], page_checksum_verification=True)["user"])

    def is_input(self, files: Sequence[InputPath]) -> bool:
        """Whether these files are, by their content, the input files of the run."""
        if len(files) != len(self.run.inputs):
            return False
        for path, (size, digest) in zip(files, self.run.inputs, strict=True):
            if path.stat().st_size != size:
                return False
            with path.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                    return False
        return True

    def has_users(self, users: pa.Array | None) -> bool:
        """Whether the run was for exactly these users, row by row."""
        if users is None or self.user_col is None:
            return False
        rows = 0
        for batch in self._batches([self.user_col, *(["row"] if self.layout == "long" else [])]):
            if self.layout == "long":
                position = batch.column("row").to_numpy()
            else:
                position = np.arange(rows, rows + batch.num_rows)
            rows = max(rows, int(position.max(initial=-1)) + 1)
            if rows > len(users):
                return False
            mine, theirs = canonical(batch.column(self.user_col)), canonical(users.take(pa.array(position)))
            if not mine.equals(theirs):
                return False
        # Rejected users at the end have no row in the long layout: only the manifest knows how many there were.
        return rows == len(users) or (self.layout == "long" and self.run.rows == len(users))

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for path in self.files:
            try:
                # a damaged page must be an error, not other items
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    for batch in parquet_batches(file, CHUNK_ROWS, columns):
                        if "row" in columns:
                            _check_row_numbers(batch.column("row"), path)
                        yield batch
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{path}: cannot be read: {error}") from error

    def _nested(self) -> Iterator[RecChunk]:
        # Only the leaf with the ids is read; what the list's inner field is called depends on the writer.
        names = [self._item_id_leaf(), *([self.user_col] if self.user_col else [])]
        first = 0
        for batch in self._batches(names):
            items = batch.column("items")
            lengths = pc.fill_null(pc.list_value_length(items), 0).to_numpy(zero_copy_only=False)
            yield RecChunk(
                position=np.arange(first, first + len(items)),
                users=batch.column(self.user_col) if self.user_col else None,
                rejected=items.is_null().to_numpy(zero_copy_only=False),
                row=np.repeat(np.arange(len(items)), lengths).astype(np.int64),
                item_id=flat_values(items).field("item_id"),
            )
            first += len(items)

    def _item_id_leaf(self) -> str:
        with pq.ParquetFile(self.files[0]) as file:
            paths = [file.schema.column(at).path for at in range(len(file.schema))]
        return next(str(path) for path in paths if path.startswith("items.") and path.endswith(".item_id"))

    def _long(self) -> Iterator[RecChunk]:
        """The recommendations with one value of ``row`` are one row here."""
        names = ["row", "item_id", *([self.user_col] if self.user_col else [])]
        left: pa.Table | None = None
        for batch in self._batches(names):
            table = pa.Table.from_batches([batch])
            table = table if left is None else pa.concat_tables([left, table])
            starts = _group_starts(table)
            left = table.slice(int(starts[-1]))  # the last user may go on in the next batch
            if len(starts) > 1:
                yield self._grouped(table.slice(0, int(starts[-1])), starts[:-1])
        if left is not None and left.num_rows:
            yield self._grouped(left, _group_starts(left))

    def _grouped(self, table: pa.Table, starts: NDArray[np.int64]) -> RecChunk:
        lengths = np.diff(np.append(starts, table.num_rows))
        users = table[self.user_col].combine_chunks().take(pa.array(starts)) if self.user_col else None
        return RecChunk(
            position=table["row"].to_numpy()[starts].astype(np.int64),
            users=users,
            rejected=np.zeros(len(starts), bool),
            row=np.repeat(np.arange(len(starts)), lengths).astype(np.int64),
            item_id=table["item_id"].combine_chunks(),
        )


def _check_row_numbers(row: pa.Array, file: Path) -> None:
    """Raises an InputError unless they are whole numbers from 0."""
    if pa.types.is_integer(row.type) and not row.null_count and (row.to_numpy().astype(np.int64) >= 0).all():
        return
    raise InputError(
        f"{file}: the column row does not hold whole numbers from 0", why="they number the rows of the truth"
    )


def _group_starts(table: pa.Table) -> NDArray[np.int64]:
    row = table["row"].to_numpy()
    return np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1]))).astype(np.int64)


def open_recommendations(path: Path, user_col: str | None) -> Recommendations:
    """Finds the part files, the layout and the manifest.

    Args:
        path: an output directory, or one Parquet file.
        user_col: the column with the user ids; None takes that of the run.

    Raises:
        InputError: nothing there, an unfinished run, or columns that are not recommendations.
    """
    if path.is_dir():
        files = _part_files(path)
    elif path.is_file():
        files = (path,)
    else:
        raise InputError(f"--recs {path}: no such file or directory", hint="give the directory that recommend wrote")
    if is_damaged(OutDir(path).manifest):
        raise _damaged(path)
    manifest = read_manifest(OutDir(path).manifest)
    if manifest is not None and not OutDir(path).success.is_file():
        raise InputError(
            f"--recs {path}: the run did not finish (state: {manifest.get('state')}), there is no _SUCCESS",
            why="figures for some of the users would pass for figures for all of them",
            hint="let xgr recommend finish it first",
        )
    run = RunInfo() if manifest is None else RunInfo.of(manifest)
    if not files:
        raise InputError(f"--recs {path} holds no Parquet file", hint="give the directory that recommend wrote")
    try:
        schema = pq.read_schema(files[0])
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{files[0]}: cannot be read: {error}") from error
    if user_col is not None and user_col not in schema.names:
        raise InputError(
            f"--recs {path}: no column {user_col!r}",
            why=f"it has: {', '.join(schema.names)}",
            hint="name the output's user column with --user-col",
        )
    layout = _layout(files[0], schema)
    if manifest is not None and path.is_dir():
        _check_complete(path, files, layout, manifest)
    wanted = user_col or run.user_col
    return Recommendations(path, files, layout, wanted if wanted in schema.names else None, run)


def _damaged(path: Path) -> InputError:
    return InputError(
        f"--recs {path}: {OutDir(path).manifest} is damaged",
        why="it is no longer known what the run was for, and whether it finished",
        hint="restore a good copy of the manifest, or let xgr recommend write the output again with --fresh",
    )


def _part_files(directory: Path) -> tuple[Path, ...]:
    """In the order of the rows: parts are numbered through all directories of ``--partition-by``."""
    found = [
        path
        for path in directory.rglob("*.parquet")
        if not any(name.startswith(("_", ".")) for name in path.relative_to(directory).parts)
    ]
    return tuple(sorted(found, key=lambda path: (path.name, path)))


def _check_complete(path: Path, files: Sequence[Path], layout: str, manifest: dict[str, Any]) -> None:
    """Raise an InputError unless these are the parts that the finished run wrote, as far as names, sizes and rows tell.

    Their contents are checked against their checksums when they are read.
    """
    sizes = {name: stamp["bytes"] for name, stamp in manifest.get("parts", {}).items()}
    spoilt = [file.name for file in files if _is_spoilt(file, sizes.get(OutDir(path).name(file)))]
    problem = ""
    if spoilt:
        problem = f"{spoilt[0]} has another size, or is a copy of another part"
    elif len(files) != manifest["shards"]:
        problem = f"{len(files)} Parquet files, but the run wrote {manifest['shards']} parts"
    elif layout == "nested":
        rows = sum(int(_footer(file).num_rows) for file in files)
        problem = "" if rows == manifest["rows"] else f"{rows} rows, but the run wrote {manifest['rows']}"
    if problem:
        raise InputError(
            f"--recs {path} is not what the run left there: {problem}",
            why="figures for other rows would pass for figures of the run",
            hint="let xgr recommend write it again with --fresh",
        )


def _is_spoilt(file: Path, size: int | None) -> bool:
    if size is not None and file.stat().st_size != size:
        return True
    own = file.stem.encode()
    return bool((_footer(file).metadata or {}).get(PART_KEY, own) != own)


def _footer(file: Path) -> pq.FileMetaData:
    try:
        return pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error


def _layout(path: Path, schema: pa.Schema) -> str:
    if "items" in schema.names:
        kind = schema.field("items").type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and pa.types.is_struct(kind.value_type) and kind.value_type.get_field_index("item_id") >= 0:
            return "nested"
    elif "item_id" in schema.names and "row" in schema.names:
        return "long"
    raise InputError(
        f"{path}: these are not recommendations (columns: {', '.join(schema.names)})",
        why="they need a column items: list<struct<item_id, ...>>, or row and item_id with one row per recommendation",
        hint="give the output of xgr recommend with --recs",
    )

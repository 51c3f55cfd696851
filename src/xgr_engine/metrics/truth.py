"""The truth of an evaluation: which items each user really took next, read from any file that holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import is_list
from xgr_engine.catalog.ids import canonical, plain
from xgr_engine.errors import HistoryError, InputError
from xgr_engine.job.filesystems import InputPath
from xgr_engine.job.input_formats import FORMATS, Columns, ListColumn
from xgr_engine.job.inputs import detect_format, find_files
from xgr_engine.job.lists import Lists, is_text_type, offsets_of, read_lists


@dataclass(frozen=True)
class Truth:
    """Rows of the truth files, in order.

    Attributes:
        users: the user column, None if the files have none.
        targets: the items of each row: one, several or (null, empty list, broken list) none. Ids as they are stored.
        history: the ids of each row's history, None if the files have no such column.
    """

    users: pa.Array | None
    targets: Lists
    history: Lists | None

    @property
    def rows(self) -> int:
        return len(self.targets)

    @property
    def faults(self) -> int:
        """Rows whose target list could not be read; they have no target."""
        return len(self.targets.faults)

    @property
    def history_faults(self) -> int:
        """Rows whose history could not be read."""
        return 0 if self.history is None else len(self.history.faults)

    def head(self, rows: int) -> Truth:
        """The first rows."""
        return Truth(
            users=None if self.users is None else self.users.slice(0, rows),
            targets=_head(self.targets, rows),
            history=None if self.history is None else _head(self.history, rows),
        )


def _head(lists: Lists, rows: int) -> Lists:
    offsets = lists.offsets[: rows + 1]
    faults = {row: fault for row, fault in lists.faults.items() if row < rows}
    return Lists(lists.values.slice(0, int(offsets[-1])), offsets, faults)


def read_truth(
    paths: tuple[str, ...], truth_col: str, user_col: str, history_col: str | None, list_text: str | None
) -> Truth:
    """Reads the needed columns of every file.

    Args:
        paths: files, globs or directories.
        truth_col: one id, or a list of ids, per row.
        user_col: read if it is there.
        history_col: None: not wanted; else read if it is there.
        list_text: ``json`` or ``python`` where lists are stored as text.

    Raises:
        InputError: a file that cannot be read, no rows, the truth column missing, or a type that holds no ids.
    """
    pieces: list[dict[str, ListColumn]] = []
    optional = [name for name in (user_col, history_col) if name is not None and name != truth_col]
    for path in truth_files(paths):
        reader = FORMATS[detect_format(path)]
        try:
            _require(reader, path, truth_col)
            names = [truth_col, *(name for name in optional if _has(reader, path, name))]
            columns = Columns(tuple(set(names) & {user_col}), tuple(name for name in names if name != user_col))
            schema = reader.describe(path, columns).schema
            for rows in reader.batches(path, columns, schema, 0):
                piece = {name: plain(rows.table[name]) for name in schema.names}
                pieces.append({**rows.lists, **piece})
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
    if not any(len(piece[truth_col]) for piece in pieces):
        raise InputError(f"--truth {' '.join(paths)} holds no rows", hint="give the file with what users took next")
    shared = set.intersection(*(set(piece) for piece in pieces))
    targets = concat_lists([read_targets(piece[truth_col], truth_col, list_text) for piece in pieces])
    history = None
    if history_col is not None and history_col in shared:
        history = concat_lists([read_lists(piece[history_col], history_col, list_text) for piece in pieces])
    return Truth(
        users=concat_arrays([piece[user_col] for piece in pieces]) if user_col in shared else None,
        targets=targets,
        history=history,
    )


def truth_files(paths: tuple[str, ...]) -> list[InputPath]:
    """The files behind names, globs and directories.

    Raises:
        InputError: nothing there, or a file named twice.
    """
    try:
        return find_files(paths)
    except HistoryError as error:  # it names the option of ``recommend``
        raise InputError(error.what.replace("--in", "--truth"), hint="check --truth") from error


def _require(reader: Any, path: InputPath, name: str) -> None:
    try:
        reader.describe(path, Columns((), (name,)))
    except HistoryError as error:
        raise InputError(
            error.what, why=error.why, hint="name the column that holds the item taken next with --truth-col"
        ) from error


def _has(reader: Any, path: InputPath, name: str) -> bool:
    try:
        reader.describe(path, Columns((), (name,)))
    except HistoryError:
        return False
    return True


def read_targets(column: ListColumn, name: str, list_text: str | None) -> Lists:
    """One id or a list of ids per row. Text is an id, unless lists are stored as text and it begins like one."""
    if isinstance(column, list) or (is_text_type(column.type) and list_text is not None):
        cells = column if isinstance(column, list) else column.to_pylist()
        return read_lists([_as_list(cell, list_text) for cell in cells], name, list_text)
    if is_list(column.type) or pa.types.is_null(column.type):
        return read_lists(column, name, list_text)
    # A null, a NaN or an empty CSV cell is a row without a target.
    missing = column.is_null(nan_is_null=True)
    if is_text_type(column.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(column, ""), False))
    present = ~missing.to_numpy(zero_copy_only=False)
    offsets = offsets_of(present)
    kept = column.filter(pa.array(present))
    as_lists = pa.LargeListArray.from_arrays(pa.array(np.arange(len(kept) + 1)), kept)
    clean = read_lists(as_lists, name, None)  # refuses numbers that are not whole
    if not clean.faults:
        return Lists(clean.values, offsets, {})
    rows = np.flatnonzero(present)
    offsets = offsets_of(_spread(len(column), rows, clean.lengths))
    return Lists(clean.values, offsets, {int(rows[at]): fault for at, fault in clean.faults.items()})


def _as_list(cell: object, list_text: str | None) -> object:
    if cell is None or cell == "" or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, list) or (list_text is not None and isinstance(cell, str) and cell.lstrip().startswith("[")):
        return cell
    return [cell]


def _spread(total: int, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    spread = np.zeros(total, np.int64)
    spread[rows] = lengths
    return spread


def concat_lists(pieces: list[Lists]) -> Lists:
    """One ``Lists`` of all; ids become text if the pieces store them in different types."""
    offsets, faults, rows, values = [np.zeros(1, np.int64)], {}, 0, 0
    for piece in pieces:
        offsets.append(piece.offsets[1:] + values)
        faults.update({rows + at: fault for at, fault in piece.faults.items()})
        rows, values = rows + len(piece), values + len(piece.values)
    return Lists(concat_arrays([piece.values for piece in pieces]), np.concatenate(offsets), faults)


def concat_arrays(arrays: list[pa.Array]) -> pa.Array:
    """One array; of text (canonical ids) if the types differ."""
    kinds = {array.type for array in arrays if len(array)}
    if not kinds:
        return pa.array([], pa.int64())
    filled = [array for array in arrays if len(array)]
    if len(kinds) > 1 or pa.types.is_dictionary(next(iter(kinds))):
        filled = [canonical(array) for array in filled]
    return pa.concat_arrays(filled)

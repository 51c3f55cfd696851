"""MovieLens 100K: where it comes from, how it is read, and the split that everything in the demo uses.

The data belongs to GroupLens (University of Minnesota), who let anyone use it for research and do not let others pass
it on. So it is downloaded where it is needed, from the ``recbole`` wheel on PyPI, and never stored in this repository.
Reference: F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.

Needs numpy and pyarrow, and ``pip`` for the download.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

RECBOLE = "recbole==1.2.1"
WHEEL_NAME = "recbole-1.2.1-py3-none-any.whl"
# The two members that are used, with the SHA-256 of their bytes: another release's data would not fit the checkpoint.
MEMBERS = {
    "recbole/dataset_example/ml-100k/ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "recbole/dataset_example/ml-100k/ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}

Int64Array = NDArray[np.int64]


class DataError(Exception):
    """The data cannot be fetched or is not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Movies:
    """The catalog, by item number.

    Attributes:
        item_id: int64 [N], ascending.
        title: N titles, as MovieLens writes them without the year.
        year: N release years, None where MovieLens has none.
        genres: N lists of genre names.
    """

    item_id: Int64Array
    title: list[str]
    year: list[int | None]
    genres: list[list[str]]


@dataclass(frozen=True)
class Split:
    """Leave-one-out. ``history[u]`` is everything of user u but the last item, oldest first; ``target[u]`` is the last.

    Whatever is trained, counted or tuned takes ``history`` (or a part of it) and nothing else.
    """

    user_id: Int64Array
    history: list[Int64Array]
    target: Int64Array


def fetch(cache: Path, wheel: Path | None = None) -> tuple[Path, Path]:
    """Paths of the interactions and of the items file under ``cache``, downloaded and unpacked if they are not there.

    Args:
        cache: directory that keeps the wheel and the two files; made if it is missing.
        wheel: a wheel that is already on this machine; nothing is downloaded then.

    Raises:
        DataError: no network, or files other than the expected ones.
    """
    cache.mkdir(parents=True, exist_ok=True)
    paths = {member: cache / Path(member).name for member in MEMBERS}
    if not all(path.is_file() and _sha256(path.read_bytes()) == MEMBERS[member] for member, path in paths.items()):
        source = wheel if wheel is not None else cache / WHEEL_NAME
        if wheel is None and not zipfile.is_zipfile(source):
            _download(cache)
        _unpack(source, paths)
    interactions, items = paths.values()
    return interactions, items


def _download(cache: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(cache), RECBOLE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise DataError(
            f"MovieLens 100K could not be downloaded (pip download --no-deps {RECBOLE}).\n"
            f"pip's last line: {last[0]}\n"
            f"Without a network, fetch {WHEEL_NAME} elsewhere and pass --wheel PATH (or copy it to {cache})."
        )


def _unpack(wheel: Path, paths: dict[str, Path]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            contents = {member: archive.read(member) for member in paths}
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel}: not the {RECBOLE} wheel ({error}). Delete it and run again.") from error
    for member, data in contents.items():
        if _sha256(data) != MEMBERS[member]:
            raise DataError(f"{wheel}: {member} differs from the {RECBOLE} release. Delete the wheel and run again.")
        part = paths[member].with_suffix(".part")
        part.write_bytes(data)
        part.replace(paths[member])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_atomic(path: Path) -> pa.Table:
    """A RecBole atomic file (tab-separated, header ``name:type``) with every column as text, named without the type."""
    header = path.read_text(encoding="utf-8").split("\n", 1)[0].split("\t")
    table = pa_csv.read_csv(
        path,
        parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa_csv.ConvertOptions(column_types={name: pa.string() for name in header}),
    )
    return table.rename_columns([name.split(":")[0] for name in header])


def read_movies(items_file: Path) -> Movies:
    """The catalog in ascending item number. A year that is not a number (two rows) becomes None."""
    table = _read_atomic(items_file)
    item_id = np.array([int(text) for text in table["item_id"].to_pylist()], np.int64)
    order = np.argsort(item_id, kind="stable")
    titles, years, genres = (table[name].to_pylist() for name in ("movie_title", "release_year", "class"))
    return Movies(
        item_id=item_id[order],
        title=[titles[row] for row in order],
        year=[int(years[row]) if years[row].isdecimal() else None for row in order],
        genres=[genres[row].split(" ") for row in order],
    )


def read_sequences(interactions_file: Path) -> tuple[Int64Array, list[Int64Array]]:
    """Users in ascending order and each one's items, oldest first, whatever the rating.

    Three quarters of the rows share user and second with another row. The tie rule: rows of the same user and second
    keep the order they have in the file (a stable sort by time). That file is shuffled, so the rule brings in no
    order that could be learned, as ordering ties by item number would.
    """
    table = _read_atomic(interactions_file)
    user, item, time = (
        np.array([int(float(text)) for text in table[name].to_pylist()], np.int64)
        for name in ("user_id", "item_id", "timestamp")
    )
    order = np.lexsort((time, user))  # lexsort is stable: equal keys keep the file's order
    user_ids, starts = np.unique(user[order], return_index=True)
    return user_ids, np.split(item[order], starts[1:])


def leave_one_out(user_id: Int64Array, sequences: list[Int64Array]) -> Split:
    """Last item = target, everything before = history."""
    for user, sequence in zip(user_id, sequences, strict=True):
        if len(sequence) < 2:
            raise DataError(f"user {user} has fewer than 2 items: nothing is left to predict the target from")
    return Split(user_id, [sequence[:-1] for sequence in sequences], np.array([seq[-1] for seq in sequences], np.int64))


def without_last(split: Split) -> Split:
    """The same split one step earlier: for validation and for whatever must not see the last two items."""
    return leave_one_out(split.user_id, split.history)


def popularity(history: list[Int64Array], item_id: Int64Array) -> Int64Array:
    """[N] how many of the given histories' interactions each item has."""
    row = np.searchsorted(item_id, np.concatenate(history))
    return np.bincount(row, minlength=len(item_id)).astype(np.int64)


def popularity_lists(split: Split, item_id: Int64Array, top_k: int) -> Int64Array:
    """[U, top_k] the most popular items that the user has not seen: the baseline. Ties go to the lower item number.

    Popularity is counted over ``split.history``. Places for which no item is left hold -1.
    """
    ranked = item_id[np.argsort(-popularity(split.history, item_id), kind="stable")]
    lists = np.full((len(split.history), top_k), -1, np.int64)
    for row, history in enumerate(split.history):
        unseen = ranked[~np.isin(ranked, history)][:top_k]
        lists[row, : len(unseen)] = unseen
    return lists

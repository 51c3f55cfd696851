"""Write the inputs of the quickstart: a catalog, the users' histories, and the popularity baseline.

    python datasets/movielens/prepare.py --out work/movielens

``catalog.parquet``: item_id, title, year, genres, sid (the committed codes as text, ``<a_3><b_17><c_40>``).
``users.parquet``: user_id, history (item ids, oldest first, all but the last), target (the last).
``popularity.parquet``: the most popular unseen items of every user, in the layout of ``xgr recommend``, so that
``xgr eval`` measures model and baseline alike.

A second run finds everything there and does nothing. The download is kept in ``download/``.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import ml100k
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
CODES = HERE / "item_codes.csv"
BASELINE_LENGTH = 50
SOURCES = ("ml100k.py", "prepare.py", "item_codes.csv")


def read_codes(path: Path, movies: ml100k.Movies) -> list[list[int]]:
    """Codes of each item, in the catalog's order.

    Raises:
        ml100k.DataError: the table does not hold exactly the catalog's items.
    """
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    codes = {int(row[0]): [int(code) for code in row[1:]] for row in rows}
    if set(codes) != set(movies.item_id.tolist()) or len(codes) != len(rows):
        raise ml100k.DataError(f"{path}: its items are not those of MovieLens 100K")
    return [codes[item] for item in movies.item_id.tolist()]


def catalog_table(movies: ml100k.Movies, codes: list[list[int]]) -> pa.Table:
    """One row per item, ascending item number."""
    sids = ["".join(f"<{name}_{code}>" for name, code in zip("abcdefgh", row, strict=False)) for row in codes]
    return pa.table(
        {
            "item_id": pa.array(movies.item_id),
            "title": pa.array(movies.title),
            "year": pa.array(movies.year, pa.int32()),
            "genres": pa.array(movies.genres, pa.list_(pa.string())),
            "sid": pa.array(sids),
        }
    )


def users_table(split: ml100k.Split) -> pa.Table:
    """One row per user, ascending user number."""
    histories = pa.array([history.tolist() for history in split.history], pa.list_(pa.int64()))
    return pa.table(
        {"user_id": pa.array(split.user_id), "history": histories, "target": pa.array(split.target)},
    )


def popularity_table(split: ml100k.Split, movies: ml100k.Movies) -> pa.Table:
    """The baseline as ``xgr recommend`` would write it; the score is the item's count in all histories."""
    count = dict(zip(movies.item_id.tolist(), ml100k.popularity(split.history, movies.item_id).tolist(), strict=True))
    lists = ml100k.popularity_lists(split, movies.item_id, BASELINE_LENGTH)
    items = [[{"item_id": item, "score": float(count[item])} for item in row if item >= 0] for row in lists.tolist()]
    kind = pa.list_(pa.struct([("item_id", pa.int64()), ("score", pa.float32())]))
    return pa.table({"user_id": pa.array(split.user_id), "items": pa.array(items, kind)})


def prepare(out: Path, wheel: Path | None) -> bool:
    """Writes whatever is missing or was made by another version of these scripts. False: there was nothing to do."""
    stamp, wanted = out / ".prepared", _version()
    names = ("catalog.parquet", "users.parquet", "popularity.parquet")
    if (
        stamp.is_file()
        and stamp.read_text(encoding="utf-8") == wanted
        and all((out / name).is_file() for name in names)
    ):
        return False
    interactions, items = ml100k.fetch(out / "download", wheel)
    movies = ml100k.read_movies(items)
    split = ml100k.leave_one_out(*ml100k.read_sequences(interactions))
    makers: dict[str, Callable[[], pa.Table]] = {
        "catalog.parquet": lambda: catalog_table(movies, read_codes(CODES, movies)),
        "users.parquet": lambda: users_table(split),
        "popularity.parquet": lambda: popularity_table(split, movies),
    }
    stamp.unlink(missing_ok=True)
    for name, make in makers.items():
        part = out / f".{name}.part"
        pq.write_table(make(), part, compression="zstd")
        part.replace(out / name)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def _version() -> str:
    return hashlib.sha256(b"\0".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("work/movielens"), help="directory to fill")
    parser.add_argument("--wheel", type=Path, help=f"{ml100k.WHEEL_NAME} on this machine: nothing is downloaded")
    arguments = parser.parse_args()
    try:
        made = prepare(arguments.out, arguments.wheel)
    except ml100k.DataError as error:
        print(error, file=sys.stderr)
        return 1
    users = pq.read_table(arguments.out / "users.parquet", columns=["history"])["history"]
    lengths = np.diff(users.combine_chunks().offsets.to_numpy())
    print(
        f"{arguments.out}: {'written' if made else 'already there'}: "
        f"{pq.read_metadata(arguments.out / 'catalog.parquet').num_rows:,} items, {len(lengths):,} users, "
        f"histories of {lengths.min()} to {lengths.max()} items"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Show what came out: the recommendations of three users beside their recent history, and model against baseline.

    python datasets/movielens/show.py --data work/movielens --recs work/movielens/recs

Recall@10 and NDCG@10 of both lists are taken over the same users, seen items excluded from both. The interval is that
of the paired difference: users are drawn with replacement, and each brings their own difference.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from xgr_engine.metrics.bootstrap import mean_intervals
from xgr_engine.metrics.ranking import Lists, metric_names, row_metrics

K = 10
SHOWN_USERS, SHOWN_ITEMS = 3, 5


@dataclass(frozen=True)
class Figure:
    """One metric of both lists, and their difference with its 95 % interval."""

    name: str
    model: float
    popularity: float
    difference: float
    low: float
    high: float

    @property
    def model_is_better(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low > 0


def recommended(path: Path) -> pa.Array:
    """[U] list of item ids of each user, from an output directory or one file of that layout."""
    files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    items = pa.concat_tables([pq.read_table(file, columns=["items"]) for file in files])["items"].combine_chunks()
    return pa.ListArray.from_arrays(items.offsets, items.values.field("item_id"), mask=items.is_null())


def figures(users: pa.Table, model: pa.Array, popularity: pa.Array) -> list[Figure]:
    """Recall@10 and NDCG@10 of both lists over the users of the table."""
    number = users.num_rows
    truth = Lists(np.arange(number), users["target"].to_numpy())
    names = [f"recall@{K}", f"ndcg@{K}"]
    columns = [metric_names((K,)).index(name) for name in names]

    def values(lists: pa.Array) -> NDArray[np.float64]:
        keys = Lists(lists.value_parent_indices().to_numpy(), lists.flatten().to_numpy())
        return row_metrics(number, keys.distinct()[0], truth, (K,))[:, columns]

    ours, baseline = values(model), values(popularity)
    mean, low, high = mean_intervals(ours - baseline)
    return [
        Figure(name, ours[:, at].mean(), baseline[:, at].mean(), mean[at], low[at], high[at])
        for at, name in enumerate(names)
    ]


def users_table(users: pa.Table, lists: pa.Array, titles: dict[int, str]) -> Table:
    """Three users spread over the table: what they watched last, what they get, what they watched next."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "user",
        f"watched last ({SHOWN_ITEMS}, newest first)",
        f"recommended (top {SHOWN_ITEMS})",
        "watched next",
    ):
        view.add_column(name, overflow="fold")
    for row in np.linspace(0, users.num_rows, SHOWN_USERS, endpoint=False, dtype=int).tolist():
        history = users["history"][row].as_py()[::-1][:SHOWN_ITEMS]
        target = users["target"][row].as_py()
        top = lists[row].as_py()[:SHOWN_ITEMS]
        place = lists[row].as_py().index(target) + 1 if target in lists[row].as_py() else None
        view.add_row(
            str(users["user_id"][row]),
            "\n".join(titles[item] for item in history),
            "\n".join(f"{rank} {titles[item]}" for rank, item in enumerate(top, start=1)),
            titles[target] + (f"\n(rank {place})" if place else "\n(not in the list)"),
            end_section=True,
        )
    return view


def figures_table(rows: list[Figure], users: int) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (f"{users} users, seen items excluded", "model", "popularity", "difference", "95 % interval"):
        view.add_column(name, justify="left" if "users" in name else "right")
    for row in rows:
        numbers = (f"{row.model:.4f}", f"{row.popularity:.4f}", f"{row.difference:+.4f}")
        view.add_row(row.name, *numbers, f"{row.low:+.4f} to {row.high:+.4f}")
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("work/movielens"), help="what prepare.py wrote")
    parser.add_argument("--recs", type=Path, default=Path("work/movielens/recs"), help="output of xgr recommend")
    parser.add_argument("--json", action="store_true", help="the figures as JSON instead of tables")
    arguments = parser.parse_args()
    users = pq.read_table(arguments.data / "users.parquet")
    catalog = pq.read_table(arguments.data / "catalog.parquet", columns=["item_id", "title"])
    titles = dict(zip(catalog["item_id"].to_pylist(), catalog["title"].to_pylist(), strict=True))
    lists = recommended(arguments.recs)
    rows = figures(users, lists, recommended(arguments.data / "popularity.parquet"))
    if arguments.json:
        print(json.dumps({row.name: row.__dict__ for row in rows}, indent=2))
        return
    console = Console(width=None if Console().is_terminal else 110)
    console.print(users_table(users, lists, titles))
    console.print(figures_table(rows, users.num_rows))


if __name__ == "__main__":
    main()

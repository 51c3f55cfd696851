"""A made-up MovieLens in RecBole's files. Nobody's ratings are in here."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import ml100k
import numpy as np
import pytest

ITEMS, USERS = 90, 14
# Items that occur as somebody's last item and nowhere else.
POISON = np.arange(ITEMS - USERS + 1, ITEMS + 1)


def write_files(folder: Path) -> tuple[Path, Path]:
    """Interactions in shuffled order and an items file; the last item of user u is POISON[u - 1]."""
    generator = np.random.default_rng(5)
    lines = []
    for user in range(1, USERS + 1):
        items = generator.choice(np.arange(1, ITEMS - USERS + 1), size=int(generator.integers(4, 30)), replace=False)
        times = 1000 + np.sort(generator.integers(0, 9, len(items)))
        rows = [*zip(items.tolist(), times.tolist(), strict=True), (int(POISON[user - 1]), 2000)]
        lines += [f"{user}\t{item}\t{generator.integers(1, 6)}\t{time}" for item, time in rows]
    generator.shuffle(lines)
    interactions, items_file = folder / "ml-100k.inter", folder / "ml-100k.item"
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    interactions.write_text("\n".join([header, *lines]) + "\n")
    genres = ["Comedy", "Drama Film-Noir", "Action Sci-Fi Thriller"]
    movies = [f'{item}\tFilm "{item}", The\t{1930 + item % 70}\t{genres[item % 3]}' for item in range(1, ITEMS + 1)]
    movies[3] = "4\tunkonwn\tunkonwn\tunknown"
    items_file.write_text(
        "\n".join(["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", *movies])
    )
    return interactions, items_file


def write_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with these files, whose digests ``ml100k`` is told to expect."""
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(zip(ml100k.MEMBERS, write_files(folder), strict=True))
    wheel = folder / ml100k.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, path in files.items():
            archive.write(path, member)
    digests = {member: hashlib.sha256(path.read_bytes()).hexdigest() for member, path in files.items()}
    monkeypatch.setattr(ml100k, "MEMBERS", digests)
    return wheel

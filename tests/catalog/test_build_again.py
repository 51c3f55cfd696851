"""build-vocab where there is something already: the same, another or a damaged vocabulary, or somebody's files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalog_support import BASIC, build, content, rows_in_order

from xgr_engine.catalog import build as build_module
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.errors import CatalogError, OutputExistsError


def test_the_same_catalog_again_is_nothing_to_do(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "vocab").iterdir()}
    for options in ({}, {"update": True}):
        assert build(tmp_path, BASIC, **options).action == "unchanged"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "vocab").iterdir()} == before


def test_another_catalog_needs_update(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    before = content(tmp_path / "vocab")
    changed = {**BASIC, "sid": [[1, 2], [0, 9], [1, 2], [5]]}
    with pytest.raises(OutputExistsError, match="content_hash") as caught:
        build(tmp_path, changed)
    assert "--update" in str(caught.value) and caught.value.exit_code == 2
    assert content(tmp_path / "vocab") == before


def test_update_reports_changes_and_equals_a_fresh_build(tmp_path: Path) -> None:
    """xLLM vocabulary: 3 items added, 2 removed, 1 moved."""
    old_sids = {item: [item % 3, item] for item in range(10)}
    new_sids = {item: sid for item, sid in old_sids.items() if item > 1} | {20: [0, 5, 1], 21: [2, 1], 22: [0, 0]}
    new_sids[5] = [2, 5, 0]
    old = {"item_id": list(old_sids), "sid": list(old_sids.values())}
    new = {"item_id": list(new_sids), "sid": list(new_sids.values())}
    build(tmp_path, old)
    result = build(tmp_path, new, update=True)
    assert result.action == "updated" and result.changes is not None
    changes = result.changes
    assert (changes.added, changes.removed, changes.moved, changes.kept) == (3, 2, 1, 7)
    assert changes.examples == {"added": [22, 20, 21], "removed": [0, 1], "moved": [5]}
    build(tmp_path, new, "fresh")
    assert content(tmp_path / "vocab") == content(tmp_path / "fresh")
    assert not list(tmp_path.glob(".*")), "the old directory is gone"


def test_update_matches_ids_of_another_type_by_their_text(tmp_path: Path) -> None:
    build(tmp_path, {"item_id": [1, 2], "sid": [[1], [2]]})
    changes = build(tmp_path, {"item_id": ["1", "3"], "sid": [[1, 0], [2, 0]]}, update=True).changes
    assert changes is not None and (changes.added, changes.removed, changes.moved, changes.kept) == (1, 1, 1, 0)


def test_update_without_a_vocabulary_builds_one(tmp_path: Path) -> None:
    (tmp_path / "vocab").mkdir()
    assert build(tmp_path, BASIC, update=True).action == "built"


def test_what_is_no_vocabulary_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for out in ("vocab", "file"):
        with pytest.raises(OutputExistsError, match="is not a vocabulary"):
            build(tmp_path, BASIC, out, update=True)
    assert content(tmp_path / "vocab") == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("name", ["vocab.json", "trie.safetensors", "items.parquet"])
@pytest.mark.parametrize("items", [[1, 2], [1, 3]], ids=["same catalog", "another catalog"])
def test_update_builds_a_damaged_vocabulary_anew(tmp_path: Path, name: str, items: list[int]) -> None:
    build(tmp_path, {"item_id": [1, 2], "sid": [[1], [2]]})
    damaged = tmp_path / "vocab" / name
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(CatalogError, match="--update builds it anew"):
        build(tmp_path, {"item_id": items, "sid": [[1], [2]]})
    build(tmp_path, {"item_id": items, "sid": [[1], [2]]}, update=True)
    assert [item for item, _ in rows_in_order(tmp_path / "vocab")] == items


def test_update_never_deletes_files_of_others(tmp_path: Path) -> None:
    build(tmp_path, {"item_id": [1], "sid": [[1]]})
    note = tmp_path / "vocab" / "note.txt"
    note.write_text("mine")
    with pytest.raises(OutputExistsError, match=r"note\.txt"):
        build(tmp_path, {"item_id": [2], "sid": [[1]]}, update=True)
    assert note.read_text() == "mine" and [item for item, _ in rows_in_order(tmp_path / "vocab")] == [1]


def test_a_damaged_vocabulary_is_named_and_not_called_unchanged(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    items = tmp_path / "vocab" / "items.parquet"
    broken = bytearray(items.read_bytes())
    broken[10] ^= 1
    items.write_bytes(broken)
    with pytest.raises(CatalogError, match=r"items\.parquet is damaged"):
        build(tmp_path, BASIC)


def test_a_link_keeps_pointing_at_the_replaced_directory(tmp_path: Path) -> None:
    build(tmp_path, BASIC, "vocab-1")
    (tmp_path / "vocab").symlink_to("vocab-1")
    build(tmp_path, {"item_id": [1], "sid": [[1]]}, "vocab", update=True)
    assert (tmp_path / "vocab").is_symlink() and load_vocabulary(tmp_path / "vocab-1").num_items == 1


def test_a_failure_while_writing_leaves_the_old_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, BASIC)
    before = content(tmp_path / "vocab")

    def fail(*args: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "save_trie", fail)
    with pytest.raises(OSError, match="No space"):
        build(tmp_path, {"item_id": [1], "sid": [[1]]}, update=True)
    assert content(tmp_path / "vocab") == before and not list(tmp_path.glob(".*"))


def test_an_open_vocabulary_survives_its_replacement(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    vocabulary = load_vocabulary(tmp_path / "vocab")
    build(tmp_path, {"item_id": [1], "sid": [[1]]}, update=True)
    assert vocabulary.trie.leaf_codes().tolist() == [[0, 9], [1, -1], [1, 2]]


_KILLED = """
import os, signal, sys
from xgr_engine.catalog import build
from xgr_engine.catalog.readers import ReadOptions
save = build.save_trie
def die(*args):
    save(*args)
    os.kill(os.getpid(), signal.SIGKILL)
build.save_trie = die
build.build_vocabulary([sys.argv[1]], sys.argv[2], ReadOptions(), build.BuildOptions(update=True))
"""


def test_a_killed_build_leaves_the_old_vocabulary_and_the_next_build_cleans_up(tmp_path: Path) -> None:
    """Kill -9 at any moment, run again: same content as an uninterrupted run."""
    build(tmp_path, BASIC)
    before = content(tmp_path / "vocab")
    new = {"item_id": [1, 2], "sid": [[1], [2]]}
    source = tmp_path / "new.parquet"
    pq.write_table(pa.table(new), source)
    done = subprocess.run([sys.executable, "-c", _KILLED, source, tmp_path / "vocab"], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert content(tmp_path / "vocab") == before and len(list(tmp_path.glob(".vocab.build-*"))) == 1
    build(tmp_path, new, update=True)
    build(tmp_path, new, "fresh")
    assert content(tmp_path / "vocab") == content(tmp_path / "fresh") and not list(tmp_path.glob(".*"))


def test_a_build_that_is_running_is_not_cleaned_away(tmp_path: Path) -> None:
    from xgr_engine.catalog.swap import replacement

    with replacement(tmp_path / "vocab") as one:
        with replacement(tmp_path / "vocab") as two:
            (two / "name").write_text("two")
        assert one.is_dir()
        (one / "name").write_text("one")
    assert (tmp_path / "vocab" / "name").read_text() == "one" and not list(tmp_path.glob(".*"))


def test_replacement_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xgr_engine.catalog import swap

    monkeypatch.setattr(swap, "_exchange", lambda one, other: False)
    build(tmp_path, BASIC)
    build(tmp_path, {"item_id": [1], "sid": [[1]]}, update=True)
    assert load_vocabulary(tmp_path / "vocab").num_items == 1 and not list(tmp_path.glob(".*"))


def test_the_directory_has_ordinary_permissions(tmp_path: Path) -> None:
    build(tmp_path, BASIC)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "vocab").stat().st_mode & 0o777 == 0o777 & ~mask

"""The trie against a dictionary of Python tuples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.catalog.trie import ItemTrie, build_trie, sid_order, trie_of_sorted
from xgr_engine.errors import CatalogError

Sid = tuple[int, ...]

small_sids = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
wide_sids = st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=5).map(tuple)
catalogs = st.lists(st.one_of(small_sids, wide_sids), min_size=1, max_size=40)


def padded(sids: list[Sid]) -> np.ndarray:
    width = max(map(len, sids), default=1)
    return np.array([sid + (-1,) * (width - len(sid)) for sid in sids], np.int32).reshape(len(sids), width)


def paths_of(trie: ItemTrie) -> dict[Sid, list[int]]:
    """Every SID with its item rows, by walking nodes and children alone."""
    found: dict[Sid, list[int]] = {}

    def walk(depth: int, node: int, prefix: Sid) -> None:
        if depth and trie.is_leaf(depth)[node]:
            leaf = trie.leaf_start[depth - 1][node]
            assert prefix not in found
            found[prefix] = trie.items[trie.item_start[leaf] : trie.item_start[leaf + 1]].tolist()
        if depth == trie.levels:
            return
        first, last = trie.child_start[depth][node], trie.child_start[depth][node + 1]
        for child in range(first, last):
            walk(depth + 1, child, (*prefix, int(trie.codes[depth][child])))

    walk(0, 0, ())
    return found


@given(catalogs)
@settings(max_examples=150, deadline=None)
def test_every_sid_is_one_path_with_its_items(sids: list[Sid]) -> None:
    trie, order = build_trie(padded(sids))
    trie.validate()
    assert sorted(order.tolist()) == list(range(len(sids)))
    expected: dict[Sid, list[int]] = {}
    for row, sid in enumerate(sids):
        expected.setdefault(sid, []).append(row)
    found = paths_of(trie)
    assert list(found) == sorted(expected), "walking depth-first meets SIDs in lexicographic order"
    assert {sid: order[rows].tolist() for sid, rows in found.items()} == expected
    assert trie.items.tolist() == list(range(len(sids)))


@given(catalogs)
@settings(max_examples=100, deadline=None)
def test_nodes_are_the_distinct_prefixes_in_order_with_their_leaves(sids: list[Sid]) -> None:
    trie, _ = build_trie(padded(sids))
    leaves = sorted(set(sids))
    assert trie.leaf_codes().tolist() == padded(leaves).tolist()
    assert trie.leaf_depth.tolist() == [len(sid) for sid in leaves]
    for depth in range(1, trie.levels + 1):
        prefixes = sorted({sid[:depth] for sid in leaves if len(sid) >= depth})
        assert trie.codes[depth - 1].tolist() == [prefix[-1] for prefix in prefixes]
        spans = zip(trie.leaf_start[depth - 1], trie.leaf_end[depth - 1], strict=True)
        assert [leaves[start:end] for start, end in spans] == [
            [sid for sid in leaves if sid[:depth] == prefix] for prefix in prefixes
        ]
        assert trie.is_leaf(depth).tolist() == [prefix in leaves for prefix in prefixes]


@given(catalogs, st.lists(st.one_of(small_sids, wide_sids), max_size=20))
@settings(max_examples=100, deadline=None)
def test_leaves_of_codes_finds_sids_and_nothing_else(sids: list[Sid], others: list[Sid]) -> None:
    trie, _ = build_trie(padded(sids))
    leaves = sorted(set(sids))
    asked = sids + others + [sid[:-1] for sid in sids if len(sid) > 1] + [(*sid, 0) for sid in sids]
    expected = [leaves.index(sid) if sid in leaves else -1 for sid in asked]
    assert trie.leaves_of_codes(padded(asked)).tolist() == expected


def test_a_row_without_codes_is_no_sid() -> None:
    trie, _ = build_trie(padded([(1, 2), (3,)]))
    assert trie.leaves_of_codes(np.full((2, 3), -1, np.int32)).tolist() == [-1, -1]


@given(catalogs, st.data())
@settings(max_examples=150, deadline=None)
def test_restricting_equals_building_from_the_subset(sids: list[Sid], data: st.DataObject) -> None:
    trie, order = build_trie(padded(sids))
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=len(sids), max_size=len(sids))))
    part = trie.restrict(allowed)
    part.validate()
    assert part.levels == trie.levels
    expected = {sid: kept for sid, rows in paths_of(trie).items() if (kept := [row for row in rows if allowed[row]])}
    assert paths_of(part) == expected
    assert part.num_items == allowed.sum() and part.num_leaves == len(expected)
    fresh, _ = build_trie(padded(sids)[order][allowed])
    for depth in range(fresh.levels):
        assert part.codes[depth].tolist() == fresh.codes[depth].tolist()
        assert part.child_start[depth].tolist() == fresh.child_start[depth].tolist()
        assert part.leaf_start[depth].tolist() == fresh.leaf_start[depth].tolist()
    assert part.item_start.tolist() == fresh.item_start.tolist()


@given(catalogs, st.data())
@settings(max_examples=60, deadline=None)
def test_restricting_twice_equals_restricting_to_both(sids: list[Sid], data: st.DataObject) -> None:
    trie, _ = build_trie(padded(sids))
    flags = st.lists(st.booleans(), min_size=len(sids), max_size=len(sids)).map(np.array)
    one, two = data.draw(flags), data.draw(flags)
    assert_same(trie.restrict(one).restrict(two), trie.restrict(one & two))


def test_the_order_of_items_on_a_sid_follows_the_tie_rank_and_not_the_rows() -> None:
    _, order = build_trie(padded([(1, 1), (0, 5), (1, 1), (1, 1)]), tie_rank=np.array([2, 0, 3, 1]))
    assert order.tolist() == [1, 3, 0, 2]


def test_codes_beyond_the_given_length_are_ignored() -> None:
    trie, _ = build_trie(np.array([[1, 2, 9], [1, 2, 3]], np.int32), np.array([2, 3], np.uint8))
    assert sorted(paths_of(trie)) == [(1, 2), (1, 2, 3)]


@given(st.lists(st.lists(st.integers(-1, 2**31 - 2), min_size=5, max_size=5), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_sid_order_is_stable_and_lexicographic_when_sid_and_row_do_not_fit_one_word(rows: list[list[int]]) -> None:
    assert sid_order(np.array(rows, np.int32)).tolist() == sorted(range(len(rows)), key=lambda row: (rows[row], row))


def test_an_empty_trie_is_valid() -> None:
    empty = trie_of_sorted(np.zeros((0, 3), np.int32))
    empty.validate()
    assert (empty.num_leaves, empty.num_items, empty.levels) == (0, 0, 3)
    assert empty.leaves_of_codes(np.array([[1, 2, 3]], np.int32)).tolist() == [-1]
    trie, _ = build_trie(padded([(1, 2, 3), (1,)]))
    assert_same(trie.restrict(np.zeros(2, bool)), empty)


@pytest.mark.parametrize("codes", [[[1, -1, 2]], [[-1, -1, -1]], [[1, -2, -2], [1, 2, 3]], [[-1, 3, 4]]])
def test_holes_and_negative_codes_are_refused(codes: list[list[int]]) -> None:
    with pytest.raises(CatalogError):
        build_trie(np.array(codes, np.int32), np.full(len(codes), 3, np.uint8) if codes[0][1] == -2 else None)


@pytest.mark.parametrize(
    ("field", "level", "change"),
    [
        ("codes", 1, lambda a: a[::-1]),
        ("codes", 0, lambda a: a - 5),
        ("child_start", 1, lambda a: a + 1),
        ("child_start", 0, lambda a: a[:-1]),
        ("leaf_start", 1, lambda a: a + 100),
        ("leaf_start", 0, lambda a: a[::-1]),
        ("leaf_depth", None, lambda a: a + 1),
        ("leaf_depth", None, lambda a: a * 0 + 1),
        ("item_start", None, lambda a: a * 0),
        ("items", None, lambda a: a[::-1]),
        ("items", None, lambda a: a[1:]),
    ],
)
def test_validate_names_the_array_that_is_wrong(field: str, level: int | None, change: object) -> None:
    trie, _ = build_trie(padded([(1, 2), (1, 3), (2, 0), (2, 0), (4, 4)]))
    value = getattr(trie, field)
    if level is None:
        broken = change(value)  # type: ignore[operator]
    else:
        broken = tuple(change(a) if at == level else a for at, a in enumerate(value))  # type: ignore[operator]
    with pytest.raises(CatalogError, match=field):
        dataclasses.replace(trie, **{field: broken}).validate()


def assert_same(one: ItemTrie, two: ItemTrie) -> None:
    for field in dataclasses.fields(ItemTrie):
        left, right = getattr(one, field.name), getattr(two, field.name)
        if isinstance(left, tuple):
            assert [a.tolist() for a in left] == [a.tolist() for a in right], field.name
        else:
            assert left.tolist() == right.tolist(), field.name

"""A forest of tries in one set of arrays: the same tries as built one by one, and searches that stay in their tree."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import beam_search
from tiny import CODES, LEVELS, TOKENS, TinyCatalog, TinyWorld, lists, random_prompts, same_ranking, token_table

from xgr_engine.catalog.trie import ItemForest, build_forest
from xgr_engine.options import SearchOptions, UserRules
from xgr_engine.recommender import Recommender

SIDS = st.lists(st.lists(st.integers(0, CODES - 1), min_size=1, max_size=LEVELS).map(tuple), min_size=1, max_size=24)


def forest_of(catalog: TinyCatalog, tree_of_item: list[int], trees: int) -> ItemForest:
    """Items whose tree is -1 are in none."""
    tree = np.array([tree_of_item[item] for item in catalog.items(np.arange(catalog.trie.num_items))], np.int32)
    rows = np.flatnonzero(tree >= 0).astype(np.int32)
    return build_forest(catalog.trie.leaf_codes()[catalog.trie.leaf_of_item[rows]], rows, tree[rows], trees)


@settings(max_examples=100, deadline=None)
@given(sids=SIDS, data=st.data())
def test_each_tree_is_the_restricted_trie(sids, data) -> None:
    catalog = TinyCatalog.of(sids)
    trees = data.draw(st.integers(1, 4))
    tree_of_item = data.draw(st.lists(st.integers(-1, trees - 1), min_size=len(sids), max_size=len(sids)))
    forest = forest_of(catalog, tree_of_item, trees)
    assert forest.num_nodes(0) == trees and forest.levels == catalog.trie.levels
    leaves = forest.tree_leaves()
    codes = forest.leaf_codes()
    for tree in range(trees):
        rows = np.array([row for item, row in catalog.rows.items() if tree_of_item[item] == tree], np.int64)
        mask = np.zeros(len(sids), np.bool_)
        mask[rows] = True
        alone = catalog.trie.restrict(mask)
        first, stop = leaves[tree], leaves[tree + 1]
        assert codes[first:stop].tolist() == alone.leaf_codes().tolist()
        assert forest.items[forest.item_start[first] : forest.item_start[stop]].tolist() == alone.items.tolist()
        assert np.diff(forest.child_start[0])[tree] == alone.num_nodes(1)
    assert forest.places_of(np.arange(-2, len(sids) + 2, dtype=np.int32)).tolist() == list(range(forest.num_items))


@settings(max_examples=100, deadline=None)
@given(
    sids=SIDS,
    beam=st.integers(1, 20),
    narrower=st.integers(0, 19),
    score_over=st.sampled_from(["vocab", "level", "allowed"]),
    collisions=st.sampled_from(["all", "first"]),
    suffix=st.sampled_from([(), (2, 1)]),
    rows_at_once=st.sampled_from([0, 1, 5, 48]),
    data=st.data(),
)
def test_users_of_one_batch_search_in_their_own_trees(
    world: TinyWorld, sids, beam, narrower, score_over, collisions, suffix, rows_at_once, data
) -> None:
    """Equal to brute force over the items of the user's tree; a tree without items gives an empty list."""
    catalog = TinyCatalog.of(sids)
    tree_of_item = data.draw(st.lists(st.integers(-1, 2), min_size=len(sids), max_size=len(sids)))
    forest = forest_of(catalog, tree_of_item, 4)
    options = SearchOptions(beam=beam, top_k=max(1, beam - narrower), score_over=score_over, collisions=collisions)
    recommender = Recommender(
        world.model, world.head, forest, token_table(), options, score_suffix=suffix, rows_at_once=rows_at_once
    )
    prompts = random_prompts(1, [1, 5, 9])
    trees = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    excluded = [data.draw(st.sets(st.integers(0, len(sids) - 1))) for _ in prompts]
    rules = [
        UserRules(np.array([catalog.rows[item] for item in gone], np.int32), tree)
        for gone, tree in zip(excluded, trees, strict=True)
    ]
    result = recommender.run(prompts, rules)
    for user, got in enumerate(lists(catalog, result)):
        inside = [(item, sid) for item, sid in catalog.catalog if tree_of_item[item] == trees[user]]
        expected = beam_search(
            world.naive, tuple(prompts[user].tolist()), inside, TOKENS, beam=beam, top_k=options.top_k,
            score_over=score_over, collisions=collisions, excluded=excluded[user], suffix=suffix,
        )  # fmt: skip
        same_ranking(got, expected)
        left = [sid for item, sid in inside if item not in excluded[user]]
        reachable = len(left) if collisions == "all" else len(set(left))
        assert len(got) == min(options.top_k, reachable) and bool(result.short[user]) == (reachable < options.top_k)


def test_the_search_of_fixed_shapes_starts_at_the_same_roots(world: TinyWorld) -> None:
    """The device's search (in Triton's interpreter where there is no GPU) over a forest, against the host's."""
    from xgr_engine.models.packing import PackedPrompts
    from xgr_engine.search.device import DeviceSearch
    from xgr_engine.search.host import HostSearch
    from xgr_engine.search.setup import DeadNodes
    from xgr_engine.xbeam.exclusions import find_dead_nodes

    rng = np.random.default_rng(3)
    catalog = TinyCatalog.of([tuple(rng.integers(0, CODES, 3).tolist()) for _ in range(90)])
    forest = forest_of(catalog, rng.integers(-1, 3, 90).tolist(), 4)
    options = SearchOptions(beam=7, top_k=7)
    setup = Recommender(world.model, world.head, forest, token_table(), options).setup
    prompts = random_prompts(4, [3, 17, 9, 5])
    excluded = [rng.integers(0, 90, count).astype(np.int32) for count in (0, 40, 80, 4)]
    exclusions = find_dead_nodes(
        forest, [UserRules(rows, tree) for rows, tree in zip(excluded, (2, 0, 1, 3), strict=True)]
    )
    dead = DeadNodes.of(exclusions).to(world.model.device)
    with torch.inference_mode():
        pack = PackedPrompts.of(prompts, world.model.device)
        cache = world.model.new_cache(pack.cache_tokens, 4, setup.slots)
        hidden = world.model.prefill(pack, cache)
        expected = HostSearch(setup, rows_at_once=0).run(hidden, cache, dead)
        got = DeviceSearch(setup, users=4).run(
            hidden, cache, dead, torch.ones(4, dtype=torch.bool, device=hidden.device)
        )
    for user in range(4):
        mine, theirs = (
            {int(leaf): float(s) for leaf, s in zip(o.leaf[user], o.score[user], strict=True) if s > -torch.inf}
            for o in (got, expected)
        )
        assert mine.keys() == theirs.keys() and len(mine) == min(7, int(exclusions.reachable_leaves[user]))
        np.testing.assert_allclose([mine[leaf] for leaf in mine], [theirs[leaf] for leaf in mine], atol=1e-5)

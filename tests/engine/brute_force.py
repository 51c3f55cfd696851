"""Any search of a small model against brute force over all items: what both kinds of model are held to."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from t5_tiny import TinyT5
from tiny import CODES, LEVELS, TinyCatalog, TinyWorld, lists, random_prompts, same_ranking

from xgr_engine.options import SearchOptions

SIDS = st.lists(st.lists(st.integers(0, CODES - 1), min_size=1, max_size=LEVELS).map(tuple), min_size=1, max_size=24)

# Unequal depths, a SID that is a prefix of another, shared SIDs, W from 1 to more than the items, K <= W.
any_search = given(
    sids=SIDS,
    beam=st.integers(1, 30),
    narrower=st.integers(0, 29),
    score_over=st.sampled_from(["vocab", "level", "allowed"]),
    collisions=st.sampled_from(["all", "first"]),
    suffix=st.sampled_from([(), (2,), (2, 1)]),
    rows_at_once=st.sampled_from([0, 1, 2, 5, 48]),
    data=st.data(),
)


def equals_brute_force(
    world: TinyWorld | TinyT5, sids, beam, narrower, score_over, collisions, suffix, rows_at_once, data
) -> None:
    """Three users with exclusions of their own: the lists, their lengths and their flags."""
    catalog = TinyCatalog.of(sids)
    top_k = max(1, beam - narrower)
    options = SearchOptions(beam=beam, top_k=top_k, score_over=score_over, collisions=collisions)
    recommender = world.recommender(catalog, options, score_suffix=suffix, rows_at_once=rows_at_once)
    prompts = random_prompts(1, [1, 5, 9])
    excluded = [data.draw(st.sets(st.integers(0, len(sids) - 1))) for _ in prompts]
    gone = [np.array([catalog.rows[item] for item in sorted(items)], np.int32) for items in excluded]
    result = recommender.run(prompts, gone)
    for user, got in enumerate(lists(catalog, result)):
        expected = world.expected(
            prompts[user].tolist(),
            catalog,
            beam=beam,
            top_k=top_k,
            score_over=score_over,
            collisions=collisions,
            excluded=excluded[user],
            suffix=suffix,
        )
        same_ranking(got, expected)
        left = [sid for item, sid in catalog.catalog if item not in excluded[user]]
        reachable = len(left) if collisions == "all" else len(set(left))
        assert len(got) == min(top_k, reachable)
        assert bool(result.short[user]) == (reachable < top_k)

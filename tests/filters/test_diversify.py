"""Filters, matches and caps together against brute force: filter the catalog first, then search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from filter_support import ITEMS, lists_of, make_assets, of_items, options_for, write_users
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import beam_search
from tiny import CODES, LEVELS, TOKENS, TinyCatalog, TinyWorld, lists, random_prompts, same_ranking, token_table

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import UsageError
from xgr_engine.job.diversify import DiverseEngine, search_for
from xgr_engine.job.filter_options import Diversify, Match, parse_diversify, parse_match
from xgr_engine.job.filters import Attribute, ItemFilters, Matcher
from xgr_engine.job.input_formats import Rows
from xgr_engine.job.run import run_job
from xgr_engine.options import SearchOptions, UserRules
from xgr_engine.recommender import Recommender

SIDS = st.lists(st.lists(st.integers(0, CODES - 1), min_size=1, max_size=LEVELS).map(tuple), min_size=1, max_size=20)
VALUES = [None, "a", "b", "c"]


class MemoryVocabulary:
    """What the filters ask of a vocabulary, over a catalog in memory. Attributes are listed by item."""

    def __init__(self, catalog: TinyCatalog, attributes: dict[str, list[Any]]) -> None:
        self.trie: ItemTrie = catalog.trie
        order = catalog.items(np.arange(catalog.trie.num_items))
        self._table = pa.table(
            {name: pa.array([values[item] for item in order], pa.string()) for name, values in attributes.items()}
        )
        self.num_items = catalog.trie.num_items
        self.attribute_names = tuple(attributes)
        self.leaf_of_row = catalog.trie.leaf_of_item

    def columns(self, names: list[str]) -> pa.Table:
        return self._table.select(names)

    def sids(self) -> Any:
        return self.trie.leaf_codes(), self.trie.leaf_depth


def brute_force(world: TinyWorld, prompt: Any, catalog: Any, cap: tuple[dict[int, Any], int] | None, **search: Any):
    """Search what is left, take greedily under the cap, deny full values but what was taken, until nothing changes."""
    denied: set[int] = set()
    top_k, closed = search.pop("top_k"), set()
    while True:
        left = [(item, sid) for item, sid in catalog if item not in denied]
        most_ranked = search["beam"] if cap else top_k
        ranked = beam_search(world.naive, tuple(prompt.tolist()), left, TOKENS, top_k=most_ranked, **search)
        if cap is None:
            return ranked
        value, most = cap
        kept: list[Any] = []
        for entry in ranked:
            same = sum(value[item] == value[entry[0]] for item, _, _ in kept)
            if len(kept) < top_k and (value[entry[0]] is None or same < most):
                kept.append(entry)
        taken = [item for item, _, _ in kept]
        full = {value[item] for item in taken if sum(value[i] == value[item] for i in taken) == most} - {None} - closed
        everything = len(ranked) < search["beam"] and search["collisions"] == "all"  # no other value is live
        if len(kept) == top_k or not full or everything:
            return kept
        closed |= full
        denied |= {item for item, _ in catalog if value[item] in full and item not in taken}


@settings(max_examples=120, deadline=None)
@given(
    sids=SIDS,
    beam=st.integers(1, 24),
    narrower=st.integers(0, 23),
    score_over=st.sampled_from(["vocab", "level", "allowed"]),
    collisions=st.sampled_from(["all", "first"]),
    rows_at_once=st.sampled_from([0, 2, 48]),
    match=st.booleans(),
    most=st.sampled_from([None, 1, 2, 3]),
    data=st.data(),
)
def test_equals_a_search_of_the_filtered_catalog(
    world: TinyWorld, sids, beam, narrower, score_over, collisions, rows_at_once, match, most, data
) -> None:
    """Random attributes with nulls, filters, exclusions, matches and caps; unequal depths; shared SIDs; W and K."""
    catalog = TinyCatalog.of(sids)
    column = st.lists(st.sampled_from(VALUES), min_size=len(sids), max_size=len(sids))
    home, brand = data.draw(column), data.draw(column)
    kept_items = data.draw(st.lists(st.booleans(), min_size=len(sids), max_size=len(sids)))
    vocabulary: Any = MemoryVocabulary(catalog, {"home": home, "brand": brand})
    allowed = np.array([kept_items[item] for item in catalog.items(np.arange(len(sids)))], np.bool_)
    matcher = Matcher.of((Match("home", "lives"),), allowed, vocabulary) if match else None
    cap = None if most is None else Diversify("brand", most)
    capped = None if cap is None else Attribute.of("--diversify", "brand", vocabulary)
    filters = ItemFilters(vocabulary, allowed, matcher, cap, capped)
    trie = vocabulary.trie.restrict(allowed) if matcher is None else matcher.forest(vocabulary)
    options = SearchOptions(beam=beam, top_k=max(1, beam - narrower), score_over=score_over, collisions=collisions)
    engine: Any = Recommender(
        world.model, world.head, trie, token_table(), search_for(filters, options), rows_at_once=rows_at_once
    )
    if cap is not None:
        engine = DiverseEngine(engine, filters, options)
    prompts = random_prompts(1, [1, 5, 9])
    lives = data.draw(st.lists(st.sampled_from([*VALUES, "z"]), min_size=3, max_size=3))
    gone = [data.draw(st.sets(st.integers(0, len(sids) - 1), max_size=6)) for _ in prompts]
    rules: list[Any] = [np.array(sorted(catalog.rows[item] for item in items), np.int32) for items in gone]
    if matcher is not None:
        trees = matcher.trees_of(Rows(pa.table({}), {"lives": pa.array(lives, pa.string())}, 3))
        rules = [UserRules(rule, int(tree)) for rule, tree in zip(rules, trees, strict=True)]
    result = engine.run(prompts, rules)
    values = dict(enumerate(brand))
    for user, got in enumerate(lists(catalog, result)):
        inside = [
            (item, sid)
            for item, sid in catalog.catalog
            if kept_items[item]
            and item not in gone[user]
            and (not match or (lives[user] is not None and home[item] == lives[user]))
        ]
        expected = brute_force(
            world, prompts[user], inside, None if most is None else (values, most),
            beam=beam, top_k=options.top_k, score_over=score_over, collisions=collisions,
        )  # fmt: skip
        same_ranking(got, expected)
        assert bool(result.short[user]) == (len(got) < options.top_k)
        if collisions == "all":
            counts = [sum(values[i] == value for i, _ in inside) for value in VALUES[1:]]
            reachable = len(inside)
            if most is not None:
                reachable = sum(min(most, count) for count in counts) + sum(values[i] is None for i, _ in inside)
            assert len(got) == min(options.top_k, reachable)


def test_the_search_runs_again_while_a_list_is_short(world: TinyWorld) -> None:
    """30 items of one brand score best in a beam of 8; the cap makes the search look below them, and counts it."""
    sids = [(0, a, b) for a in range(5) for b in range(6)] + [(1, a, b) for a in range(3) for b in range(4)]
    catalog = TinyCatalog.of(sids)
    brand = ["one"] * 30 + [f"other {i}" for i in range(12)]
    prompt = next(
        prompts
        for prompts in (random_prompts(seed, [4]) for seed in range(50))
        if world.recommender(catalog, SearchOptions(beam=8, top_k=8))
        .run(prompts, [np.empty(0, np.int32)])
        .item_rows.max()
        < 30
    )
    vocabulary: Any = MemoryVocabulary(catalog, {"brand": brand})
    capped = Attribute.of("--diversify", "brand", vocabulary)
    filters = ItemFilters(vocabulary, np.ones(42, np.bool_), None, Diversify("brand", 2), capped)
    options = SearchOptions(beam=8, top_k=6)
    inner = world.recommender(catalog, search_for(filters, options))
    engine = DiverseEngine(inner, filters, options)
    result = engine.run(prompt, [np.empty(0, np.int32)])
    assert result.counts.tolist() == [6] and not result.short[0]
    assert sum(row < 30 for row in result.item_rows) == 2 and engine.passes == {"users": 1, "searches": 2, "longest": 2}
    assert (np.diff(result.scores) <= 0).all()


@pytest.mark.parametrize("score_over", ["vocab", "allowed"])
def test_caps_through_the_job(tmp_path: Path, score_over: Any) -> None:
    """At most two of a brand, items without one uncapped, short where the values run out; passes are counted."""
    vocab, model = make_assets(tmp_path)
    users = write_users(tmp_path / "users.parquet", 9)
    search = SearchOptions(beam=40, top_k=20, score_over=score_over)
    report = run_job(options_for(tmp_path, vocab, model, users, search, diversify="brand=2", shard_rows=4))
    brand = of_items("brand")
    unbranded = {item for item in ITEMS if brand[item] is None}
    for got in lists_of(tmp_path / "recs"):
        items = [item for item, _ in got or []]
        for value in range(4):
            assert sum(brand[item] == value for item in items) == 2
        assert len(items) == len(set(items)) == 8 + len(unbranded) and unbranded <= set(items)
    record = report.record
    assert report.failure is None and record["audit"]["over_cap"] == 0 and record["audit"]["short"] == 9
    assert record["diversify"]["users"] == 9 and record["diversify"]["longest"] >= 1


def test_options_are_read_or_refused() -> None:
    assert parse_diversify("a=b=3") == Diversify("a=b", 3)
    assert parse_match("country") == Match("country", "country")
    assert parse_match(" country = home ") == Match("country", "home")
    for text in ("brand", "brand=", "=2", "brand=0", "brand=x", "brand=-1"):
        with pytest.raises(UsageError, match="must be attribute=max"):
            parse_diversify(text)


def test_ranking_width_follows_the_cap() -> None:
    options = SearchOptions(beam=9, top_k=3)
    without = ItemFilters(None, np.ones(1, np.bool_))  # type: ignore[arg-type]
    assert search_for(without, options) == options
    assert search_for(replace(without, cap=Diversify("a", 1)), options).top_k == 9

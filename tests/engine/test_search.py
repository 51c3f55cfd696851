"""Trie beam search against brute force: depths, collisions, widths, exclusions, score modes, pruning, batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from brute_force import any_search, equals_brute_force
from hypothesis import settings
from oracle import beam_search
from tiny import CODES, DEVICE, TOKENS, TinyCatalog, TinyWorld, lists, random_prompts, same_ranking, token_table

from xgr_engine.errors import UsageError, XgrError
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.options import ScoreOver, SearchOptions
from xgr_engine.recommender import Recommender


@settings(max_examples=150, deadline=None)
@any_search
def test_equals_brute_force(world: TinyWorld, **search) -> None:
    equals_brute_force(world, **search)


def test_scores_equal_each_path_without_a_cache(world: TinyWorld) -> None:
    """Every SID of a full tree of depth 3, W as large as the tree: each score is the path's own log-probability."""
    sids = [(a, b, c) for a in range(4) for b in range(4) for c in range(4)]
    catalog = TinyCatalog.of(sids)
    (prompt,) = random_prompts(3, [7])
    result = world.recommender(catalog, SearchOptions(beam=64, top_k=64)).run([prompt], [np.empty(0, np.int32)])
    for item, score in lists(catalog, result)[0]:
        tokens, total = tuple(prompt.tolist()), 0.0
        for level, code in enumerate(sids[item]):
            total += float(world.naive.logits(tokens).log_softmax(0)[TOKENS[level][code]])
            tokens += (TOKENS[level][code],)
        assert score == pytest.approx(total, abs=2e-5)


def test_five_items_sixteen_beams(world: TinyWorld) -> None:
    """Fewer items than beams: five rows, flagged short, no filler, no repeat."""
    catalog = TinyCatalog.of([(0, 1), (0, 2), (1, 1), (2, 0), (2, 5)])
    result = world.recommender(catalog, SearchOptions(beam=16, top_k=16)).run(
        random_prompts(0, [4]), [np.empty(0, np.int32)]
    )
    assert sorted(item for item, _ in lists(catalog, result)[0]) == [0, 1, 2, 3, 4]
    assert result.short.tolist() == [True]


def test_the_whole_prefix_decides(world: TinyWorld) -> None:
    """Catalog {(1,2), (3,4)}: (1,4) is no item, though 4 is a code of the second level."""
    catalog = TinyCatalog.of([(1, 2), (3, 4)])
    for seed in range(8):
        result = world.recommender(catalog, SearchOptions(beam=4, top_k=4)).run(
            random_prompts(seed, [3]), [np.empty(0, np.int32)]
        )
        assert sorted(item for item, _ in lists(catalog, result)[0]) == [0, 1]


def test_a_score_over_the_vocabulary_ignores_the_catalog(world: TinyWorld) -> None:
    """Same user, a catalog of 1 item and of 100: the item's log-probability is the same."""
    many = [(a, b, c) for a in range(5) for b in range(5) for c in range(4)]
    prompt = random_prompts(5, [6])
    few = world.recommender(TinyCatalog.of([(2, 3, 1)]), SearchOptions(beam=1, top_k=1)).run(
        prompt, [np.empty(0, np.int32)]
    )
    catalog = TinyCatalog.of(many)
    result = world.recommender(catalog, SearchOptions(beam=100, top_k=100)).run(prompt, [np.empty(0, np.int32)])
    assert dict(lists(catalog, result)[0])[many.index((2, 3, 1))] == pytest.approx(float(few.scores[0]), abs=2e-5)


def test_a_prefix_with_no_allowed_leaf_gets_no_beam(world: TinyWorld) -> None:
    """Prefix 0 holds three items, all excluded; W 3, K 3: three items of prefix 1, however good prefix 0 scores."""
    sids = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    catalog = TinyCatalog.of(sids)
    for seed in range(6):
        result = world.recommender(catalog, SearchOptions(beam=3, top_k=3)).run(
            random_prompts(seed, [5]), [np.array([catalog.rows[item] for item in (0, 1, 2)], np.int32)]
        )
        got = [item for item, _ in lists(catalog, result)[0]]
        assert len(got) == 3 and set(got) <= {3, 4, 5, 6}


@pytest.mark.parametrize("beam", [5, 16])
def test_dead_beams_give_their_places_back(world: TinyWorld, beam: int) -> None:
    """Two codes at the first level, W larger: all four two-level paths are found."""
    catalog = TinyCatalog.of([(0, 1), (0, 4), (3, 0), (3, 2)])
    result = world.recommender(catalog, SearchOptions(beam=beam, top_k=4)).run(
        random_prompts(2, [3]), [np.empty(0, np.int32)]
    )
    assert sorted(item for item, _ in lists(catalog, result)[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("beam", [7, 333])
def test_any_width_works(world: TinyWorld, beam: int) -> None:
    sids = [(a, b, c) for a in range(6) for b in range(6) for c in range(6)]
    catalog = TinyCatalog.of(sids)
    prompt = random_prompts(4, [8])
    result = world.recommender(catalog, SearchOptions(beam=beam, top_k=7)).run(prompt, [np.empty(0, np.int32)])
    expected = beam_search(world.naive, tuple(prompt[0].tolist()), catalog.catalog, TOKENS, beam=beam, top_k=7)
    same_ranking(lists(catalog, result)[0], expected)


def test_more_results_than_beams_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--top-k 3 is larger than --beam 2"):
        SearchOptions(beam=2, top_k=3)


@pytest.mark.parametrize("rows_at_once", [0, 3])
def test_equal_scores_are_ordered_by_sid(world: TinyWorld, rows_at_once: int) -> None:
    """A head of zeros makes all scores equal: the list is in SID order, and the smallest SIDs win."""
    sids = [(a, b, c) for a in range(6) for b in range(6) for c in range(6)]
    catalog = TinyCatalog.of(sids)
    recommender = Recommender(
        world.model,
        torch.zeros_like(world.head),
        catalog.trie,
        token_table(),
        SearchOptions(beam=16, top_k=16),
        rows_at_once=rows_at_once,
    )
    result = recommender.run(random_prompts(0, [4, 4]), [np.empty(0, np.int32)] * 2)
    for answer in lists(catalog, result):
        assert [item for item, _ in answer] == list(range(16))


def test_batches_of_1_7_and_64_are_equal(world: TinyWorld) -> None:
    """Ragged prompts, some with a shared beginning, in batches of any size: the same lists, scores within 1e-5."""
    generator = np.random.default_rng(0)
    sids = [tuple(generator.integers(0, CODES, 3).tolist()) for _ in range(150)]
    catalog = TinyCatalog.of(sids)
    start = generator.integers(0, 30, 12).astype(np.int32)
    prompts = [np.concatenate([start, tail]) for tail in random_prompts(1, generator.integers(1, 30, 64).tolist())]
    excluded = [generator.integers(0, 150, 10).astype(np.int32) for _ in prompts]
    recommender = world.recommender(catalog, SearchOptions(beam=20, top_k=15))
    answers = {}
    for size in (1, 7, 64):
        answers[size] = [
            answer
            for at in range(0, 64, size)
            for answer in lists(catalog, recommender.run(prompts[at : at + size], excluded[at : at + size]))
        ]
    for size in (7, 64):
        for one, other in zip(answers[1], answers[size], strict=True):
            same_ranking(other, [(item, (), score) for item, score in one], tolerance=1e-5)


def test_bits_do_not_change_from_run_to_run(world: TinyWorld) -> None:
    catalog = TinyCatalog.of([(a, b) for a in range(6) for b in range(6)])
    prompts, nothing = random_prompts(9, [3, 17, 40, 1, 8]), [np.empty(0, np.int32)] * 5
    recommender = world.recommender(catalog, SearchOptions(beam=10, top_k=10))
    first, second = recommender.run(prompts, nothing), recommender.run(prompts, nothing)
    assert (first.scores == second.scores).all() and (first.item_rows == second.item_rows).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU a level has a fixed number of rows")
def test_pruned_rows_change_nothing_but_the_work(world: TinyWorld) -> None:
    """Rows that cannot win are not computed (there must be some here), and the result is the same."""
    sids = [(a, b, c) for a in range(6) for b in range(6) for c in range(6)]
    catalog = TinyCatalog.of(sids)
    prompts, nothing = random_prompts(11, [10] * 4), [np.empty(0, np.int32)] * 4
    options = SearchOptions(beam=200, top_k=3)
    pruned = world.recommender(catalog, options, rows_at_once=8)
    whole = world.recommender(catalog, options, rows_at_once=0)
    for one, other in zip(
        lists(catalog, pruned.run(prompts, nothing)), lists(catalog, whole.run(prompts, nothing)), strict=True
    ):
        same_ranking(one, [(item, (), score) for item, score in other], tolerance=1e-5)
    assert pruned.counters.rows_expanded < pruned.counters.rows_live


def test_nothing_reachable(world: TinyWorld) -> None:
    """Everything excluded for one user of the batch: an empty list for that one alone."""
    catalog = TinyCatalog.of([(0, 1), (0, 2), (3, 3)])
    result = world.recommender(catalog, SearchOptions(beam=4, top_k=2)).run(
        random_prompts(0, [4, 4]), [np.arange(3, dtype=np.int32), np.empty(0, np.int32)]
    )
    assert result.counts.tolist() == [0, 2] and result.short.tolist() == [True, False]


@pytest.mark.parametrize("broken", ["embedding", "a row of the head"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_model_of_nans_is_an_error(world: TinyWorld, broken: str, prompts: int) -> None:
    old, head = world.model, world.head.clone()
    embed = old.embed * float("nan") if broken == "embedding" else old.embed
    if broken == "a row of the head":
        head[0] = float("nan")  # a token of text: no SID's, but part of the sum over the vocabulary
    recommender = Recommender(
        DecoderOnly(old.spec, embed, old.norm, old.layers, old.ops),
        head,
        TinyCatalog.of([(0, 1), (2, 2)]).trie,
        token_table(),
        SearchOptions(beam=2, top_k=2),
    )
    with pytest.raises(XgrError, match="not a number"):
        recommender.run(random_prompts(0, [4] * prompts), [np.empty(0, np.int32)] * prompts)


@pytest.mark.parametrize("score_over", ["vocab", "level", "allowed"])
@pytest.mark.parametrize("level", [0, 1])
def test_a_broken_code_is_an_error(world: TinyWorld, score_over: ScoreOver, level: int) -> None:
    """Left out in silence, it would make the scores of the codes beside it wrong."""
    head = world.head.clone()
    head[TOKENS[level][2]] = float("nan")
    catalog = TinyCatalog.of([(a, b) for a in (0, 2, 3) for b in (1, 2, 4)])
    options = SearchOptions(beam=9, top_k=3, score_over=score_over)
    recommender = Recommender(world.model, head, catalog.trie, token_table(), options)
    with pytest.raises(XgrError, match="not a number"):
        recommender.run(random_prompts(0, [4]), [np.empty(0, np.int32)])

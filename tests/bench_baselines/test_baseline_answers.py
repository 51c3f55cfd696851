"""Every baseline inside the engine finds what the engine finds, on tiny random models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import CODES, TinyCatalog, TinyWorld, random_prompts, token_table

from xgr_engine.bench.baselines.masked_search import MaskedRecommender, MaskedSearch
from xgr_engine.bench.baselines.paged import PagedDecoder
from xgr_engine.bench.baselines.paper import PaperDecoder
from xgr_engine.bench.baselines.sorted_search import SortedSearch
from xgr_engine.errors import UsageError
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.search.device import DeviceSearch
from xgr_engine.search.host import HostSearch
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a model on the CPU, in Triton's interpreter")

LENGTHS = [3, 17, 32, 15]  # contexts that end inside a block, at its end, and one token before
LONGEST = max(LENGTHS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("tiny"))


def catalog_of(depths: np.ndarray, seed: int) -> TinyCatalog:
    rng = np.random.default_rng(seed)
    sids = {tuple(rng.integers(0, CODES, depth).tolist()) for depth in depths}
    return TinyCatalog.of(sorted(sids))


def found(outcome: Outcome, user: int) -> list[tuple[int, float]]:
    """(leaf, score) of one user, best first."""
    pairs = zip(outcome.leaf[user].tolist(), outcome.score[user].tolist(), strict=True)
    return sorted((pair for pair in pairs if pair[1] > -np.inf), key=lambda pair: (-pair[1], pair[0]))


def same(outcome: Outcome, expected: Outcome, users: int) -> None:
    assert bool(outcome.finite)
    for user in range(users):
        mine, theirs = found(outcome, user), found(expected, user)
        assert [leaf for leaf, _ in mine] == [leaf for leaf, _ in theirs]
        np.testing.assert_allclose([s for _, s in mine], [s for _, s in theirs], atol=2e-5)
        assert theirs


def nothing_dead(setup: SearchSetup, users: int) -> DeadNodes:
    return DeadNodes.none(len(setup.levels), users, setup.model.device)


def host_answer(setup: SearchSetup, rows_at_once: int = 0) -> Outcome:
    prompts = random_prompts(5, LENGTHS)
    pack = PackedPrompts.of(prompts, setup.model.device)
    cache = setup.model.new_cache(pack.cache_tokens, len(prompts), setup.slots)
    hidden = setup.model.prefill(pack, cache)
    return HostSearch(setup, rows_at_once).run(hidden, cache, nothing_dead(setup, len(prompts)))


def device_answer(search: DeviceSearch) -> Outcome:
    """Of a search of fixed shapes, in its second batch, with a place that holds nobody."""
    setup, users = search.setup, len(LENGTHS)
    cache = setup.model.new_cache(sum(LENGTHS), users + 1, setup.slots)
    present = torch.tensor([True] * users + [False])
    for seed in (6, 5):  # what the first batch leaves behind must not matter
        pack = PackedPrompts.of(random_prompts(seed, LENGTHS), setup.model.device)
        hidden = setup.model.prefill(pack, cache)
        hidden = torch.cat([hidden, torch.zeros_like(hidden[:1])])
        outcome = search.run(hidden, cache, nothing_dead(setup, users + 1), present)
    assert found(outcome, users) == []
    return outcome


def with_triton(model: DecoderOnly) -> DecoderOnly:
    """The same model, whose baselines take their Triton kernels (the engine's own steps stay plain torch)."""
    ops = replace(model.ops, name="triton")
    return DecoderOnly(model.spec, model.embed, model.norm, model.layers, ops)


def paged(model: DecoderOnly, beam: int, generated: int, reuse: bool) -> PagedDecoder:
    return PagedDecoder(model, beam=beam, generated=generated, longest_prompt=LONGEST, reuse=reuse)


@torch.inference_mode()
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("suffix", [(), (2, 1)])
@pytest.mark.parametrize("rows_at_once", [0, 4])
@pytest.mark.parametrize("mixed", [False, True])
def test_paged_on_the_host(world: TinyWorld, suffix: tuple, rows_at_once: int, mixed: bool) -> None:
    depths = np.random.default_rng(1).integers(1, 5, 90) if mixed else np.full(90, 4)
    catalog = catalog_of(depths, seed=1)
    setup = world.recommender(catalog, SearchOptions(beam=33, top_k=20), score_suffix=suffix).setup
    pages = replace(setup, model=paged(setup.model, 33, 3 + len(suffix), reuse=False))
    same(host_answer(pages, rows_at_once), host_answer(setup, rows_at_once), len(LENGTHS))


@torch.inference_mode()
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("suffix", [(), (2,)])
@pytest.mark.parametrize(("beam", "triton"), [(5, False), (33, False), (5, True)])
def test_paged_with_fixed_shapes(world: TinyWorld, suffix: tuple, beam: int, triton: bool) -> None:
    """W blocks for W beams, taken over by first children; dead rows and an absent user among them."""
    catalog = catalog_of(np.full(60, 4), seed=beam)
    setup = world.recommender(catalog, SearchOptions(beam=beam, top_k=beam), score_suffix=suffix).setup
    model = with_triton(setup.model) if triton else setup.model
    pages = replace(setup, model=paged(model, beam, 3 + len(suffix), reuse=True))
    same(device_answer(DeviceSearch(pages, len(LENGTHS) + 1)), host_answer(setup), len(LENGTHS))
    cache = pages.model.new_cache(100, 1, setup.slots)
    assert cache.tails == beam < setup.slots


@torch.inference_mode()
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize(("beam", "suffix", "over"), [(5, (), "vocab"), (13, (2,), "level"), (13, (), "allowed")])
def test_paper_forms(
    world: TinyWorld, triton: bool, early: bool, stages: bool, beam: int, suffix: tuple, over: str
) -> None:
    """Masks alone, and with the three stages and the re-ordering in place; more rows than there are prefixes."""
    catalog = catalog_of(np.full(60, 4), seed=beam)
    options = SearchOptions(beam=beam, top_k=beam, score_over=over)  # type: ignore[arg-type]
    setup = world.recommender(catalog, options, score_suffix=suffix).setup
    model = with_triton(world.model) if triton else world.model
    if stages:
        model = PaperDecoder(model, beam=beam, generated=3 + len(suffix))
    recommender = MaskedRecommender(
        model, world.head, catalog.trie, token_table(), options, score_suffix=suffix, early_termination=early
    )
    search = MaskedSearch(recommender.setup, len(LENGTHS) + 1, **recommender._search)
    same(device_answer(search), host_answer(setup), len(LENGTHS))
    assert search._forbidden.all(), "a batch must leave the masks as it found them"


@torch.inference_mode()
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("beam", "mixed"), [(5, False), (33, True)])
def test_full_sort(world: TinyWorld, beam: int, mixed: bool) -> None:
    """Early termination off: the same lists, and every candidate read."""
    depths = np.random.default_rng(2).integers(1, 5, 90) if mixed else np.full(90, 4)
    catalog = catalog_of(depths, seed=beam)
    setup = world.recommender(catalog, SearchOptions(beam=beam, top_k=beam)).setup
    search = SortedSearch(setup, len(LENGTHS) + 1)
    same(device_answer(search), host_answer(setup), len(LENGTHS))
    allowed, read = search.candidates_read()
    assert allowed == read > 0


@pytest.mark.parametrize("kind", ["paged", "paper", "masks"])
def test_through_the_recommender(world: TinyWorld, kind: str) -> None:
    """From prompts to items, on the CPU path: the engine's lists."""
    catalog = catalog_of(np.full(80, 3), seed=3)
    options = SearchOptions(beam=20, top_k=10)
    prompts, nothing = random_prompts(3, LENGTHS), [np.empty(0, np.int32)] * len(LENGTHS)
    expected = world.recommender(catalog, options).run(prompts, nothing)
    args = (world.head, catalog.trie, token_table(), options)
    if kind == "paged":
        recommender = Recommender(paged(world.model, 20, 2, reuse=False), *args)
    else:
        model = PaperDecoder(world.model, beam=20, generated=2) if kind == "paper" else world.model
        recommender = MaskedRecommender(model, *args, full_rows=kind == "paper")
    for _ in range(2):
        got = recommender.run(prompts, nothing)
        assert (got.leaves == expected.leaves).all()
        np.testing.assert_allclose(got.scores, expected.scores, atol=2e-5)


def test_masks_say_what_they_do_not_know(world: TinyWorld) -> None:
    mixed = TinyCatalog.of([(0, 1), (0, 1, 2)])
    options = SearchOptions(beam=4, top_k=2)
    with pytest.raises(UsageError, match="one length"):
        MaskedRecommender(world.model, world.head, mixed.trie, token_table(), options)
    even = TinyCatalog.of([(0, 1), (2, 2)])
    recommender = MaskedRecommender(world.model, world.head, even.trie, token_table(), options)
    with pytest.raises(UsageError, match="exclusions"):
        recommender.run(random_prompts(0, [4]), [np.array([0], np.int32)])


def test_a_wrong_table_is_seen(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: children that never get their parent's tail."""
    import xgr_engine.bench.baselines.paged as module

    honest = module._assign_tails

    def forgetful(parent, parent_tail, tails):
        tail, inherited = honest(parent, parent_tail, tails)
        return tail, torch.ones_like(inherited)

    monkeypatch.setattr(module, "_assign_tails", forgetful)
    with torch.inference_mode(), pytest.raises(AssertionError):
        catalog = catalog_of(np.full(60, 4), seed=33)
        setup = world.recommender(catalog, SearchOptions(beam=33, top_k=33)).setup
        pages = replace(setup, model=paged(setup.model, 33, 3, reuse=True))
        same(device_answer(DeviceSearch(pages, len(LENGTHS) + 1)), host_answer(setup), len(LENGTHS))

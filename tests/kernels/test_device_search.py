"""The search of fixed shapes against the one whose shapes follow the data: the same SIDs and scores."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from tiny import CODES, TOKENS, TinyCatalog, TinyWorld, random_prompts, token_table

from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import ScoreOver, SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.search.device import DeviceSearch
from xgr_engine.search.host import HostSearch
from xgr_engine.search.setup import DeadNodes
from xgr_engine.xbeam.exclusions import find_dead_nodes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("tiny"))


def best(outcome, user: int) -> list[tuple[int, float]]:
    """(leaf, score) of one user, best first."""
    found = [
        (int(leaf), float(score))
        for leaf, score in zip(outcome.leaf[user], outcome.score[user], strict=True)
        if score > -torch.inf
    ]
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("score_over", ["vocab", "allowed"])
@pytest.mark.parametrize("suffix", [(), (2, 1)])
@pytest.mark.parametrize("beam, top_k", [(5, 0), (33, 0), (33, 7)])
def test_fixed_shapes_find_the_same(
    world: TinyWorld, unequal: bool, score_over: str, suffix: tuple, beam: int, top_k: int
) -> None:
    rng = np.random.default_rng(beam)
    depths = rng.integers(1, 5, 90) if unequal else np.full(90, 3)
    catalog = TinyCatalog.of([tuple(rng.integers(0, CODES, depth).tolist()) for depth in depths])
    options = SearchOptions(beam=beam, top_k=top_k or beam, score_over=score_over)  # type: ignore[arg-type]
    setup = world.recommender(catalog, options, score_suffix=suffix).setup
    prompts = random_prompts(beam, [3, 17, 9])
    excluded = [rng.integers(0, 90, count).astype(np.int32) for count in (0, 40, 88)]
    dead = DeadNodes.of(find_dead_nodes(catalog.trie, [*excluded, np.empty(0, np.int32)])).to(world.model.device)
    device = DeviceSearch(setup, users=4)
    with torch.inference_mode():
        pack = PackedPrompts.of(prompts, world.model.device)
        cache = world.model.new_cache(pack.cache_tokens, 4, setup.slots)
        hidden = world.model.prefill(pack, cache)
        three = DeadNodes(tuple(t[:3].contiguous() for t in dead.inner), dead.leaves[:3].contiguous(), dead.root[:3])
        expected = HostSearch(setup, rows_at_once=0).run(hidden, cache, three)
        # a fourth place without a user
        four = torch.cat([hidden, torch.zeros_like(hidden[:1])])
        got = device.run(four, cache, dead, torch.tensor([True, True, True, False], device=hidden.device))
    assert bool(got.finite)
    for user in range(3):
        mine, theirs = (best(outcome, user)[: options.top_k] for outcome in (got, expected))
        assert [leaf for leaf, _ in mine] == [leaf for leaf, _ in theirs]
        np.testing.assert_allclose([s for _, s in mine], [s for _, s in theirs], atol=1e-5)
    assert best(got, 3) == []
    allowed, read = device.candidates_read()
    assert 0 < read <= allowed


def test_rows_of_one_user_are_stored_as_the_kernels_read_them(world: TinyWorld) -> None:
    """Kernels read positions and slots as plain arrays; for one user a flattened expansion would have stride 0."""
    catalog = TinyCatalog.of([(a, b, c) for a in range(4) for b in range(4) for c in range(2)])
    setup = world.recommender(catalog, SearchOptions(beam=8, top_k=8)).setup
    device = DeviceSearch(setup, users=1)
    seen = []
    decode = world.model.decode
    world.model.decode = lambda rows, cache: seen.append(rows) or decode(rows, cache)  # type: ignore[method-assign]
    try:
        with torch.inference_mode():
            pack = PackedPrompts.of(random_prompts(0, [5]), world.model.device)
            cache = world.model.new_cache(pack.cache_tokens, 1, setup.slots)
            hidden = world.model.prefill(pack, cache)
            device.run(
                hidden,
                cache,
                DeadNodes.none(3, 1, world.model.device),
                torch.ones(1, dtype=torch.bool, device=hidden.device),
            )
    finally:
        world.model.decode = decode  # type: ignore[method-assign]
    assert len(seen) == 2
    for rows in seen:
        assert rows.position.is_contiguous() and rows.slots.is_contiguous() and rows.tokens.is_contiguous()


@pytest.mark.parametrize("score_over", ["vocab", "level", "allowed"])
@pytest.mark.parametrize("broken", [None, 0, 1])
def test_a_broken_code_is_seen(world: TinyWorld, score_over: ScoreOver, broken: int | None) -> None:
    """A NaN in a code's row of the head, with a dead place beside the user's."""
    head = world.head.clone()
    if broken is not None:
        head[TOKENS[broken][2]] = torch.nan
    catalog = TinyCatalog.of([(a, b) for a in (0, 2, 3) for b in (1, 2, 4)])
    options = SearchOptions(beam=9, top_k=3, score_over=score_over)
    setup = Recommender(world.model, head, catalog.trie, token_table(), options).setup
    with torch.inference_mode():
        pack = PackedPrompts.of(random_prompts(0, [5]), world.model.device)
        cache = world.model.new_cache(pack.cache_tokens, 2, setup.slots)
        hidden = world.model.prefill(pack, cache)
        outcome = DeviceSearch(setup, users=2).run(
            torch.cat([hidden, torch.full_like(hidden, torch.nan)]),
            cache,
            DeadNodes.none(2, 2, world.model.device),
            torch.tensor([True, False], device=hidden.device),
        )
    assert bool(outcome.finite) == (broken is None)

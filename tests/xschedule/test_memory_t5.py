"""The memory plan of a T5 against what a batch really holds at its peak, on a CPU, counted allocation by allocation."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from t5_tiny import TINY_T5, TinyT5
from tiny import CODES, TinyCatalog, random_prompts

from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.xschedule.memory import cost_model

WIDE = dataclasses.replace(TINY_T5, hidden_size=64, num_heads=4, head_dim=32, intermediate_size=128, max_context=512)


def peak_bytes(recommender: Recommender, prompts: list[np.ndarray]) -> int:
    """Most bytes of tensors at once during a batch, beside what was there before."""
    from torch.profiler import ProfilerActivity, profile

    nothing = [np.empty(0, np.int32)] * len(prompts)
    recommender.run(prompts, nothing)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        recommender.run(prompts, nothing)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert len(changes) > 100
    return int(np.cumsum(changes).max())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("lengths", "beam", "suffix"),
    [
        ([500], 4, ()),  # a long prompt alone: the bias
        ([12] * 200, 4, ()),  # many tokens, few rows: the encoder
        ([1] * 16, 128, ()),  # rows: the decoder
        ([40, 3, 17, 25] * 8, 64, (2, 1)),  # all of it, several lengths
        ([300] * 2, 128, ()),  # cross attention
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the host's allocations")
def test_the_plan_is_not_below_the_peak(
    tmp_path: Path, gated: bool, lengths: list[int], beam: int, suffix: tuple[int, ...]
) -> None:
    spec = dataclasses.replace(WIDE, gated=gated)
    rng = np.random.default_rng(0)
    catalog = TinyCatalog.of([tuple(sid) for sid in rng.integers(0, CODES, (600, 4)).tolist()])
    options = SearchOptions(beam=beam, top_k=4)
    recommender = TinyT5(tmp_path, spec).recommender(catalog, options, score_suffix=suffix)
    plan = cost_model(spec, catalog.trie, options, len(suffix), 4)
    whole = plan.of_batch(sum(lengths), len(lengths))
    bias = spec.num_heads * 4 * max(lengths) ** 2  # the plan has that of the longest prompt there may be
    peak = peak_bytes(recommender, random_prompts(0, lengths))
    assert peak <= whole
    assert whole - plan.fixed + bias < 4 * peak  # nor so far above that batches would be small for nothing


def test_a_start_token_of_each_user_is_counted() -> None:
    catalog = TinyCatalog.of([(a, b) for a in range(CODES) for b in range(CODES)])
    for beam in (1, 4):
        cost = cost_model(TINY_T5, catalog.trie, SearchOptions(beam=beam, top_k=1), 0, 4)
        kv = 2 * TINY_T5.num_layers * TINY_T5.num_heads * TINY_T5.head_dim * 4
        candidates = CODES + beam * CODES
        assert cost.per_user == kv * (beam + 1) + 32 * candidates

"""Answers are judged against the definition: what rounding may do to a list is accepted, nothing else is.

The definition itself is checked against sums of log-probabilities that come from whole sequences, without any cache,
and a beam search over them in a few lines of Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from bench_support import ranked, tiny_workload

from xgr_engine.bench.baselines.base import RankedSids
from xgr_engine.bench.baselines.engine import Xgr
from xgr_engine.bench.definition import Truth, UserSearch, find_truths
from xgr_engine.bench.parity import Parity, compare, judge, leaves_of
from xgr_engine.bench.prefix_scores import exact_setup
from xgr_engine.bench.tolerance import FLOAT32, NO_ROUNDING, Tolerance
from xgr_engine.bench.workloads import Batch, Workload, synthetic_catalog
from xgr_engine.catalog.trie import build_trie
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import ScoreOver

Prefix = tuple[int, ...]
Scores = dict[Prefix, float]
Noise = Callable[[Prefix], float]
BEAM, TOP_K = 9, 7


def quiet(prefix: Prefix) -> float:
    """No rounding at all."""
    return 0.0


@functools.cache
def workload() -> Workload:
    """90 SIDs of 3 x 7 codes: 49 prefixes of two codes, of which 9 survive."""
    return tiny_workload(beam=BEAM, top_k=TOP_K)


@functools.cache
def ragged() -> Workload:
    """SIDs of one, two and three codes, some of them prefixes of others, and a score suffix of two tokens."""
    full = tiny_workload(beam=6, top_k=5)
    codes = synthetic_catalog(60, 7, 3).sids.copy()
    codes[::4, 2] = -1
    codes[::9, 1:] = -1
    trie, _ = build_trie(np.unique(codes, axis=0))
    catalog = replace(full.catalog, trie=trie, sids=trie.leaf_codes())
    return replace(full, model=replace(full.model, score_suffix=(3, 5)), catalog=catalog)


def path_scores(work: Workload, prompt: np.ndarray) -> tuple[Scores, Scores]:
    """Every prefix's score, and every SID's with the score suffix; each from whole sequences through the model."""
    model = work.model
    sids = [tuple(int(code) for code in row if code >= 0) for row in work.catalog.sids]
    prefixes = sorted({sid[:depth] for sid in sids for depth in range(1, len(sid) + 1)})
    first = [int(ids[0]) for ids in model.table.token_ids]

    @functools.cache
    def log_p(tokens: tuple[int, ...]) -> np.ndarray:
        ids = np.concatenate([prompt, np.array(tokens, np.int32)]).astype(np.int32)
        pack = PackedPrompts.of([ids], model.device)
        hidden = model.decoder.prefill(pack, model.decoder.new_cache(len(ids), 1, 1))
        return torch.log_softmax(hidden.float() @ model.head.float().T, -1)[0].numpy()

    def score(tokens: tuple[int, ...]) -> float:
        return float(sum(log_p(tokens[:at])[token] for at, token in enumerate(tokens)))

    tokens = {prefix: tuple(code + first[level] for level, code in enumerate(prefix)) for prefix in prefixes}
    return (
        {prefix: score(tokens[prefix]) for prefix in prefixes},
        {sid: score(tokens[sid] + model.score_suffix) for sid in sids},
    )


@functools.cache
def scores_of(which: str) -> tuple[Workload, np.ndarray, Scores, Scores]:
    narrow = functools.partial(tiny_workload, beam=4, top_k=4)
    work = {"uniform": workload, "ragged": ragged, "narrow": narrow}[which]()
    prompt = work.batch(0).prompts[0]
    return work, prompt, *path_scores(work, prompt)


def beam_search(work: Workload, prefixes: Scores, sids: Scores, noise: Noise, widths: dict[int, int]) -> RankedSids:
    """Beam search over given scores, each moved by ``noise``; ``widths`` may change W at a depth."""
    beam, pool = work.search.beam, []
    noisy = {prefix: score + noise(prefix) for prefix, score in prefixes.items()}
    rows: set[Prefix] = {()}
    for depth in range(1, work.catalog.trie.levels + 1):
        children = [prefix for prefix in noisy if len(prefix) == depth and prefix[:-1] in rows]
        best = sorted(children, key=lambda prefix: (-noisy[prefix], prefix))
        pool += [prefix for prefix in best if prefix in sids]
        inner = {prefix[:depth] for prefix in noisy if len(prefix) > depth}
        rows = set([prefix for prefix in best if prefix in inner][: widths.get(depth, beam)])
    pool = sorted(pool, key=lambda sid: (-noisy[sid], sid))[:beam]
    final = {sid: sids[sid] + noise(sid) for sid in pool}
    order = sorted(final, key=lambda sid: (-final[sid], sid))[: work.search.top_k]
    padded = [list(sid) + [-1] * (work.catalog.trie.levels - len(sid)) for sid in order]
    return ranked((padded, [final[sid] for sid in order]))


def searched(which: str, noise: Noise = quiet, widths: dict[int, int] | None = None) -> RankedSids:
    work, _, prefixes, sids = scores_of(which)
    return beam_search(work, prefixes, sids, noise, widths or {})


def judged(which: str, answer: RankedSids, tolerance: Tolerance = FLOAT32) -> Parity:
    """One user's answer, with a tolerance that may be wider than float32's."""
    work, *_ = scores_of(which)
    return compare(answer, [truth(which, answer, tolerance)], work.catalog.trie, work.top_k)


def truth(which: str, answer: RankedSids, tolerance: Tolerance) -> Truth:
    work, prompt, *_ = scores_of(which)
    leaves = leaves_of(work.catalog.trie, answer.codes[0])
    return UserSearch(exact_setup(work), work, prompt, leaves[leaves >= 0]).run(tolerance)


@pytest.mark.parametrize("which", ["uniform", "ragged"])
def test_the_definition_is_beam_search_over_exact_scores(which: str) -> None:
    work, _, _, sids = scores_of(which)
    expected = searched(which)
    all_leaves = np.arange(work.catalog.trie.num_leaves)
    found = truth(which, RankedSids([work.catalog.sids], [np.zeros(len(all_leaves), np.float32)]), FLOAT32)
    assert work.catalog.sids[found.leaves].tolist() == expected.codes[0].tolist()
    assert found.scores == pytest.approx(expected.scores[0], abs=1e-4)
    for leaf in all_leaves.tolist():  # those that no search meets have a score as well
        sid = tuple(int(code) for code in work.catalog.sids[leaf] if code >= 0)
        assert found.known[leaf] == pytest.approx(sids[sid], abs=1e-4)


@pytest.mark.parametrize("which", ["uniform", "ragged"])
def test_margins_are_the_distances_to_what_each_cut_left_out(which: str) -> None:
    """With no tolerance: at each level the prefix against the best that did not survive, and the SID likewise."""
    work, _, prefixes, sids = scores_of(which)
    beam, depths = work.search.beam, range(1, work.catalog.trie.levels + 1)
    left_out, rows = {}, {()}
    finished: list[Prefix] = []
    for depth in depths:
        children = [prefix for prefix in prefixes if len(prefix) == depth and prefix[:-1] in rows]
        inner = sorted((p for p in children if any(q[:depth] == p and q != p for q in prefixes)), key=prefixes.get)
        inner.reverse()
        finished += [prefix for prefix in children if prefix in sids]
        rows = set(inner[:beam])
        left_out[depth] = prefixes[inner[beam]] if len(inner) > beam else -np.inf
    finished.sort(key=prefixes.get, reverse=True)  # type: ignore[arg-type]
    pool, beyond = finished[:beam], prefixes[finished[beam]] if len(finished) > beam else -np.inf
    last = sorted((sids[sid] for sid in pool), reverse=True)
    end = last[work.top_k] if len(last) > work.top_k else -np.inf
    found = truth(which, searched(which), NO_ROUNDING)
    for leaf, margin in zip(found.leaves.tolist(), found.margins.tolist(), strict=True):
        sid = tuple(int(code) for code in work.catalog.sids[leaf] if code >= 0)
        cuts = [prefixes[sid[:depth]] - left_out[depth] for depth in range(1, len(sid))]
        pooled = [prefixes[sid] - beyond] if work.model.score_suffix else []
        assert margin == pytest.approx(min([*cuts, *pooled, sids[sid] - end]), abs=1e-4)


@pytest.mark.parametrize("which", ["uniform", "ragged"])
@pytest.mark.parametrize("size", [5e-4, 0.05, 0.3])
def test_scores_blurred_within_the_tolerance_are_never_wrong(which: str, size: float) -> None:
    """Each prefix moved by its own error of up to the tolerance: whatever list comes out of it is accepted."""
    changed = 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        errors: dict[Prefix, float] = {}

        def noise(prefix: Prefix, errors: dict[Prefix, float] = errors, draw: np.random.Generator = generator) -> float:
            # the ends of the interval are the worst case
            return errors.setdefault(prefix, float(draw.choice([-0.99, 0.99]) * size))

        answer = searched(which, noise)
        assert judged(which, answer, Tolerance(size)).marks == []
        changed += answer.codes[0].tolist() != searched(which).codes[0].tolist()
    assert changed or size < 0.01


@pytest.mark.parametrize("which", ["uniform", "ragged"])
def test_scores_blurred_by_more_are_wrong(which: str) -> None:
    wrong = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        answer = searched(which, lambda prefix, draw=generator: float(draw.normal(0, 0.5)))  # type: ignore[misc]
        wrong += bool(judged(which, answer, Tolerance(0.02)).marks)
    assert wrong == 20


def test_an_item_lost_at_a_cut_of_its_prefix_is_accepted_within_rounding_only() -> None:
    """A clear item whose prefix of two codes is moved just below the last that survives."""
    _, _, prefixes, _ = scores_of("uniform")
    plain = searched("uniform")
    lists = [tuple(codes) for codes in plain.codes[0].tolist()]
    survivors = sorted((score for prefix, score in prefixes.items() if len(prefix) == 2), reverse=True)
    first_out = survivors[BEAM]  # all prefixes of one code survive, so every pair is a candidate
    victim = min((sid for sid in lists[:-1]), key=lambda sid: prefixes[sid[:2]])
    gap = prefixes[victim[:2]] - first_out
    size = 0.51 * gap

    def noise(prefix: Prefix) -> float:
        return 0.0 if len(prefix) != 2 else -size if prefix == victim[:2] else size

    answer = searched("uniform", noise)
    assert list(victim) not in answer.codes[0].tolist()
    assert prefixes[victim] > plain.scores[0][-1]  # its own score is well inside the list
    assert judged("uniform", answer, Tolerance(size * 1.01)).marks == []
    found = judged("uniform", answer, Tolerance(size / 4))
    assert "1 missing" in found.marks
    assert found.overlap < 1


def test_a_swapped_item_is_wrong_though_its_score_is_right() -> None:
    _, _, _, sids = scores_of("uniform")
    answer = searched("uniform")
    other = next(sid for sid in sids if list(sid) not in answer.codes[0].tolist())
    codes, scores = answer.codes[0].copy(), answer.scores[0].copy()
    codes[2], scores[2] = other, sids[other]
    found = judged("uniform", RankedSids([codes], [scores]))
    assert found.missing == 1
    assert found.impossible == 1
    assert found.wrong_scores == 0
    assert found.marks == ["1 missing", "1 that do not belong", "4 out of order"]  # it belongs behind these four


@pytest.mark.parametrize("widths", [{2: 2}, {1: 10, 2: 100}])
def test_another_cut_is_wrong(widths: dict[int, int]) -> None:
    """Too narrow a level loses what should be there; without any cut there is what should not be."""
    found = judged("narrow", searched("narrow", widths=widths))
    assert found.wrong_scores == found.short == 0
    assert found.missing
    assert found.impossible
    assert judged("narrow", searched("narrow")).marks == []


def test_wrong_scores_are_wrong_in_and_outside_the_list() -> None:
    answer = searched("uniform")
    for shift, faults in ((2e-4, 0), (1e-3, TOP_K)):
        moved = RankedSids(answer.codes, [answer.scores[0] + np.float32(shift)])
        found = judged("uniform", moved)
        assert found.wrong_scores == faults
        assert found.score_difference == pytest.approx(shift, rel=0.2)
    nothing = RankedSids(answer.codes, [np.full_like(answer.scores[0], np.nan)])
    assert judged("uniform", nothing).wrong_scores == TOP_K
    # a SID that is in nobody's list, within a tolerance that lets it in: its own score decides
    _, _, _, sids = scores_of("uniform")
    other = next(sid for sid in sids if list(sid) not in answer.codes[0].tolist())
    codes, scores = answer.codes[0].copy(), answer.scores[0].copy()
    codes[-1], scores[-1] = other, sids[other] + 21.0
    loose = judged("uniform", RankedSids([codes], [scores]), Tolerance(20.0))
    assert loose.marks == ["1 wrong scores"]


def test_a_list_that_is_not_ranked_is_wrong_though_all_in_it_is_right() -> None:
    answer = searched("uniform")
    order = [0, *range(2, TOP_K), 1]
    moved = RankedSids([answer.codes[0][order]], [answer.scores[0][order]])
    assert judged("uniform", moved).marks == ["1 out of order"]
    assert judged("uniform", moved, Tolerance(20.0)).marks == []  # within rounding


def test_top1_counts_only_beyond_rounding() -> None:
    answer = searched("uniform")
    order = [1, 0, *range(2, TOP_K)]
    swapped = RankedSids([answer.codes[0][order]], [answer.scores[0][order]])
    gap = float(answer.scores[0][0] - answer.scores[0][1])
    near = judged("uniform", swapped, Tolerance(gap * 0.51))
    assert (near.top1, near.wrong_top1, near.marks) == (0.0, 0, [])
    far = judged("uniform", swapped)
    assert (far.top1, far.wrong_top1, far.marks) == (0.0, 1, ["1 out of order", "1 wrong top-1"])


def test_parity_counts_invalid_duplicate_and_short() -> None:
    """cases.md: repeats and fillers in the output of others."""
    work = replace(workload(), search=replace(workload().search, top_k=3))
    batch = work.batch(0, 1)
    first = judge(work, batch, {}).facts
    assert first["sids"] == 3
    best = find_truths(work, batch.prompts, [np.empty(0, np.int64)])[0]
    good = [row.tolist() for row in work.catalog.sids[best.leaves]]
    right = ranked((good, best.scores.tolist()))
    wrong = ranked(
        ([good[0], good[0], [7, 0, 0], [-2, 1, 1]], [best.scores[0], best.scores[0], -2.0, -3.0]),
    )
    found = judge(work, batch, {"right": right, "wrong": wrong}).parity
    assert found["right"].marks == []
    assert found["right"].overlap == found["right"].top1 == 1.0
    assert (found["wrong"].invalid, found["wrong"].duplicate, found["wrong"].short) == (2, 1, 1)
    assert found["wrong"].overlap == pytest.approx(1 / 3)
    assert found["wrong"].marks == ["2 invalid", "1 repeated", "1 short", "2 missing"]


def test_a_tie_at_the_end_of_the_list_is_no_fault() -> None:
    """Exactly equal scores: nobody's choice is wrong, so neither SID has to be there and both may."""
    near = Truth(np.array([0, 1]), np.float32([-1, -2]), np.float32([1, 0]), {0: -1.0, 1: -2.0, 2: -2.0},
                 np.array([0, 1, 2]), FLOAT32)  # fmt: skip
    catalog = workload().catalog
    first, _, third = (row.tolist() for row in catalog.sids[:3])
    found = compare(ranked(([first, third], [-1.0, -2.0])), [near], catalog.trie, 2)
    assert found.overlap == 0.5
    assert found.marks == []


def test_half_precision_is_measured_and_not_guessed() -> None:
    """The tolerance of a bfloat16 model is 2.5 times what plain torch in bfloat16 deviates, and at least 0.05."""
    assert Tolerance.half_precision(0.01, 0.9) == Tolerance(0.05, 0.01, 0.9)
    assert Tolerance.half_precision(0.2, 0.9).score == pytest.approx(0.5)
    assert FLOAT32.difference == pytest.approx(1e-3)
    work = workload()
    model = work.model
    layers = [
        replace(layer, **{name: value.bfloat16() for name, value in vars(layer).items() if value is not None})
        for layer in model.decoder.layers
    ]
    decoder = type(model.decoder)(
        model.spec, model.decoder.embed.bfloat16(), model.decoder.norm.bfloat16(), layers, model.decoder.ops
    )
    half = replace(work, model=replace(model, decoder=decoder, head=model.head.bfloat16()))
    batch = Batch(half.batch(0).prompts)
    found = judge(half, batch, {})
    assert found.facts["dtype"] == "bfloat16"
    assert 0 < found.facts["measured_noise"] < 0.5
    assert 0 < found.facts["plain_overlap"] <= 1
    assert found.facts["score_tolerance"] == max(0.05, 2.5 * found.facts["measured_noise"])


def test_a_list_that_lost_more_than_rounding_loses_is_wrong_though_no_sid_is_certain() -> None:
    """Noise in which every SID drowns: single ones prove nothing, the share that is missing does."""
    noisy = Tolerance(5.0, 2.0, overlap=0.9)
    assert noisy.least_overlap == pytest.approx(0.7)
    assert FLOAT32.least_overlap is None
    _, _, _, sids = scores_of("uniform")
    answer = searched("uniform")
    others = [sid for sid in sids if list(sid) not in answer.codes[0].tolist()]
    for swapped, marks in ((2, []), (3, ["overlap under 70%"])):
        codes, scores = answer.codes[0].copy(), answer.scores[0].copy()
        codes[-swapped:], scores[-swapped:] = others[:swapped], [sids[sid] for sid in others[:swapped]]
        found = judged("uniform", RankedSids([codes], [scores]), noisy)
        assert found.certain == 0
        assert found.marks == marks


def test_too_many_possible_rows_leave_nothing_to_be_said() -> None:
    """With a tolerance in which everything drowns, lists are not judged; their scores still are."""
    work = tiny_workload(beam=2, top_k=2)
    prompt = work.batch(0).prompts[0]
    found = UserSearch(exact_setup(work), work, prompt, np.array([0, 1])).run(Tolerance(50.0))
    assert found.possible is None
    assert not found.certain.any()
    any_two = RankedSids([work.catalog.sids[:2]], [np.float32([found.known[0], found.known[1]])])
    parity = compare(any_two, [found], work.catalog.trie, 2)
    assert parity.marks == []
    assert parity.certain == 0


@pytest.mark.parametrize("over", ["vocab", "level", "allowed"])
@pytest.mark.parametrize("make", [workload, ragged])
def test_the_engine_agrees_in_every_score_mode(over: ScoreOver, make: Callable[[], Workload]) -> None:
    """SIDs of several lengths, a score suffix, and softmax over less than the vocabulary."""
    work = make()
    work = replace(work, search=replace(work.search, score_over=over))
    engine = Xgr()
    engine.prepare(work)
    batch = work.batch(0)
    found = judge(work, batch, {"xgr": engine.run(batch)}).parity["xgr"]
    assert found.marks == []
    assert found.overlap == 1.0
    assert found.certain > 0.8 * found.sids

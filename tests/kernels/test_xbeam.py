"""Selection on the device against the plain torch definition, and against sorting everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xgr_engine.catalog.trie import ItemTrie, build_trie
from xgr_engine.xbeam import reference, triton
from xgr_engine.xbeam.exclusions import find_dead_nodes
from xgr_engine.xbeam.state import Beams, TrieLevel, upload_trie

CODES = 40


def random_trie(rng: np.random.Generator, items: int, codes: int, *, unequal: bool) -> ItemTrie:
    sids = rng.integers(0, codes, (items, 3), dtype=np.int32)
    if unequal:
        sids[rng.random(items) < 0.2, 2] = -1
        sids[rng.random(items) < 0.1, 1:] = -1
    return build_trie(sids)[0]


def walk(trie: ItemTrie, device: str, excluded: list[np.ndarray], width: int, *, mode: str, ties: bool, seed: int):
    """Both implementations down the trie; yields (reference, device) pairs of beams and of finished SIDs."""
    columns = tuple(np.asarray(codes, np.int32) for codes in trie.codes)
    levels = upload_trie(trie, columns, torch.device(device))
    exclusions = find_dead_nodes(trie, excluded)
    dead_leaves = torch.from_numpy(exclusions.leaves).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    beams = Beams.root(len(excluded), torch.device(device))
    mine = beams
    for depth, level in enumerate(levels):
        dead_inner = torch.from_numpy(exclusions.inner[depth]).to(device)
        users, rows = beams.node.shape
        if rows == 0:
            return
        logits = 2 * torch.randn(users * rows, CODES, generator=generator, device=device)
        if ties:
            logits = logits.round().mul_(0.5)
        scored = reference.ScoredRows(beams)
        everyone = torch.ones_like(beams.alive)
        normaliser = None if mode == "allowed" else torch.logsumexp(logits, -1)
        scored.add(everyone, logits, normaliser)
        candidates = reference.list_candidates(beams, level)
        open_, leaf = reference.live_candidates(candidates, level, dead_inner, dead_leaves)
        scores = reference.score_candidates(candidates, beams, level, scored, open_ | leaf)
        work = triton.Workspace.allocate(
            users, rows, width, triton.candidate_capacity(level, rows), torch.device(device)
        )
        poison(work)
        index = scored.index if mode == "index" else None
        step = triton.Step(mine, level, triton.Logits(logits, normaliser, index), dead_inner, dead_leaves, work)
        norm = step.expand()
        if level.leaf is not None:
            place, score = reference.select_top(scores.masked_fill(~leaf, -torch.inf), width)
            yield live(candidates.child.gather(1, place), score), live_of(step.select(norm, width, leaves=True))
        keep = min(width, level.inner_count)
        if level.inner is None or keep == 0:
            return
        expected = reference.next_beams(candidates, scores, open_, beams, level, width)
        found = step.select(norm, keep, leaves=False, own_slot=100 * depth)
        assert found.node.shape == (users, keep)
        yield live_of(expected), live_of(found)
        check_rows(expected, found, level, 100 * depth)
        beams, mine = found, found


def poison(work: triton.Workspace) -> None:
    for name, value in vars(work).items():
        if name != "read":
            value.fill_(torch.nan if value.is_floating_point() else -123456)


def live(node: torch.Tensor, score: torch.Tensor) -> list[list[tuple[int, float]]]:
    """Per user the living (node, score), in order. Scores as bits would have them."""
    return [
        [(int(n), float(s)) for n, s in zip(ns, ss, strict=True) if s > -torch.inf]
        for ns, ss in zip(node.tolist(), score.tolist(), strict=True)
    ]


def live_of(beams: Beams) -> list[list[tuple[int, float]]]:
    return live(beams.node, beams.score)


def check_rows(expected: Beams, found: Beams, level: TrieLevel, own_slot: int) -> None:
    """Columns and ancestors of living rows; dead rows in range."""
    for u in range(len(found.node)):
        lines = [i for i in range(expected.node.shape[1]) if expected.score[u, i] > -torch.inf]
        count = len(lines)
        assert found.column[u, :count].tolist() == expected.column[u, lines].tolist()
        assert found.ancestors[u, :count, :-1].tolist() == expected.ancestors[u, lines].tolist()
        rows = found.node.shape[1]
        assert found.ancestors[u, :, -1].tolist() == list(range(own_slot, own_slot + rows))
        assert (found.score[u, count:] == -torch.inf).all()
        assert (found.node[u, count:] == 0).all()
        assert (found.column[u, count:] == level.column[0]).all()


CASES = [
    # items, codes, width, unequal depths, mode
    (5, 4, 16, False, "vocab"),
    (300, 12, 7, False, "vocab"),
    (2000, 40, 33, False, "index"),
    (3000, 20, 127, True, "vocab"),
    (1000, 20, 20, True, "allowed"),
    (400, 40, 1, False, "allowed"),
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("items", "codes", "width", "unequal", "mode"), CASES)
def test_equals_the_reference(device, items, codes, width, unequal, mode, ties):
    rng = np.random.default_rng(items + width)
    trie = random_trie(rng, items, codes, unequal=unequal)
    excluded = [rng.integers(0, trie.num_items, n).astype(np.int32) for n in (0, trie.num_items // 3, 3)]
    steps = 0
    for expected, found in walk(trie, device, excluded, width, mode=mode, ties=ties, seed=width):
        assert [[n for n, _ in user] for user in found] == [[n for n, _ in user] for user in expected]
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a[1] == pytest.approx(b[1], abs=2e-6 if mode == "allowed" else 0)
        steps += 1
    assert steps >= 2


def one_level(device: str, scores: torch.Tensor, k: int) -> tuple[list[int], triton.Workspace]:
    """Selection alone: one root whose children have the given log-probabilities."""
    n = len(scores)
    none = torch.zeros(1, 0, dtype=torch.int32, device=device)
    level = TrieLevel(
        child_start=torch.tensor([0, n], dtype=torch.int32, device=device),
        column=torch.arange(n, dtype=torch.int32, device=device),
        leaf=None,
        inner=torch.ones(n, dtype=torch.bool, device=device),
        inner_count=n,
        all_leaves=False,
        all_inner=True,
    )
    work = triton.Workspace.allocate(1, 1, k, n, torch.device(device))
    poison(work)
    logits = triton.Logits(scores.to(device).reshape(1, n), torch.zeros(1, device=device))
    step = triton.Step(Beams.root(1, torch.device(device)), level, logits, none, none, work)
    chosen = step.select(step.expand(), k, leaves=False)
    alive = chosen.score[0] > -torch.inf
    assert torch.equal(chosen.score[0][alive].cpu(), scores[chosen.node[0][alive].cpu()])
    return chosen.node[0][alive].tolist(), work


def sorted_top(scores: torch.Tensor, k: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return sorted(i for i in order[:k] if scores[i] > -torch.inf)


@pytest.mark.parametrize("k", [1, 33, 512])
@pytest.mark.parametrize("kind", ["spread", "all equal", "two values", "tiny gaps", "ascending", "dead"])
def test_equals_a_full_sort(device, kind, k):
    rng = torch.Generator().manual_seed(k)
    n = 3000
    scores = -10 * torch.rand(n, generator=rng)
    if kind == "all equal":  # a model with a zero head: order by SID
        scores = torch.full((n,), -3.0)
    elif kind == "two values":
        scores = torch.where(torch.rand(n, generator=rng) < 0.02, -1.0, -2.0)
    elif kind == "tiny gaps":  # neighbours in float32
        scores = torch.tensor(-20.0).expand(n) + torch.randint(0, 200, (n,), generator=rng) * 2.0**-19
    elif kind == "ascending":
        scores = scores.sort().values
    elif kind == "dead":
        scores = scores.masked_fill(torch.rand(n, generator=rng) < 0.95, -torch.inf)
    found, _ = one_level(device, scores, k)
    assert found == sorted_top(scores, k)


def test_zero_and_minus_zero_tie(device):
    scores = torch.tensor([-1.0, -0.0, 0.0, -0.0] * 20)
    assert one_level(device, scores, 3)[0] == [1, 2, 3]


def test_early_termination_reads_a_part(device):
    """Candidates read against candidates allowed: peaked scores leave most blocks unread."""
    scores = -torch.rand(50_000, generator=torch.Generator().manual_seed(0)) - 5
    scores[20_000:20_100] += 5
    found, work = one_level(device, scores, 64)
    allowed, read = work.read[0].tolist()
    assert allowed == len(scores)
    assert read < allowed / 10
    assert found == sorted_top(scores, 64)


def test_a_not_a_number_is_never_chosen(device):
    scores = torch.tensor([-1.0, torch.nan, -2.0, torch.nan, -3.0])
    assert one_level(device, scores, 5)[0] == [0, 2, 4]

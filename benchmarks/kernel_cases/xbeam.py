"""Scoring over the vocabulary and selection among a trie's children: right first, then how long a level takes."""

from __future__ import annotations

import torch
from timing import graph_ms
from torch import Tensor

from xgr_engine.kernels import reference as plain
from xgr_engine.kernels import triton as fused
from xgr_engine.xbeam import reference, triton
from xgr_engine.xbeam.state import Beams, TrieLevel

Rows = list[dict[str, object]]


def run(limits: dict[str, float], quick: bool) -> tuple[Rows, int]:
    """Both parts. Returns the rows and how many results were wrong."""
    rows: Rows = []
    wrong = _logsumexp(rows, limits, quick) + _selection(rows, quick)
    return rows, wrong


def _logsumexp(rows: Rows, limits: dict[str, float], quick: bool) -> int:
    wrong = 0
    for width, count in (
        [(2048, 2048)] if quick else [(2048, 2048), (2048, 4096), (2048, 384), (1024, 2048), (2560, 2048)]
    ):
        vocabulary = 151936
        hidden = torch.randn(count, width, device="cuda", dtype=torch.bfloat16)
        weight = (0.02 * torch.randn(vocabulary, width, device="cuda")).bfloat16()
        sample = slice(0, count, max(1, count // 64))
        expected = plain.vocabulary_logsumexp(hidden[sample].double(), weight.double())
        flops = 2.0 * count * vocabulary * width
        floor = max(flops / limits["matmul_tflops"] / 1e9, 2.0 * vocabulary * width / limits["copy_tbs"] / 1e9)

        def call(h: Tensor = hidden, w: Tensor = weight) -> Tensor:
            return fused.vocabulary_logsumexp(h, w)

        error = float((call()[sample].double() - expected).abs().max())
        row = {"kernel": "vocabulary_logsumexp", "rows": count, "width": width, "variant": "fused", "error": error}
        rows.append(row)
        if error < 1e-4:
            row["ms"], row["floor_ms"] = graph_ms([call]), floor
            print(f"  logsumexp {count} rows x {width}: {row['ms']:.3f} ms, floor {floor:.3f}", flush=True)
        else:
            wrong += 1
            print(f"WRONG logsumexp {count} x {width}: {error:.2e}", flush=True)
        matmul = graph_ms([lambda h=hidden, w=weight: h @ w.T])  # type: ignore[misc]
        rows.append({"kernel": "cublas bf16 logits", "rows": count, "width": width, "ms": matmul})
        print(f"logsumexp {count} rows x {width}: bf16 product alone {matmul:.3f} ms", flush=True)
    return wrong


def _level(parents: int, children: int, codes: int, leaves: bool) -> TrieLevel:
    """A random level: about ``children`` a node, ascending codes below each."""
    g = torch.Generator("cuda").manual_seed(children)
    mean = children / parents
    spread = torch.rand(parents, generator=g, device="cuda") + 0.5
    count = (mean * spread).round().clamp(1, codes).int()
    start = torch.zeros(parents + 1, dtype=torch.int32, device="cuda")
    start[1:] = count.cumsum(0)
    total = int(start[-1])
    owner = torch.repeat_interleave(torch.arange(parents, device="cuda"), count)
    inside = torch.arange(total, device="cuda") - start[owner]
    column = (inside * codes // count[owner]).int()
    flags = torch.ones(total, dtype=torch.bool, device="cuda")
    numbers = torch.arange(total, dtype=torch.int32, device="cuda")
    return TrieLevel(
        start,
        column,
        numbers if leaves else None,
        None if leaves else flags,
        0 if leaves else total,
        leaves,
        not leaves,
    )


def _beams(level: TrieLevel, users: int, width: int, own: int) -> Beams:
    """``width`` random nodes a user, in node order, scores spread as after a level of a real search."""
    g = torch.Generator("cuda").manual_seed(width)
    nodes = len(level.child_start) - 1
    node = torch.stack([torch.randperm(nodes, generator=g, device="cuda")[:width].sort().values for _ in range(users)])
    score = -3 - 4 * torch.rand(users, width, generator=g, device="cuda")
    ancestors = torch.zeros(users, width, own, dtype=torch.int32, device="cuda")
    return Beams(node=node, score=score, column=torch.zeros_like(node), ancestors=ancestors)


def _selection(rows: Rows, quick: bool) -> int:
    users, width, codes, wrong = 8, 512, 8192, 0
    none = torch.zeros(users, 0, dtype=torch.int32, device="cuda")
    seen = torch.sort(torch.randint(0, 10_000, (users, 50), device="cuda", dtype=torch.int32)).values
    for items in (10**6,) if quick else (10**4, 10**6, 10**7):
        pairs = min(items, codes * codes // 8)
        shapes = [
            ("root", _level(1, codes, codes, False), 1, 0),
            ("middle", _level(codes, pairs, codes, False), min(width, codes), 1),
            ("last", _level(pairs, items, codes, True), width, 2),
        ]
        for name, level, beams_a_user, own in shapes:
            beams = _beams(level, users, beams_a_user, own)
            capacity = triton.candidate_capacity(level, beams_a_user)
            work = triton.Workspace.allocate(users, beams_a_user, width, capacity, torch.device("cuda"))
            values = torch.randn(users * beams_a_user, codes, device="cuda") * 2
            normaliser = torch.logsumexp(values, -1)
            dead = seen if name == "last" else none
            step = triton.Step(beams, level, triton.Logits(values, normaliser), none, dead, work)
            leaves = level.leaf is not None

            def call(step: triton.Step = step, leaves: bool = leaves) -> Beams:
                return step.select(step.expand(), width, leaves=leaves)

            good = _same(call(), *_expected(beams, level, values, normaliser, none, dead, width))
            work.read.zero_()
            call()
            allowed, read = work.read.sum(0).tolist()
            row = {
                "kernel": "selection",
                "items": items,
                "level": name,
                "allowed": allowed,
                "read": read,
                "right": good,
            }
            rows.append(row)
            wrong += not good
            row["ms"] = graph_ms([call]) if good else None
            print(
                f"selection {items} items, {name}: {row['ms'] or float('nan'):.4f} ms, {allowed} candidates, "
                f"{read} read again{'' if good else ' WRONG'}",
                flush=True,
            )
    return wrong


def _expected(
    beams: Beams, level: TrieLevel, values: Tensor, normaliser: Tensor, dead: Tensor, dead_leaves: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    scored = reference.ScoredRows(beams)
    scored.add(torch.ones_like(beams.alive), values, normaliser)
    candidates = reference.list_candidates(beams, level)
    open_, leaf = reference.live_candidates(candidates, level, dead, dead_leaves)
    wanted = leaf if level.leaf is not None else open_
    scores = reference.score_candidates(candidates, beams, level, scored, wanted)
    place, score = reference.select_top(scores, width)
    return candidates.child.gather(1, place), score


def _same(found: Beams, node: Tensor, score: Tensor) -> bool:
    """Bit for bit, dead places left out."""
    for u in range(len(node)):
        a, b = found.score[u] > -torch.inf, score[u] > -torch.inf
        if not (torch.equal(found.node[u][a], node[u][b]) and torch.equal(found.score[u][a], score[u][b])):
            return False
    return True

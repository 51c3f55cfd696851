"""xBeam in the paper's own form, in Triton: the signatures of ``masks_reference``."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xgr_engine.xbeam.triton.kernels import kth_largest, ordered_bits

_TILE = 1024


@triton.jit
def set_children_kernel(forbidden, node, alive, child_start, token, V, VALUE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(alive + row):
        parent = tl.load(node + row)
        first = tl.load(child_start + parent)
        last = tl.load(child_start + parent + 1)
        for at in range(first, last, TILE):
            child = at + tl.arange(0, TILE)
            ok = child < last
            place = row * V + tl.load(token + child, mask=ok, other=0)
            tl.store(forbidden + place, tl.full([TILE], VALUE, tl.int8), mask=ok)


def set_children(
    forbidden: Tensor, node: Tensor, alive: Tensor, child_start: Tensor, token: Tensor, value: bool
) -> None:
    """Args as :func:`xgr_engine.bench.kernels.masks_reference.set_children`; all contiguous."""
    if len(node):
        set_children_kernel[(len(node),)](
            forbidden.view(torch.int8),
            node,
            alive,
            child_start,
            token,
            forbidden.shape[1],
            VALUE=int(value),
            TILE=128,
            num_warps=1,
        )


@triton.jit
def select_kernel(scores, places, best, read, K, R, k, start, TILE: tl.constexpr):
    user = tl.program_id(0).to(tl.int64)
    scores += user * K * R
    taken = start
    key = tl.zeros([1], tl.uint32)
    ties = 0
    go = taken * R >= k
    while go:
        bound, need = kth_largest(scores, taken * R, k, TILE)
        key = tl.zeros([1], tl.uint32) + bound
        ties = need
        go = False
        if taken < K:
            beats = 0
            for at in range(0, R, TILE):
                row = at + tl.arange(0, TILE)
                following = tl.load(scores + taken * R + row, mask=row < R, other=float("-inf"))
                beats += tl.sum((ordered_bits(following) > key).to(tl.int32), 0)
            go = beats > 0
            if go:
                taken = tl.minimum(2 * taken, K)
    count = taken * R
    kept = 0
    equals = 0
    for at in range(0, count, TILE):
        place = at + tl.arange(0, TILE)
        ok = place < count
        value = tl.load(scores + place, mask=ok, other=float("-inf"))
        bits = ordered_bits(value)
        equal = (ok & (bits == key)).to(tl.int32)
        keep = ok & ((bits > key) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= ties)))
        order = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(places + user * k + order, place.to(tl.int64), mask=keep)
        tl.store(best + user * k + order, value, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    for at in range(kept, k, TILE):
        order = at + tl.arange(0, TILE)
        tl.store(places + user * k + order, tl.zeros([TILE], tl.int64), mask=order < k)
        tl.store(best + user * k + order, tl.full([TILE], float("-inf"), tl.float32), mask=order < k)
    tl.store(read + 2 * user + 1, tl.load(read + 2 * user + 1) + count)


def select_until_heap_minimum(scores: Tensor, k: int, read: Tensor) -> tuple[Tensor, Tensor]:
    """Args and result as :func:`xgr_engine.bench.kernels.masks_reference.select_until_heap_minimum`.

    The parallel form of the heap: the k-th best of what was read, found by radix selection, is the heap's minimum.
    The depth that is read doubles until no row's next candidate beats it, so at most twice as much is read as one
    after the other would.
    """
    users, length, rows = scores.shape
    places = torch.empty((users, k), dtype=torch.int64, device=scores.device)
    best = torch.empty((users, k), dtype=torch.float32, device=scores.device)
    start = min(length, -(-k // rows))
    read[:, 0] += (scores > -torch.inf).sum((1, 2))
    select_kernel[(users,)](scores, places, best, read, length, rows, k, start, TILE=_TILE, num_warps=8)
    return places, best

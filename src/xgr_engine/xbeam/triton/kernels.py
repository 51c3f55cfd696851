"""The Triton kernels of :mod:`xgr_engine.xbeam.triton`, where the idea is explained. Shapes are those of ``Workspace``.

R rows, C codes and M dead nodes per user; k choices.
"""

# Triton kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand_kernel(node, score, child_start, begin, shift, R, LOG_R: tl.constexpr):
    user = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, 1 << LOG_R)
    ok = r < R
    parent = tl.load(node + user * R + r, mask=ok, other=0).to(tl.int64)
    alive = ok & (tl.load(score + user * R + r, mask=ok, other=float("-inf")) > float("-inf"))
    first = tl.load(child_start + parent, mask=alive, other=0)
    count = tl.load(child_start + parent + 1, mask=alive, other=0) - first
    end = tl.cumsum(count, 0)
    tl.store(begin + user * (R + 1) + r, end - count, mask=ok)
    tl.store(begin + user * (R + 1) + R, tl.sum(count, 0))
    tl.store(shift + user * R + r, first - (end - count), mask=ok)


@triton.jit
def _row_of(begin, place, R, LOG_R: tl.constexpr):
    """The row that the candidate at ``place`` belongs to: the last that begins at or before it. R <= 2 ** LOG_R."""
    row = tl.zeros_like(place)
    for i in tl.static_range(LOG_R):
        probe = row + (1 << (LOG_R - 1 - i))
        inside = probe < R
        row = tl.where(inside & (tl.load(begin + probe, mask=inside, other=0) <= place), probe, row)
    return row


@triton.jit
def _contains(table, value, M, STEPS: tl.constexpr):
    """Whether ``value`` is in an ascending table of M entries. STEPS halvings must reach a single one."""
    low = tl.zeros_like(value)
    high = tl.zeros_like(value) + M
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        smaller = open_ & (tl.load(table + middle, mask=open_, other=0) < value)
        low = tl.where(smaller, middle + 1, low)
        high = tl.where(open_ & ~smaller, middle, high)
    return (low < M) & (tl.load(table + low, mask=low < M, other=-1) == value)


@triton.jit
def _live(flags, dead, child, ok, M, LEAF: tl.constexpr, ALL: tl.constexpr, STEPS: tl.constexpr):
    """Which children may be chosen. ``flags``: leaf numbers (LEAF) or whether a node has children."""
    live = ok
    key = child
    if LEAF:
        key = tl.load(flags + child, mask=ok, other=-1)
        live = live & (key >= 0)
    elif not ALL:
        live = live & (tl.load(flags + child, mask=ok, other=0) != 0)
    if STEPS > 0:
        live = live & ~_contains(dead, key, M, STEPS)
    return live


@triton.jit
def score_kernel(
    score,  # [U, R]
    index,  # [U, R] row of logits, unless DENSE
    logits,  # [N, C]
    normaliser,  # [N], or [U * R] when not NORM_BY_INDEX
    column,
    begin,
    shift,
    flags,
    dead,  # [U, M]
    scores,
    maxima,
    R,
    C,
    M,
    capacity,
    LOG_R: tl.constexpr,
    DENSE: tl.constexpr,
    NORM_BY_INDEX: tl.constexpr,
    LEAF: tl.constexpr,
    ALL: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    user = tl.program_id(0).to(tl.int64)
    begin += user * (R + 1)
    total = tl.load(begin + R)
    for tile in range(tl.program_id(1), tl.cdiv(total, TILE), tl.num_programs(1)):
        place = tile * TILE + tl.arange(0, TILE)
        ok = place < total
        row = _row_of(begin, place, R, LOG_R)
        child = place + tl.load(shift + user * R + row, mask=ok, other=0)
        live = _live(flags, dead + user * M, child, ok, M, LEAF, ALL, STEPS)
        line = user * R + row
        source = line
        if not DENSE:
            source = tl.load(index + line, mask=live, other=0).to(tl.int64)
        at = source * C + tl.load(column + child, mask=live, other=0)
        value = tl.load(logits + at, mask=live, other=0.0)
        if NORM_BY_INDEX:
            value -= tl.load(normaliser + source, mask=live, other=0.0)
        else:
            value -= tl.load(normaliser + line, mask=live, other=0.0)
        live = live & (value == value)  # asked before the minimum, which on a GPU makes 0 of a NaN
        value = tl.load(score + line, mask=live, other=0.0) + tl.minimum(value, 0.0)
        value = tl.where(value == 0.0, 0.0, value)  # one zero: the bits are compared
        value = tl.where(live, value, float("-inf"))
        tl.store(scores + user * capacity + place, value, mask=ok)
        block = tl.max(tl.reshape(value, (TILE // GROUP, GROUP)), 1)
        number = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        tl.store(maxima + user * (capacity // GROUP) + number, block)


@triton.jit
def row_normaliser_kernel(
    index, logits, column, begin, shift, flags, dead, leaf_flags, dead_leaves, out, R, C, M, M_LEAF,
    DENSE: tl.constexpr, INNER: tl.constexpr, ALL: tl.constexpr, STEPS: tl.constexpr,
    LEAF: tl.constexpr, LEAF_STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of each row's live children, for scores that are normalised over what is allowed."""
    user = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    begin += user * (R + 1)
    low = tl.load(begin + row)
    high = tl.load(begin + row + 1)
    line = user * R + row
    offset = tl.load(shift + line)
    source = line
    if not DENSE:
        source = tl.load(index + line).to(tl.int64)
    m = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for place in range(low, high, TILE):
        child = place + tl.arange(0, TILE) + offset
        ok = place + tl.arange(0, TILE) < high
        live = ok & False
        if INNER:
            live = live | _live(flags, dead + user * M, child, ok, M, False, ALL, STEPS)
        if LEAF:
            live = live | _live(leaf_flags, dead_leaves + user * M_LEAF, child, ok, M_LEAF, True, False, LEAF_STEPS)
        at = source * C + tl.load(column + child, mask=live, other=0)
        value = tl.load(logits + at, mask=live, other=float("-inf"))
        m_new = tl.maximum(m, value)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        total = total * tl.exp(m - pivot) + tl.exp(value - pivot)
        m = m_new
    top = tl.max(m, 0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(total * tl.exp(m - pivot), 0)
    tl.store(out + line, tl.where(mass == 0.0, 0.0, pivot + tl.log(mass)))


@triton.jit
def ordered_bits(value):
    """Bits of a float32 as an unsigned integer of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(values, count, k, TILE: tl.constexpr):
    """(key, ties): ordered bits of the k-th largest of ``count`` > k floats, and how many equal ones belong to the top.

    -inf counts as a value. Each pass settles eight bits, from the top, by a histogram of the values that still match.
    """
    lane = tl.arange(0, 256)
    key = tl.zeros([1], tl.uint32)
    need = k
    for shift in tl.static_range(24, -8, -8):
        histogram = tl.zeros([256], tl.int32)
        for at in range(0, count, TILE):
            place = at + tl.arange(0, TILE)
            bits = ordered_bits(tl.load(values + place, mask=place < count, other=0.0))
            match = place < count
            if shift < 24:
                match = match & ((bits >> (shift + 8)) == key)
            digits = ((bits >> shift) & 255).to(tl.int32)
            histogram += tl.histogram(digits, 256, mask=match)
        at_least = tl.cumsum(histogram, 0, reverse=True)
        digit = tl.max(tl.where(at_least >= need, lane, 0), 0)
        need -= tl.sum(tl.where(lane > digit, histogram, 0), 0)
        key = (key << 8) | digit.to(tl.uint32)
    return tl.max(key, 0), need


@triton.jit
def shortlist_kernel(
    begin, scores, maxima, short_score, short_place, short_count, read, R, k, capacity, short_capacity,
    TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0).to(tl.int64)
    total = tl.load(begin + user * (R + 1) + R)
    scores += user * capacity
    maxima += user * (capacity // GROUP)
    target = user * short_capacity
    blocks = tl.cdiv(total, GROUP)
    dead: tl.constexpr = 0x007FFFFF  # ordered bits of -inf
    floor = tl.zeros([1], tl.uint32) + dead
    if blocks > k:
        bound, _ = kth_largest(maxima, blocks, k, TILE)
        floor = tl.maximum(floor, tl.zeros([1], tl.uint32) + bound)
    kept = 0
    equals = 0
    seen = 0
    for at in range(0, total, TILE):
        block = at // GROUP + tl.arange(0, TILE // GROUP)
        best = ordered_bits(tl.load(maxima + block, mask=block < blocks, other=float("-inf")))
        reaches = best >= floor
        hits = tl.sum(reaches.to(tl.int32), 0)
        if hits > 0:
            place = at + tl.arange(0, TILE)
            wanted = tl.reshape(tl.broadcast_to(reaches[:, None], (TILE // GROUP, GROUP)), (TILE,))
            value = tl.load(scores + place, mask=wanted & (place < total), other=float("-inf"))
            bits = ordered_bits(value)
            above = bits > floor
            equal = ((bits == floor) & (bits != dead)).to(tl.int32)
            # of the candidates at the bound itself, only the first k can win a place
            keep = above | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= k))
            order = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(short_score + target + order, value, mask=keep)
            tl.store(short_place + target + order, place, mask=keep)
            kept += tl.sum(keep.to(tl.int32), 0)
            equals += tl.sum(equal, 0)
            seen += tl.sum((wanted & (place < total)).to(tl.int32), 0)
    tl.store(short_count + user, kept)
    tl.store(read + 2 * user, tl.load(read + 2 * user) + total)
    tl.store(read + 2 * user + 1, tl.load(read + 2 * user + 1) + seen)


@triton.jit
def select_kernel(
    begin,
    shift,
    column,
    ancestors,  # [U, R, A]
    short_score,
    short_place,
    short_count,
    out_node,  # [U, k]
    out_score,
    out_column,
    out_parent,
    out_ancestors,  # [U, k, A + OWN]
    R,
    k,
    short_capacity,
    own_slot,
    A: tl.constexpr,
    OWN: tl.constexpr,
    LOG_R: tl.constexpr,
    TILE: tl.constexpr,
):
    user = tl.program_id(0).to(tl.int64)
    begin += user * (R + 1)
    source = user * short_capacity
    count = tl.load(short_count + user)
    threshold = tl.zeros([1], tl.uint32)  # below every finite score
    ties = 0
    if count > k:
        bound, ties = kth_largest(short_score + source, count, k, TILE)
        threshold = threshold + bound
    kept = 0
    equals = 0
    for at in range(0, count, TILE):
        i = at + tl.arange(0, TILE)
        ok = i < count
        value = tl.load(short_score + source + i, mask=ok, other=float("-inf"))
        bits = ordered_bits(value)
        equal = (ok & (bits == threshold)).to(tl.int32)
        keep = ok & ((bits > threshold) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= ties)))
        order = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        place = tl.load(short_place + source + i, mask=keep, other=0)
        row = _row_of(begin, place, R, LOG_R)
        child = place + tl.load(shift + user * R + row, mask=keep, other=0)
        line = user * k + order
        tl.store(out_node + line, child.to(tl.int64), mask=keep)
        tl.store(out_score + line, value, mask=keep)
        tl.store(out_column + line, tl.load(column + child, mask=keep, other=0).to(tl.int64), mask=keep)
        tl.store(out_parent + line, row.to(tl.int64), mask=keep)
        for a in tl.static_range(A):
            slot = tl.load(ancestors + (user * R + row) * A + a, mask=keep, other=-1)
            tl.store(out_ancestors + line * (A + OWN) + a, slot, mask=keep)
        if OWN:
            tl.store(out_ancestors + line * (A + OWN) + A, own_slot + order, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    # dead places: node 0 and the first row's ancestors, so that whatever reads them stays in range
    for at in range(kept, k, TILE):
        order = at + tl.arange(0, TILE)
        ok = order < k
        line = user * k + order
        tl.store(out_node + line, tl.zeros([TILE], tl.int64), mask=ok)
        tl.store(out_score + line, tl.full([TILE], float("-inf"), tl.float32), mask=ok)
        tl.store(out_column + line, tl.zeros([TILE], tl.int64) + tl.load(column).to(tl.int64), mask=ok)
        tl.store(out_parent + line, tl.zeros([TILE], tl.int64), mask=ok)
        for a in tl.static_range(A):
            slot = tl.zeros([TILE], tl.int32) + tl.load(ancestors + user * R * A + a)
            tl.store(out_ancestors + line * (A + OWN) + a, slot, mask=ok)
        if OWN:
            tl.store(out_ancestors + line * (A + OWN) + A, own_slot + order, mask=ok)

"""How the work is cut, on which the producer and the consumers of the Hopper kernel must agree."""

# Gluon kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def work_item(
    work, prompt_start, beams, KV_HEADS: gl.constexpr, G: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """Work number -> (tile of rows, head, split, user, first key, keys of the split). Neighbours share their keys."""
    tiles = (beams * G + ROWS - 1) // ROWS
    tile = work % tiles
    rest = work // tiles
    head = rest % KV_HEADS
    rest = rest // KV_HEADS
    split = rest % SPLITS
    user = rest // SPLITS
    start = gl.load(prompt_start + user)
    length = gl.load(prompt_start + user + 1) - start
    share = ((length + SPLITS - 1) // SPLITS + KEYS - 1) // KEYS * KEYS
    low = gl.minimum(split * share, length)
    keys = gl.minimum(low + share, length) - low
    return tile, head, split, user, start + low, keys


@gluon.jit
def own_range(tile, user, beams, G: gl.constexpr, A: gl.constexpr, ROWS: gl.constexpr):
    """First beam of a tile, its place in the ancestor table, and how many entries of it the tile's beams have."""
    beam = tile * ROWS // G
    last = gl.minimum((tile * ROWS + ROWS - 1) // G + 1, beams)
    return beam, (user.to(gl.int64) * beams + beam) * A, (last - beam) * A


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next slot of a ring of buffers; the phase flips each time round."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)

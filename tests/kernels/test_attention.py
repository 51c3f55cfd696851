"""Decode attention in Triton against the plain torch definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from xgr_engine.errors import UsageError
from xgr_engine.xattention import reference
from xgr_engine.xattention.triton import AttentionTiles, beam_attention, choose_tiles


@dataclass(frozen=True)
class Call:
    """Inputs of one call, unit variance; what no table names is NaN."""

    q: torch.Tensor
    prompt_k: torch.Tensor
    prompt_v: torch.Tensor
    prompt_start: torch.Tensor
    gen_k: torch.Tensor
    gen_v: torch.Tensor
    ancestors: torch.Tensor

    def run(self, tiles: AttentionTiles | None) -> torch.Tensor:
        return beam_attention(*vars(self).values(), self.q.shape[-1] ** -0.5, tiles=tiles)

    def expected(self) -> torch.Tensor:
        wide = [t.double() if t.is_floating_point() else t for t in vars(self).values()]
        return reference.beam_attention(*wide, self.q.shape[-1] ** -0.5)

    def error(self, out: torch.Tensor) -> float:
        expected = self.expected()
        return float((out.double() - expected).norm() / expected.norm())


def make(device, dtype, lengths, beams, own, kv_heads, group, dim, seed=0) -> Call:
    rng = torch.Generator(device).manual_seed(seed)
    users = len(lengths)

    def normal(*size):
        return torch.randn(*size, generator=rng, device=device).to(dtype)

    start = [sum(lengths[:u]) for u in range(users + 1)]
    slots = max(1, own * beams)
    ancestors = torch.randint(-1, slots, (users, beams, own), generator=rng, device=device, dtype=torch.int32)
    if own:
        ancestors[:, :, -1] = ancestors[:, :, -1].clamp_min(0)  # a row always has its own current token
    spare = 100
    k, v = (normal(start[-1] + spare, kv_heads, dim) for _ in range(2))
    gen_k, gen_v = (normal(users, slots, kv_heads, dim) for _ in range(2))
    for t in (k, v):
        t[start[-1] :] = torch.nan
    for u in range(users):
        unnamed = torch.ones(slots, dtype=torch.bool, device=device)
        unnamed[ancestors[u][ancestors[u] >= 0].long()] = False
        gen_k[u, unnamed] = torch.nan
        gen_v[u, unnamed] = torch.nan
    starts = torch.tensor(start, dtype=torch.int32, device=device)
    return Call(normal(users, beams, kv_heads * group, dim), k, v, starts, gen_k, gen_v, ancestors)


TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SMALL = AttentionTiles(32, 32, 8, 2)
SPLIT = AttentionTiles(64, 16, 8, 2, splits=3)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("tiles", [None, SMALL, SPLIT], ids=["automatic", "small", "split"])
@pytest.mark.parametrize(
    ("lengths", "beams", "own", "kv_heads", "group", "dim"),
    [
        ((1, 17), 31, 1, 2, 1, 64),
        ((17, 200), 33, 2, 1, 2, 128),
        ((65,), 127, 3, 1, 4, 64),
        ((64, 128), 5, 2, 2, 8, 64),
        ((0, 40), 9, 2, 1, 2, 64),
        ((100,), 33, 0, 2, 2, 64),
        ((41, 1, 0), 50, 0, 6, 1, 64),  # the cross attention of a T5
        ((70,), 20, 2, 1, 2, 80),
    ],
)
def test_equals_the_reference(device, tiles, lengths, beams, own, kv_heads, group, dim):
    call = make(device, torch.float32, lengths, beams, own, kv_heads, group, dim)
    assert call.error(call.run(tiles)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("lengths", "beams"), [((3, 4), 0), ((), 7)])
def test_no_rows(device, lengths, beams):
    """A suffix behind a search in which nobody found anything, and a batch of nobody."""
    call = make(device, torch.float32, lengths, beams, 1, 2, 1, 64)
    assert call.run(None).shape == (len(lengths), beams, 2, 64)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("context", "beams", "dim"), [(1000, 333, 64), (4097, 64, 128)])
def test_long_prompts_and_wide_beams(device, context, beams, dim):
    call = make(device, torch.float32, (context,), beams, 2, 1, 2, dim)
    tiles = AttentionTiles(128, 128) if device == "cpu" else None  # the interpreter is quicker over large tiles
    assert call.error(call.run(tiles)) < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("poisoned_memory")
def test_half_precision(device):
    # the interpreter multiplies bfloat16 wrongly; on a GPU it is the dtype that matters
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    call = make(device, dtype, (130, 77), 65, 2, 2, 2, 128)
    out = call.run(None)
    assert out.dtype == dtype
    assert call.error(out) < TOLERANCE[dtype]


@pytest.mark.usefixtures("poisoned_memory")
def test_strided_queries_and_caches(device):
    """Queries may be a part of the fused projection, keys and values one layer of many."""
    call = make(device, torch.float32, (50, 21), 7, 1, 2, 2, 64)
    wide = torch.full((2, 7, 8, 64), torch.nan, device=device)
    wide[:, :, :4] = call.q
    assert call.error(replace(call, q=wide[:, :, :4]).run(SMALL)) < TOLERANCE[torch.float32]


def test_a_row_does_not_see_others(device):
    """Rows are independent: other beams' queries, other users' prompts and other slots change nothing."""
    call = make(device, torch.float32, (33, 40), 20, 2, 1, 2, 64)
    out = call.run(SMALL)
    other = make(device, torch.float32, (33, 40), 20, 2, 1, 2, 64, seed=9)
    changed = replace(call, q=torch.cat([other.q[:, :7], call.q[:, 7:8], other.q[:, 8:]], 1))
    changed.prompt_k[33:73] = other.prompt_k[33:73]
    again = changed.run(SMALL)
    assert torch.equal(again[0, 7], out[0, 7])
    assert not torch.equal(again[1, 7], out[1, 7])


def test_same_call_same_bits(device):
    call = make(device, torch.float32, (150, 33), 33, 2, 2, 2, 64)
    assert torch.equal(call.run(SPLIT), call.run(SPLIT))


@pytest.mark.parametrize("fault", ["wrong ancestor", "dropped tile", "neighbour's token", "scale"])
def test_these_tests_can_fail(device, fault):
    """Faults a kernel could have, planted in its inputs: each moves the result far beyond the tolerance."""
    call = make(device, torch.float32, (200, 100), 33, 2, 2, 2, 64)
    bad = call
    if fault == "wrong ancestor":
        table = call.ancestors.clone()
        table[0, 5, 1] = call.ancestors[0, 6, 1]
        bad = replace(call, ancestors=table)
    elif fault == "dropped tile":
        bad = replace(call, prompt_start=call.prompt_start - torch.tensor([0, 64, 0], device=device, dtype=torch.int32))
    elif fault == "neighbour's token":
        bad = replace(call, prompt_start=call.prompt_start + torch.tensor([0, 1, 0], device=device, dtype=torch.int32))
    elif fault == "scale":
        bad = replace(call, q=call.q * 1.001)
    assert call.error(bad.run(SMALL)) > 20 * TOLERANCE[torch.float32]


def test_calls_that_are_not_covered_say_so(device):
    call = make(device, torch.float32, (20,), 4, 1, 2, 2, 64)
    with pytest.raises(UsageError, match="dtype"):
        replace(call, q=call.q.double()).run(None)
    with pytest.raises(UsageError, match="strides"):
        replace(call, prompt_v=call.prompt_v.transpose(0, 1).contiguous().transpose(0, 1)).run(None)


def test_few_programs_split_the_prompt():
    one_user = choose_tiles(1, 256, 8, 2, torch.bfloat16, 132, hopper=True)
    assert one_user.splits == 4
    assert choose_tiles(8, 256, 8, 2, torch.bfloat16, 132, hopper=True).splits == 1
    assert choose_tiles(8, 1, 8, 2, torch.bfloat16, 132).rows == 16


def test_hopper_tiles_of_a_wide_beam():
    tiles = choose_tiles(8, 256, 8, 2, torch.bfloat16, 132, hopper=True)
    assert (tiles.hopper, tiles.rows, tiles.keys, tiles.stages) == (True, 128, 128, 2)
    assert not choose_tiles(8, 256, 8, 2, torch.float32, 132, hopper=False).hopper


@pytest.mark.cuda
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("dim", "group", "own"),
    [(128, 2, 2), (64, 1, 1), (128, 8, 0), (64, 4, 4), (128, 3, 3), (128, 1, 3), (64, 1, 0)],
)
@pytest.mark.parametrize(("keys", "stages"), [(64, 4), (128, 2)])
def test_hopper_kernel(dim, group, own, splits, keys, stages):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for lengths, beams in (((1000, 17, 128), 333), ((4097,), 127), ((1, 0, 129), 65)):
        call = make("cuda", torch.bfloat16, lengths, beams, own, 2, group, dim)
        tiles = AttentionTiles(128, keys, stages=stages, splits=splits, hopper=True)
        assert call.error(call.run(tiles)) < TOLERANCE[torch.bfloat16]


@pytest.mark.cuda
def test_replays_for_other_lengths():
    """A captured call is replayed after the lengths and the tables on the device changed."""
    call = make("cuda", torch.bfloat16, (900, 500), 100, 2, 2, 2, 128)
    call.run(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(None)
    call.prompt_start.copy_(torch.tensor([0, 10, 777], device="cuda"))
    call.ancestors.copy_(call.ancestors.flip(1))
    graph.replay()
    assert call.error(out) < TOLERANCE[torch.bfloat16]


@pytest.mark.cuda
@pytest.mark.parametrize("shared", [0, 7])
def test_ragged_prompts_in_one_call(shared: int) -> None:
    """Many shapes go through one kernel, with and without a prefix whose keys came before."""
    from xgr_engine.xattention import prefill, reference
    from xgr_engine.xattention.ragged import Ragged

    generator = torch.Generator("cuda").manual_seed(0)
    own = [31, 1, 127, 64, 333]
    head = [shared] if shared else []
    sequences = Ragged.of([*head, *own], [*head, *(length + shared for length in own)])
    queries, keys = sequences.query_start[-1], sequences.key_start[-1]

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, 64, generator=generator, device="cuda").bfloat16()

    q, k, v = normal(queries, 4), normal(keys, 2), normal(keys, 2)
    with prefill.preferred_kernels():
        got = prefill.prompt_attention(q, k, v, sequences, 0.125)
    wide = (tensor.double() for tensor in (q, k, v))
    expected = reference.prompt_attention(*wide, sequences, 0.125)
    assert float((got.double() - expected).norm() / expected.norm()) < 4e-3

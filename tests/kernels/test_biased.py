"""T5's attention against brute force in float64, and its distance buckets against the rule in whole numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from t5_oracle import bucket_of

from xgr_engine.xattention.biased import (
    by_length,
    distance_bucket,
    distance_table,
    encoder_attention,
    encoder_bias,
    encoder_kernels,
    own_attention,
)

# Relative error of the whole result. float32 rounds sums of up to 127 products and the exponentials, 6e-8 each: 2.5e-7
# measured on a CPU. bfloat16 rounds the result to 8 bits, by up to 2^-9 = 2e-3, and some kernels also the weights
# before they multiply the values: 2.1e-3 measured. Both have room for a GPU's other order of sums; every fault planted
# below is farther off.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 6e-3}
DTYPES = list(TOLERANCE)
SIZES = (1, 31, 33, 127)
FAR = 9  # a small max_distance, so that most distances of these sizes share the last bucket
RULES = [(32, 128), (32, 64), (16, 128), (64, 512), (8, 20), (12, 100), (32, 20)]


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "far"), RULES)
def test_buckets_follow_the_rule(both_ways: bool, buckets: int, far: int) -> None:
    distance = torch.arange(-600, 601)
    got = distance_bucket(distance, both_ways=both_ways, buckets=buckets, max_distance=far)
    expected = [bucket_of(int(d), both_ways, buckets, far) for d in distance]
    assert got.tolist() == expected
    assert max(expected) == buckets - 1


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "far"), RULES)
def test_buckets_are_those_of_transformers(both_ways: bool, buckets: int, far: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-600, 601)
    theirs = t5.T5Attention._relative_position_bucket(distance, both_ways, buckets, far)
    assert torch.equal(distance_bucket(distance, both_ways=both_ways, buckets=buckets, max_distance=far), theirs)


@pytest.mark.parametrize(("buckets", "far"), RULES)
def test_a_table_knows_every_distance(device: str, buckets: int, far: int) -> None:
    weight = torch.randn(buckets, 3, device=device)
    back = distance_table(weight, both_ways=False, max_distance=far)
    rows = [bucket_of(-d, False, buckets, far) for d in range(601)]
    assert torch.equal(back[torch.arange(601).clamp_max(len(back) - 1)], weight[rows])
    for longest in (1, 33, 300):
        bias = encoder_bias(distance_table(weight, both_ways=True, max_distance=far), longest)
        assert bias.shape[1] == bias.shape[2] >= longest and bias.shape[1] % 8 == 0
        for query in {0, longest // 2, longest - 1}:
            rows = [bucket_of(key - query, True, buckets, far) for key in range(longest)]
            assert torch.equal(bias[:, query, :longest], weight[rows].T)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def normal(seed: int, device: str, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def encoder_case(device: str, dtype: torch.dtype, lengths: list[int], heads: int = 3, dim: int = 16):
    """q, k, v with a NaN row between and behind the sequences, their starts, and a table of biases."""
    starts, at = [], 1
    for length in lengths:
        starts.append(at)
        at += length + 1
    packed = normal(len(lengths), device, dtype, at, 3, heads, dim)
    inside = torch.zeros(at, dtype=torch.bool, device=device)
    for start, length in zip(starts, lengths, strict=True):
        inside[start : start + length] = True
    packed[~inside] = torch.nan
    q, k, v = packed.unbind(1)
    return q * dim**-0.5, k, v, starts, normal(7, device, dtype, 8, heads)


def every_token_to_every_token(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, far: int) -> Tensor:
    """One sequence, in float64, one query of one head at a time."""
    q, k, v, weight = (t.double() for t in (q, k, v, weight))
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        for at in range(len(q)):
            rows = [bucket_of(key - at, True, len(weight), far) for key in range(len(q))]
            out[at, head] = (k[:, head] @ q[at, head] + weight[rows, head]).softmax(0) @ v[:, head]
    return out


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [*([size] for size in SIZES), [33, 1, 31, 33, 127, 1, 1], [31] * 5])
def test_encoder_attention(device: str, dtype: torch.dtype, lengths: list[int]) -> None:
    q, k, v, starts, weight = encoder_case(device, dtype, lengths)
    bias = encoder_bias(distance_table(weight, both_ways=True, max_distance=FAR), max(lengths))
    with encoder_kernels():
        out = encoder_attention(q, k, v, by_length(starts, lengths, torch.device(device)), bias)
    assert out.dtype == dtype
    for start, length in zip(starts, lengths, strict=True):
        own = slice(start, start + length)
        expected = every_token_to_every_token(q[own], k[own], v[own], weight, FAR)
        assert error(out[own], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("fault", ["bias turned round", "neighbour's token", "no bias", "scaled"])
def test_the_encoder_test_can_fail(device: str, fault: str) -> None:
    q, k, v, starts, weight = encoder_case(device, torch.float32, [33, 31])
    bias = encoder_bias(distance_table(weight, both_ways=True, max_distance=FAR), 33)
    if fault == "bias turned round":
        bias = bias.transpose(1, 2)
    elif fault == "no bias":
        bias = torch.zeros_like(bias)
    elif fault == "scaled":
        q = q * 1.001
    elif fault == "neighbour's token":
        starts = [2, starts[1]]
        q, k, v = (torch.nan_to_num(t) for t in (q, k, v))
    out = encoder_attention(q, k, v, by_length(starts, [33, 31], torch.device(device)), bias)
    q, k, v, starts, weight = encoder_case(device, torch.float32, [33, 31])
    own = slice(starts[0], starts[0] + 33)
    assert not error(out[own], every_token_to_every_token(q[own], k[own], v[own], weight, FAR)) < 2e-5


def own_case(device: str, dtype: torch.dtype, users: int, rows: int, length: int, seed: int = 0):
    """q, keys, values and ancestors with holes; what no table names is NaN."""
    heads, dim, slots = 3, 16, rows * length + 2
    rng = torch.Generator(device).manual_seed(seed)
    q = normal(seed + 1, device, dtype, users, rows, heads, dim) * dim**-0.5
    gen_k, gen_v = (normal(seed + at, device, dtype, users, slots, heads, dim) for at in (2, 3))
    ancestors = torch.randint(0, slots, (users, rows, length), generator=rng, device=device, dtype=torch.int32)
    holes = torch.rand(ancestors.shape, generator=rng, device=device) < 0.3
    holes[:, :, 0] = holes[:, :, -1] = False  # the start token and a row's own
    ancestors[holes] = -1
    for user in range(users):
        unnamed = torch.ones(slots, dtype=torch.bool, device=device)
        unnamed[ancestors[user][ancestors[user] >= 0].long()] = False
        gen_k[user, unnamed] = torch.nan
        gen_v[user, unnamed] = torch.nan
    return q, gen_k, gen_v, ancestors, normal(9, device, dtype, 8, heads)


def own_path(q: Tensor, gen_k: Tensor, gen_v: Tensor, ancestors: Tensor, weight: Tensor, far: int) -> Tensor:
    """In float64: a row's present tokens as a list, distances counted along it."""
    q, gen_k, gen_v, weight = (t.double() for t in (q, gen_k, gen_v, weight))
    out = torch.empty_like(q)
    users, rows, heads, _ = q.shape
    for user in range(users):
        for row in range(rows):
            path = [slot for slot in ancestors[user, row].tolist() if slot >= 0]
            bucket = [bucket_of(place + 1 - len(path), False, len(weight), far) for place in range(len(path))]
            for head in range(heads):
                scores = gen_k[user, path, head] @ q[user, row, head] + weight[bucket, head]
                out[user, row, head] = scores.softmax(0) @ gen_v[user, path, head]
    return out


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_own_attention(device: str, dtype: torch.dtype, rows: int, length: int) -> None:
    q, gen_k, gen_v, ancestors, weight = own_case(device, dtype, 2, rows, length)
    if rows > 1 and length > 2:
        assert (ancestors < 0).any()
    bias = distance_table(weight, both_ways=False, max_distance=FAR).float()
    out = own_attention(q, gen_k, gen_v, ancestors, bias)
    assert out.dtype == dtype
    # the table is float32 whatever the dtype of the rest
    expected = own_path(q, gen_k, gen_v, ancestors, weight.float(), FAR)
    assert error(out, expected) < TOLERANCE[dtype]


def test_slot_0_of_nobody_does_not_matter(device: str) -> None:
    """A hole is read as slot 0, which may hold anything."""
    q, gen_k, gen_v, _, weight = own_case(device, torch.float32, 1, 4, 3)
    gen_k, gen_v = torch.nan_to_num(gen_k), torch.nan_to_num(gen_v)
    gen_k[:, 0], gen_v[:, 0] = torch.nan, torch.inf
    ancestors = torch.tensor([[[5, -1, 6], [5, 7, 8], [5, -1, -1], [1, 2, 3]]], dtype=torch.int32, device=device)
    bias = distance_table(weight, both_ways=False, max_distance=FAR).float()
    out = own_attention(q, gen_k, gen_v, ancestors, bias)
    assert error(out, own_path(q, gen_k, gen_v, ancestors, weight, FAR)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("fault", ["wrong ancestor", "holes count", "no bias", "scaled"])
def test_the_own_test_can_fail(device: str, fault: str) -> None:
    q, gen_k, gen_v, ancestors, weight = own_case(device, torch.float32, 2, 33, 5)
    expected = own_path(q, gen_k, gen_v, ancestors, weight, FAR)
    bias = distance_table(weight, both_ways=False, max_distance=FAR).float()
    gen_k, gen_v = torch.nan_to_num(gen_k), torch.nan_to_num(gen_v)
    if fault == "wrong ancestor":
        ancestors[0, 5, 0] = ancestors[0, 6, 0] + 1
    elif fault == "holes count":
        ancestors = ancestors.clamp_min(0)
    elif fault == "no bias":
        bias = torch.zeros_like(bias)
    elif fault == "scaled":
        q = q * 1.001
    assert error(own_attention(q, gen_k, gen_v, ancestors, bias), expected) > 2e-5


def test_other_rows_change_nothing(device: str) -> None:
    """Bits of a row depend on no other row or user of the call."""
    q, gen_k, gen_v, ancestors, weight = own_case(device, torch.float32, 3, 7, 4)
    bias = distance_table(weight, both_ways=False, max_distance=FAR).float()
    out = own_attention(q, gen_k, gen_v, ancestors, bias)
    other = q.clone()
    other[1, :3], other[0] = torch.nan, torch.nan
    again = own_attention(other, gen_k, gen_v, ancestors, bias)
    assert torch.equal(again[1, 3:], out[1, 3:]) and torch.equal(again[2], out[2])

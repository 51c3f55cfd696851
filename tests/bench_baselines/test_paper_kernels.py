"""The paper's stages, its re-ordering and its selection: Triton and plain torch against their definitions."""

from __future__ import annotations

import pytest
import torch

from xgr_engine.bench.kernels import masks_reference, masks_triton, staged_reference, staged_triton
from xgr_engine.xattention import reference

BOTH_STAGED = pytest.mark.parametrize("kernels", [staged_reference, staged_triton], ids=["torch", "triton"])
BOTH_MASKS = pytest.mark.parametrize("kernels", [masks_reference, masks_triton], ids=["torch", "triton"])


@pytest.mark.usefixtures("poisoned_memory")
@BOTH_STAGED
@pytest.mark.parametrize(
    ("lengths", "rows", "steps", "kv_heads", "group", "dim"),
    [
        ((1, 17), 31, 1, 2, 1, 64),
        ((65, 200), 33, 2, 1, 2, 128),
        ((130,), 127, 3, 1, 4, 64),
        ((64, 0), 5, 2, 2, 8, 64),
        ((70,), 20, 1, 2, 2, 80),
    ],
)
def test_three_stages_are_one_softmax(device, kernels, lengths, rows, steps, kv_heads, group, dim):
    rng = torch.Generator(device).manual_seed(rows)

    def normal(*size):
        return torch.randn(*size, generator=rng, device=device)

    users, width, slots = len(lengths), rows + 3, steps + 1
    start = torch.tensor([sum(lengths[:u]) for u in range(users + 1)], dtype=torch.int32, device=device)
    prompt = normal(2, sum(lengths) + 50, kv_heads, dim)
    prompt[:, sum(lengths) :] = torch.nan
    own = torch.full((2, users, width, slots, kv_heads, dim), torch.nan, device=device)
    own[:, :, :rows, :steps] = normal(2, users, rows, steps, kv_heads, dim)
    q, scale = normal(users, rows, kv_heads * group, dim), dim**-0.5
    shared = kernels.shared_stage(q, *prompt, start, scale)
    out = kernels.merge_stages(shared, kernels.unshared_stage(q, *own, steps, scale), torch.empty_like(q))
    row = torch.arange(rows, device=device)[:, None] * slots + torch.arange(steps, device=device)
    table = row.to(torch.int32).expand(users, -1, -1)
    wide = [t.double() for t in (q, *prompt)]
    generated = [t.flatten(1, 2).double() for t in own]
    expected = reference.beam_attention(*wide, start, *generated, table, scale)
    assert float((out.double() - expected).norm() / expected.norm()) < 2e-6


@BOTH_STAGED
@pytest.mark.parametrize(("width", "rows"), [(1, 1), (16, 16), (33, 33), (40, 31), (127, 127)])
def test_rows_follow_their_parents_in_place(device, kernels, width, rows):
    """Random parents in order, among them the extremes: all from the first row, all from the last one."""
    rng = torch.Generator(device).manual_seed(width)
    parents = torch.randint(0, width, (5, rows), generator=rng, device=device).sort(1).values
    parents[0], parents[1] = 0, width - 1
    own = torch.randn(2, 2, 5, width, 3, 2, 8, generator=rng, device=device)
    expected = own.clone()
    for user in range(5):
        expected[:, :, user, :rows, :2] = own[:, :, user, parents[user], :2]
    kernels.reorder_in_place(own[0], own[1], parents, 2)
    assert torch.equal(own, expected)


def test_the_passes_need_parents_in_order(device):
    """The precondition is real: parents out of order lose rows."""
    own = torch.arange(3.0, device=device).view(1, 1, 3, 1, 1, 1).repeat(2, 1, 1, 1, 1, 1, 1)
    staged_reference.reorder_in_place(own[0], own[1], torch.tensor([[1, 0, 2]]), 1)
    assert own[0].flatten().tolist() == [1.0, 1.0, 2.0]


@BOTH_MASKS
def test_masks_change_at_the_children_alone(device, kernels):
    starts = torch.tensor([0, 3, 3, 200], dtype=torch.int32, device=device)
    token = torch.cat([torch.tensor([5, 2, 9]), torch.arange(10, 207)]).to(torch.int32).to(device)
    node = torch.tensor([0, 2, 1, 0], device=device)
    alive = torch.tensor([True, True, True, False], device=device)
    forbidden = torch.ones(4, 300, dtype=torch.bool, device=device)
    kernels.set_children(forbidden, node, alive, starts, token, False)
    expected = torch.ones_like(forbidden)
    expected[0, [5, 2, 9]] = False
    expected[1, 10:207] = False
    assert torch.equal(forbidden, expected)
    kernels.set_children(forbidden, node, alive, starts, token, True)
    assert forbidden.all()


@BOTH_MASKS
@pytest.mark.parametrize(
    ("rows", "length", "k"), [(1, 50, 20), (33, 7, 33), (127, 40, 100), (5, 3, 31), (512, 9, 512), (1, 4, 1)]
)
def test_selects_what_a_full_sort_selects(device, kernels, rows, length, k):
    rng = torch.Generator(device).manual_seed(rows + length)
    scores = torch.randn(3, length, rows, generator=rng, device=device) * 3
    scores[0] += 20 * torch.randn(rows, generator=rng, device=device)  # a few rows hold all winners
    scores = scores.sort(1, descending=True).values
    scores[1, length // 2 :] = -torch.inf
    scores[2, :, rows // 2 :] = -torch.inf
    scores = scores.contiguous()
    read = torch.zeros(3, 2, dtype=torch.int64, device=device)
    places, best = kernels.select_until_heap_minimum(scores, k, read)
    for user in range(3):
        flat = scores[user].flatten()
        expected = torch.nn.functional.pad(
            flat.sort(descending=True).values[:k], (0, max(0, k - len(flat))), value=-torch.inf
        )
        assert torch.equal(best[user].sort(descending=True).values, expected)
        live = best[user] > -torch.inf
        assert torch.equal(flat[places[user][live]], best[user][live])
        assert len(places[user][live].unique()) == int(live.sum())
    assert (read[:, 0] == (scores > -torch.inf).sum((1, 2))).all()


@BOTH_MASKS
def test_stops_at_the_heaps_minimum(device, kernels):
    """Steep lists: the first ones of all rows win, and little else is read."""
    scores = (-torch.arange(100.0)[:, None] * 100 - torch.arange(64.0)).expand(2, -1, -1).contiguous().to(device)
    read = torch.zeros(2, 2, dtype=torch.int64, device=device)
    kernels.select_until_heap_minimum(scores, 64, read)
    assert (read[:, 0] == 6400).all() and (read[:, 1] == 64).all()


@BOTH_MASKS
def test_equal_scores_fill_the_places_once(device, kernels):
    scores = torch.zeros(1, 10, 30, device=device)
    read = torch.zeros(1, 2, dtype=torch.int64, device=device)
    places, best = kernels.select_until_heap_minimum(scores, 45, read)
    assert (best == 0).all() and len(places.unique()) == 45

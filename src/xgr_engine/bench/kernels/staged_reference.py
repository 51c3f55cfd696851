"""xAttention as the paper has it (arXiv 2512.11529), in plain torch: a shared stage over the prompt, an unshared stage
over each beam's own tokens, a merge; and the re-ordering of the own tokens in place.

A stage leaves a softmax *state* of each query: the weighted values before the division, and the maximum (times
log2(e), so base 2) and the sum that they were taken with. States of any parts of the keys merge into the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.kernels.launch import LOG2E

State = tuple[Tensor, Tensor]  # values [P, U, R, Hq, D] of P parts; maximum and sum, [2, P, U, R, Hq]


def shared_stage(q: Tensor, prompt_k: Tensor, prompt_v: Tensor, prompt_start: Tensor, scale: float) -> State:
    """Beams as query rows over their user's prompt, without any mask.

    Args:
        q: [U, R, Hq, D]; prompt_k, prompt_v: [T, Hkv, D]; prompt_start: int [U + 1]; scale: factor on q.k.
    """
    users, rows, heads, dim = q.shape
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    values = torch.empty((1, *q.shape), dtype=acc, device=q.device)
    state = torch.empty((2, 1, users, rows, heads), dtype=acc, device=q.device)
    starts = prompt_start.tolist()
    for user in range(users):
        part = slice(starts[user], starts[user + 1])
        query = q[user].to(acc).view(rows, prompt_k.shape[1], -1, dim)
        logits = torch.einsum("rhgd,thd->rhgt", query, prompt_k[part].to(acc)) * (scale * LOG2E)
        if logits.shape[-1] == 0:
            state[0, 0, user], state[1, 0, user], values[0, user] = -torch.inf, 0, 0
            continue
        maximum = logits.amax(-1, keepdim=True)
        weight = torch.exp2(logits - maximum)
        values[0, user] = torch.einsum("rhgt,thd->rhgd", weight, prompt_v[part].to(acc)).flatten(1, 2)
        state[0, 0, user] = maximum.flatten(1)
        state[1, 0, user] = weight.sum(-1).flatten(1)
    return values, state


def unshared_stage(q: Tensor, own_k: Tensor, own_v: Tensor, steps: int, scale: float) -> State:
    """Each beam over the first ``steps`` (at least 1) of its own tokens, own_k and own_v [U, W, S, Hkv, D], W >= R."""
    users, rows, heads, dim = q.shape
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    query = q.to(acc).view(users, rows, own_k.shape[3], -1, dim)
    keys, values = (t[:, :rows, :steps].to(acc) for t in (own_k, own_v))
    logits = torch.einsum("urhgd,urshd->urhgs", query, keys) * (scale * LOG2E)
    maximum = logits.amax(-1, keepdim=True)
    weight = torch.exp2(logits - maximum)
    mixed = torch.einsum("urhgs,urshd->urhgd", weight, values).view(1, *q.shape)
    shape = (1, users, rows, heads)
    return mixed, torch.stack([maximum.view(shape), weight.sum(-1).view(shape)])


def merge_stages(shared: State, own: State, out: Tensor) -> Tensor:
    """The softmax over both stages' keys, written to ``out`` [U, R, Hq, D] and returned."""
    values = torch.cat([shared[0], own[0]])
    maximum, total = torch.cat([shared[1], own[1]], 1)
    weight = torch.exp2(maximum - maximum.amax(0))
    out.copy_((weight[..., None] * values).sum(0) / (weight * total).sum(0)[..., None])
    return out


def reorder_in_place(own_k: Tensor, own_v: Tensor, parent: Tensor, steps: int) -> None:
    """Row i becomes what row ``parent[i]`` was, without a second buffer, when parents never descend.

    First upwards: rows whose parent lies behind them, whose source nobody has written yet. Then downwards: rows whose
    parent lies before them; a source there can have been written by the first pass only if its own parent lay behind
    it, which parents in order rule out.

    Args:
        own_k, own_v: [layers, U, W, S, Hkv, D], the first ``steps`` tokens of each row are moved.
        parent: int64 [U, R], R <= W, ascending (not strictly) for each user.
    """
    rows = parent.shape[1]
    for user, origin in enumerate(parent.tolist()):
        for own in (own_k, own_v):
            for i in range(rows):
                if origin[i] > i:
                    own[:, user, i, :steps] = own[:, user, origin[i], :steps]
            for i in reversed(range(rows)):
                if origin[i] < i:
                    own[:, user, i, :steps] = own[:, user, origin[i], :steps]

"""xBeam in the paper's own form, in plain torch: sparse updates of a mask, and a selection that stops early."""

from __future__ import annotations

import torch
from torch import Tensor


def set_children(
    forbidden: Tensor, node: Tensor, alive: Tensor, child_start: Tensor, token: Tensor, value: bool
) -> None:
    """Write ``value`` at the tokens of each row's children in the trie, and nowhere else.

    Args:
        forbidden: bool [N, V], changed in place.
        node: int64 [N] trie node of each row; alive: bool [N], rows that are not are left out.
        child_start: int32 [n + 1]; token: int32 [n'] vocabulary token of each child.
    """
    first = child_start[node].long()
    count = torch.where(alive, child_start[node + 1].long() - first, 0)
    row = torch.repeat_interleave(torch.arange(len(node), device=node.device), count)
    within = torch.arange(len(row), device=node.device) - (count.cumsum(0) - count)[row]
    forbidden[row, token[first[row] + within].long()] = value


def select_until_heap_minimum(scores: Tensor, k: int, read: Tensor) -> tuple[Tensor, Tensor]:
    """The k best of R lists that are each sorted, reading each no further than needed.

    A min-heap of the k best candidates bounds what can still enter. The lists are read side by side, the first ones
    of all rows, then the second ones: as soon as no row's next candidate beats the heap's minimum, nothing beyond can.

    Args:
        scores: float32 [U, K, R]; ``scores[u, :, r]`` is row r's list, best first, -inf where it has ended.
        read: int64 [U, 2], added to: candidates that are no -inf, and candidates read.

    Returns:
        int64 [U, k] places ``j * R + r`` in each user's [K, R], in no particular order, and their scores (-inf where
        fewer than k candidates exist; the place is then any).
    """
    users, length, rows = scores.shape
    places = torch.zeros((users, k), dtype=torch.int64, device=scores.device)
    best = scores.new_full((users, k), -torch.inf)
    for user in range(users):
        flat = scores[user].flatten()
        taken = min(length, -(-k // rows))
        while True:
            order = flat[: taken * rows].sort(descending=True, stable=True)
            minimum = order.values[k - 1] if len(order.values) >= k else -torch.inf
            if taken == length or not (scores[user, taken] > minimum).any():
                break
            taken += 1
        found = min(k, taken * rows)
        best[user, :found], places[user, :found] = order.values[:found], order.indices[:found]
        read[user, 1] += taken * rows
    read[:, 0] += (scores > -torch.inf).sum((1, 2))
    return places, best

"""Sequences packed back to back, as the kernels of prefill attention need them: shapes, offsets, lists of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.xattention.upload import upload

_L2_BYTES = 24 << 20  # of keys and values that programs running side by side may cover: half of a Hopper GPU's L2 cache


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences ``first`` .. ``stop - 1``, each of ``queries`` queries and ``keys`` keys."""

    first: int
    stop: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Ragged:
    """S sequences of a batch. All layers of the batch's prefill share what is derived from them and uploaded here.

    Attributes:
        query_start: [S + 1]; sequence s owns the queries ``query_start[s] : query_start[s + 1]``.
        key_start: [S + 1], likewise for keys. A sequence may have more keys than queries: those of a prefix that was
            computed before. Its queries are then its last positions.
    """

    query_start: tuple[int, ...]
    key_start: tuple[int, ...]
    _uploads: dict[Any, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, queries: Iterable[int], keys: Iterable[int]) -> Ragged:
        """Sequences with these numbers of queries and of keys."""
        return cls(tuple(accumulate(queries, initial=0)), tuple(accumulate(keys, initial=0)))

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """(queries, keys) of every sequence."""
        queries, keys = pairwise(self.query_start), pairwise(self.key_start)
        return [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(queries, keys, strict=True)]

    @cached_property
    def runs(self) -> list[Run]:
        """Neighbours of equal shape as one run; sequences without queries are left out."""
        runs: list[Run] = []
        for index, (queries, keys) in enumerate(self.shapes):
            if runs and runs[-1] == Run(runs[-1].first, index, queries, keys):
                runs[-1] = Run(runs[-1].first, index + 1, queries, keys)
            elif queries:
                runs.append(Run(index, index + 1, queries, keys))
        return runs

    @cached_property
    def square(self) -> bool:
        """Whether every sequence has as many keys as queries, that is, no prefix."""
        return all(queries == keys for queries, keys in self.shapes)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, that a sequence has."""
        return max(queries for queries, _ in self.shapes), max(keys for _, keys in self.shapes)

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``query_start`` and ``key_start`` as int32 on the device."""
        starts = self.query_start, self.key_start
        queries, keys = (
            self.uploaded((index, device), device, lambda s=start: np.array(s, np.int32))  # type: ignore[misc]
            for index, start in enumerate(starts)
        )
        return queries, keys

    def work_list(self, heads: int, kv_heads: int, key_bytes: int, cut: Cut, device: torch.device) -> Tensor:
        """:func:`list_work` on the device."""
        name = heads, kv_heads, key_bytes, cut, device
        return self.uploaded(name, device, lambda: list_work(self, heads, kv_heads, key_bytes, cut))

    def uploaded(self, name: Any, device: torch.device, make: Callable[[], NDArray[np.int32]]) -> Tensor:
        """What ``make`` returns, on the device. Later calls with the same ``name`` get the same tensor.

        On a GPU the first call copies in the current stream, and only the order of that stream keeps the copy ahead of
        its use: use an object in one stream and one thread.
        """
        found = self._uploads.get(name)
        if found is None:
            found = self._uploads[name] = upload(torch.from_numpy(make()), device)
        return found


@dataclass(frozen=True)
class Cut:
    """How a kernel cuts the work.

    Attributes:
        rows: query tokens per work item.
        keys: keys per step.
        programs: programs that share the items (item i belongs to program i modulo this); None: one program per item,
            started in order.
    """

    rows: int
    keys: int
    programs: int | None = None


def list_work(sequences: Ragged, heads: int, kv_heads: int, key_bytes: int, cut: Cut) -> NDArray[np.int32]:
    """The work items of a prefill: each is a tile of query tokens of one query head.

    Items whose keys fit in the L2 cache together are neighbours, the longest of them first, so that the last ones to
    run are short. Where programs share the items, they are dealt out so that all programs have about as many steps.

    Args:
        key_bytes: size of one key and its value.

    Returns:
        int32 [items, 5] in the order of execution: first query row, number of query rows, first key row of the
        sequence, position of the first query row in the sequence (it sees the keys up to that position), query head.
    """
    tiles = _tiles(sequences, cut.rows)
    group = heads // kv_heads
    steps = -(-(tiles[:, 3] + tiles[:, 1]) // cut.keys)
    # the (sequence, key-value head) pairs fill the cache one after the other, those of the longest sequences first
    sequence = tiles[:, 4]
    pair_bytes = np.array([keys for _, keys in sequences.shapes], np.int64) * key_bytes
    by_length = np.argsort(-pair_bytes, kind="stable")
    before = np.empty_like(pair_bytes)
    before[by_length] = np.cumsum(pair_bytes[by_length] * kv_heads) - pair_bytes[by_length] * kv_heads
    head = np.arange(heads)
    section = (before[sequence][:, None] + pair_bytes[sequence][:, None] * (head // group)[None, :]) // _L2_BYTES
    table = np.empty((len(tiles), heads, 5), np.int64)
    table[..., :4] = tiles[:, None, :4]
    table[..., 4] = head
    cost = np.broadcast_to(steps[:, None], section.shape)
    place = np.broadcast_to(sequence[:, None], section.shape)
    order = np.lexsort((table[..., 4].ravel(), place.ravel(), -cost.ravel(), section.ravel()))
    items = table.reshape(-1, 5)[order].astype(np.int32)
    return items if cut.programs is None else _shared_out(items, cost.ravel()[order], cut.programs)


def _tiles(sequences: Ragged, rows: int) -> NDArray[np.int64]:
    """[tiles, 5]: first query row, query rows, first key row, position, sequence. A sequence's last may be short."""
    parts = []
    for index, (queries, keys) in enumerate(sequences.shapes):
        first = np.arange(0, queries, rows)
        part = np.empty((len(first), 5), np.int64)
        part[:, 0] = sequences.query_start[index] + first
        part[:, 1] = np.minimum(queries - first, rows)
        part[:, 2] = sequences.key_start[index]
        part[:, 3] = keys - queries + first
        part[:, 4] = index
        parts.append(part)
    return np.concatenate(parts)


def _shared_out(items: NDArray[np.int32], steps: NDArray[np.int64], programs: int) -> NDArray[np.int32]:
    """Reorder so that programs finish together: of every ``programs`` items, in order, the longest goes to the program
    with the least work so far, the next to the one with the next least, and so on."""
    load = np.zeros(programs, np.int64)
    share = np.empty(len(items), np.int64)  # the program of each item
    for first in range(0, len(items), programs):
        cost = steps[first : first + programs]
        down = np.argsort(-cost, kind="stable")
        idle = np.argsort(load, kind="stable")[: len(cost)]
        share[first + down] = idle
        load[idle] += cost[down] + 1  # an item takes about a step longer than its steps
    # the last round may be short: its programs get the lowest numbers
    last = share[len(items) - 1 - (len(items) - 1) % programs :]
    number = np.empty(programs, np.int64)
    number[np.concatenate([last, np.setdiff1d(np.arange(programs), last)])] = np.arange(programs)
    place = np.arange(len(items)) // programs * programs + number[share]
    result = np.empty_like(items)
    result[place] = items
    return result

"""Ragged prompts as one packed sequence of tokens: no padding, and what all of them begin with appears only once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.xattention.ragged import Ragged
from xgr_engine.xattention.upload import upload


@dataclass(frozen=True)
class PackedPrompts:
    """First the tokens that all prompts begin with (the prefix), then what is left of each user's prompt.

    Attributes:
        tokens, positions: int64 [N] token ids and their positions in the prompts.
        prefix: how many tokens are shared; 0 for a single prompt.
        lengths: [U] of the whole prompts, the prefix included.
        sequences: of the packed self-attention, the prefix first if there is one: queries are runs of ``tokens``, keys
            runs of cache rows.
        cache_rows: int64 [N] where each token's key and value belong in the cache.
        prefix_rows: int64 [U, prefix] where each user's region repeats the prefix.
        last: int64 [U] index into ``tokens`` of each prompt's last token.
    """

    tokens: Tensor
    positions: Tensor
    prefix: int
    lengths: list[int]
    sequences: Ragged
    cache_rows: Tensor
    prefix_rows: Tensor
    last: Tensor

    @property
    def cache_tokens(self) -> int:
        """Rows of the cache that the prefix and the prompts take."""
        return self.prefix + sum(self.lengths)

    @classmethod
    def of(cls, prompts: list[NDArray[np.int32]], device: torch.device, *, share: bool = True) -> PackedPrompts:
        """Pack U prompts of at least one token each.

        Args:
            share: compute only once what all prompts begin with; for causal models only.
        """
        prefix = _shared_prefix_length(prompts) if share else 0
        lengths = [len(prompt) for prompt in prompts]
        own = np.array(lengths) - prefix
        region = prefix + np.concatenate([[0], np.cumsum(lengths)])  # the shared rows come first
        head = np.arange(prefix)
        own_rows = [np.arange(start + prefix, end) for start, end in pairwise(region)]
        shared = [prefix] if prefix else []
        arrays = {
            "tokens": np.concatenate([prompts[0][:prefix], *(prompt[prefix:] for prompt in prompts)]),
            "positions": np.concatenate([head, *(np.arange(prefix, length) for length in lengths)]),
            "cache_rows": np.concatenate([head, *own_rows]),
            "prefix_rows": region[:-1, None] + head,
            "last": prefix + np.cumsum(own) - 1,
        }
        return cls(
            prefix=prefix,
            lengths=lengths,
            sequences=Ragged.of(queries=[*shared, *own.tolist()], keys=[*shared, *lengths]),
            **{name: upload(torch.from_numpy(array.astype(np.int64)), device) for name, array in arrays.items()},
        )


def _shared_prefix_length(prompts: list[NDArray[np.int32]]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    limit = min(len(prompt) for prompt in prompts) - 1
    same = np.ones(limit, bool)
    for prompt in prompts[1:]:
        same &= prompt[:limit] == prompts[0][:limit]
    return int(limit if same.all() else same.argmin())

"""Keys and values of a batch: the prompt once a user, generated tokens one slot each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVCache:
    """Buffers of one batch, all layers.

    Attributes:
        prompt_k, prompt_v: [layers, T, Hkv, D], prompts packed back to back behind ``prompt_start[0]`` rows that hold
            what all prompts begin with (each user's region repeats it, so that a user's keys are one run).
        prompt_start: int32 [U + 1] on the device; user u owns rows ``prompt_start[u] : prompt_start[u + 1]``.
        lengths: int64 [U] prompt lengths on the device; the position of a user's first generated token.
        gen_k, gen_v: [layers, U, S, Hkv, D], S slots a user. A beam finds its own tokens through its ancestor table.
    """

    prompt_k: Tensor
    prompt_v: Tensor
    prompt_start: Tensor
    lengths: Tensor
    gen_k: Tensor
    gen_v: Tensor

    @staticmethod
    def bytes_needed(
        tokens: int, users: int, slots: int, layers: int, kv_heads: int, head_dim: int, itemsize: int
    ) -> int:
        """Bytes of :meth:`allocate`: ``2 * layers * Hkv * D * itemsize * (tokens + users * slots)``."""
        return 2 * layers * kv_heads * head_dim * itemsize * (tokens + users * slots)

    @classmethod
    def allocate(
        cls,
        lengths: list[int],
        slots: int,
        *,
        shared: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Room for prompts of ``lengths`` tokens, ``slots`` generated tokens a user, and ``shared`` rows in front.

        Contents are undefined.
        """
        starts = [shared]
        for length in lengths:
            starts.append(starts[-1] + length)

        def empty(*shape: int) -> Tensor:
            return torch.empty((layers, *shape, kv_heads, head_dim), dtype=dtype, device=device)

        return cls(
            prompt_k=empty(starts[-1]),
            prompt_v=empty(starts[-1]),
            prompt_start=torch.tensor(starts, dtype=torch.int32, device=device),
            lengths=torch.tensor(lengths, dtype=torch.int64, device=device),
            gen_k=empty(len(lengths), slots),
            gen_v=empty(len(lengths), slots),
        )

"""Keys and values of a batch: the prompt once a user, generated tokens one slot each, in buffers used again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVCache:
    """Buffers for batches of up to ``users`` prompts with ``tokens`` tokens together, all layers. Contents come and go,
    addresses stay, so that a captured CUDA graph can read them.

    Attributes:
        prompt_k, prompt_v: [layers, tokens, Hkv, D], prompts packed back to back behind ``prompt_start[0]`` rows that
            hold what all prompts begin with (each user's region repeats it, so that a user's keys are one run).
        prompt_start: int32 [users + 1] on the device; user u owns rows ``prompt_start[u] : prompt_start[u + 1]``.
        lengths: int64 [users] prompt lengths on the device; the position of a user's first generated token.
        generated_k, generated_v: [layers, users * slots, Hkv, D]; slot s of user u is row ``u * slots + s``. A beam
            finds its own tokens through its ancestor table.
        slots: generated tokens a user.
    """

    prompt_k: Tensor
    prompt_v: Tensor
    prompt_start: Tensor
    lengths: Tensor
    generated_k: Tensor
    generated_v: Tensor
    slots: int

    @classmethod
    def allocate(
        cls,
        tokens: int,
        users: int,
        slots: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Room for ``users`` prompts of ``tokens`` tokens together (shared rows counted) and ``slots`` a user.

        Contents are undefined until :meth:`begin`.
        """

        def empty(rows: int) -> Tensor:
            return torch.empty((layers, rows, kv_heads, head_dim), dtype=dtype, device=device)

        return cls(
            prompt_k=empty(tokens),
            prompt_v=empty(tokens),
            prompt_start=torch.zeros(users + 1, dtype=torch.int32, device=device),
            lengths=torch.zeros(users, dtype=torch.int64, device=device),
            generated_k=empty(users * slots),
            generated_v=empty(users * slots),
            slots=slots,
        )

    @property
    def users(self) -> int:
        """Prompts there is room for."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Prompt tokens there is room for."""
        return self.prompt_k.shape[1]

    def begin(self, lengths: list[int], shared: int) -> None:
        """Start a batch of U <= ``users`` prompts behind ``shared`` rows; the places of further users stay empty."""
        starts = [shared]
        for length in lengths + [0] * (self.users - len(lengths)):
            starts.append(starts[-1] + length)
        if len(lengths) > self.users or starts[-1] > self.tokens:
            raise ValueError(
                f"{len(lengths)} prompts of {starts[-1]} tokens in a cache for {self.users}, {self.tokens}"
            )
        # from pageable memory the copy would wait for all that the device still has to do
        pinned = self.lengths.is_cuda
        self.prompt_start.copy_(torch.tensor(starts, dtype=torch.int32, pin_memory=pinned), non_blocking=True)
        known = torch.tensor(lengths, dtype=torch.int64, pin_memory=pinned)
        self.lengths[: len(lengths)].copy_(known, non_blocking=True)

    def generated(self, layer: int, users: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``users`` users' generated tokens, each [users, slots, Hkv, D]."""
        rows, shape = users * self.slots, (users, self.slots, *self.generated_k.shape[2:])
        return self.generated_k[layer, :rows].view(shape), self.generated_v[layer, :rows].view(shape)

"""Keys and values of a batch: prompts once per user, generated tokens in slots. The buffers serve batch after batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVCache:
    """Buffers of all layers for batches of up to ``users`` prompts with ``tokens`` tokens together.

    Their addresses never change, so that a captured CUDA graph can read them.

    Attributes:
        prompt_k, prompt_v: [layers, tokens, Hkv, D]. The first ``prompt_start[0]`` rows hold what all prompts begin
            with; the prompts follow back to back. Each repeats the shared beginning, so that its keys are one run.
        prompt_start: int32 [users + 1] on the device; user u owns rows ``prompt_start[u] : prompt_start[u + 1]``.
        lengths: int64 [users] prompt lengths on the device, which are the positions of the first generated tokens.
        generated_k, generated_v: [layers, users * slots, Hkv, D]; slot s of user u is row ``u * slots + s``. A beam
            finds its own tokens through its ancestor table.
        slots: generated tokens that a user has room for.
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
        """Room for ``users`` prompts of ``tokens`` tokens together, shared rows included, and ``slots`` slots per user.

        Call :meth:`begin` before use: until then the contents are undefined.
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
        """How many prompts fit."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many prompt tokens fit."""
        return self.prompt_k.shape[1]

    def begin(self, lengths: list[int], shared: int) -> None:
        """Start a batch of prompts of ``lengths`` [U] after ``shared`` rows; further places hold empty prompts.

        Raises:
            ValueError: the batch does not fit.
        """
        starts = [shared]
        for length in lengths + [0] * (self.users - len(lengths)):
            starts.append(starts[-1] + length)
        if len(lengths) > self.users or starts[-1] > self.tokens:
            raise ValueError(
                f"{len(lengths)} prompts of {starts[-1]} tokens in a cache for {self.users} prompts of {self.tokens}"
            )
        # pinned for the reason given in xattention.upload
        pinned = self.lengths.is_cuda
        self.prompt_start.copy_(torch.tensor(starts, dtype=torch.int32, pin_memory=pinned), non_blocking=True)
        known = torch.tensor(lengths, dtype=torch.int64, pin_memory=pinned)
        self.lengths[: len(lengths)].copy_(known, non_blocking=True)

    def generated(self, layer: int, users: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``users`` users' generated tokens, each [users, slots, Hkv, D]."""
        rows, shape = users * self.slots, (users, self.slots, *self.generated_k.shape[2:])
        return self.generated_k[layer, :rows].view(shape), self.generated_v[layer, :rows].view(shape)

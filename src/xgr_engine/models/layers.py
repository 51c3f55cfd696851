"""The pieces of a decoder layer, in plain torch. Norms and rotations compute in float32 whatever the storage."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from xgr_engine.models.spec import RopeSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467); the result has the dtype of ``x``."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv 2002.05202) for [..., 2 * I] holding gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class RotaryTable:
    """Cosines and sines of every position, [positions, D / 2] float32, grown on demand.

    Kept in float32 always: a table rounded to bfloat16 moves scores by 0.01 to 0.1.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._inverse = _inverse_frequencies(rope, head_dim).to(device)
        self._cos = torch.empty(0, head_dim // 2, device=device)
        self._sin = self._cos

    def reserve(self, positions: int) -> None:
        """Make rows 0..positions-1 available."""
        if positions > len(self._cos):
            # float32 products, as the training code forms them: at position 4000 float64 would differ by 1e-4 turns
            size = max(positions, 2 * len(self._cos), 256)
            angle = torch.arange(size, dtype=torch.float32, device=self._inverse.device)[:, None] * self._inverse
            self._cos, self._sin = angle.cos(), angle.sin()

    def lookup(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each ``position.shape + [D / 2]``; positions must have been reserved."""
        return self._cos[position], self._sin[position]


def _inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponent)
    return _llama3_scaled(inverse, rope) if rope.kind == "llama3" else inverse


def _llama3_scaled(inverse: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3's stretch: long wavelengths are divided by ``factor``, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inverse
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(between, blended, scaled)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864), first half against second half. x [N, heads, D]; cos, sin [N, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

"""Rotary position embedding (arXiv 2104.09864): the table of cosines and sines that the kernels read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xgr_engine.models.spec import RopeSpec


class RotaryTable:
    """Cosines and sines of every position of the context, ``cos`` and ``sin`` [positions, D / 2] float32.

    Always float32: a table rounded to bfloat16 moves scores by 0.01 to 0.1.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int, device: torch.device) -> None:
        # float32 products, as in training: at position 4000, exact ones would differ by 1e-4 turns
        angle = torch.arange(positions, dtype=torch.float32)[:, None] * _inverse_frequencies(rope, head_dim)
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)


def _inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponent)
    return _llama3_scaled(inverse, rope) if rope.kind == "llama3" else inverse


def _llama3_scaled(inverse: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3's scaling: frequencies of long wavelengths are divided by ``factor``, those of short ones kept, those in
    between blended."""
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

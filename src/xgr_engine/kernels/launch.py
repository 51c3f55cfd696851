"""Small facts that a kernel launch needs. Triton's own ``cdiv`` and ``next_power_of_2`` take 2 us per call."""

from __future__ import annotations

import functools
import math

import torch

LOG2E = math.log2(math.e)  # softmax in base 2: exp(x) = exp2(x * LOG2E), and exp2 is what the hardware computes


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` >= 1."""
    return 1 << (n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 if the device is not one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> int:
    """Major compute capability of a GPU: 8 Ampere and Ada, 9 Hopper; 0 if the device is not one."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


# Up to so many rows, two kernels are as good as the fused one: 256 rows of Qwen3-1.7B, 56 layers' steps, take 6.0 ms
# with two and 6.2 with one (H200).
FEW_SWIGLU_ROWS = 256


def gate_up_rows(device: torch.device, dtype: torch.dtype, hidden: int, width: int, *, bias: bool) -> int | None:
    """The most rows whose gate and up products ``kernels.triton.swiglu`` ever stores; None: those of all rows.

    Args:
        hidden: width of the rows that come in (H).
        width: width of the rows that go out (I).
        bias: whether the products have one.
    """
    fused = is_hopper(device) and dtype in (torch.bfloat16, torch.float16) and hidden % 8 == width % 8 == 0
    return FEW_SWIGLU_ROWS if fused and not bias else None


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9."""
    return capability(device) == 9

"""Small facts of a launch. Triton's own ``cdiv`` and ``next_power_of_2`` pass through its language: 2 us a call."""

from __future__ import annotations

import functools

import torch


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` >= 1."""
    return 1 << (n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs that a device runs side by side; 1 where it is no GPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> int:
    """Major compute capability of a GPU: 8 Ampere and Ada, 9 Hopper; 0 where the device is none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


# Up to here two kernels are as good: 256 rows of Qwen3-1.7B, 56 layers' steps, 6.0 ms with two and 6.2 with one (H200).
FEW_SWIGLU_ROWS = 256


def gate_up_rows(device: torch.device, dtype: torch.dtype, hidden: int, width: int, *, bias: bool) -> int | None:
    """Most rows whose gate and up products the ``swiglu`` of ``kernels.triton`` ever stores; None: those of all rows.

    Args:
        hidden, width: of the rows that come in and that go out.
        bias: the products have one.
    """
    fused = is_hopper(device) and dtype in (torch.bfloat16, torch.float16) and hidden % 8 == width % 8 == 0
    return FEW_SWIGLU_ROWS if fused and not bias else None


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9."""
    return capability(device) == 9

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


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9."""
    return capability(device) == 9

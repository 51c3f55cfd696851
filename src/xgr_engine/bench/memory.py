"""Peak memory of the device and of the process over a stretch of code."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """Bytes. ``device`` is None without a GPU; ``host`` None where the system does not tell.

    Attributes:
        device, host: the highest use during the stretch; device_before, host_before: the use when it began.
    """

    device_before: int | None = None
    device: int | None = None
    host_before: int | None = None
    host: int | None = None

    @property
    def device_own(self) -> int | None:
        """What came on top of what was there."""
        return None if self.device is None or self.device_before is None else self.device - self.device_before

    @property
    def host_own(self) -> int | None:
        return None if self.host is None or self.host_before is None else max(0, self.host - self.host_before)


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure a stretch; the figures stand when it ends, also when it raises."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        peak.device_before = int(torch.cuda.memory_allocated(device))
    reset = _reset_host_peak()
    peak.host_before = _status("VmRSS")
    try:
        yield peak
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak.device = int(torch.cuda.max_memory_allocated(device))
        peak.host = _status("VmHWM") if reset else None


def free_device_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that nobody has; None where the device is none."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more, to the device and to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has this
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _reset_host_peak() -> bool:
    """Linux lets a process forget its highest resident size."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)

"""What this machine can reach, measured now, and what else was running meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from xgr_engine.bench.foreign.packages import installed_packages
from xgr_engine.system import cores, gpus, machine

_STAT = Path("/proc/stat")
_GPU_FIELDS = "clocks.sm,clocks.max.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
# Those of the driver's clock event reasons (a bit mask) that slow a card down.
_SLOWDOWN = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
_OTHER_LOAD = 0.15  # cores kept busy by other programs, as a share of all cores, that are worth a warning


@dataclass(frozen=True)
class Ceilings:
    """Sustained matrix product in the dtype of the run, and copy (read plus write)."""

    tflops: float
    tbs: float
    matmul: str
    copy: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(device: torch.device, dtype: torch.dtype, seconds: float) -> Ceilings:
    """Run a large square product and a large copy for ``seconds`` each.

    The first half is warm-up. Of the second half the median counts on a GPU, whose clocks are then those under load. On
    a CPU the fastest tenth counts: others that share the cores slow single runs down, and a ceiling is what can be
    reached.
    """
    size, copied = (8192, 1 << 32) if device.type == "cuda" else (1024, 1 << 27)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        copied = min(copied, int(free) // 4)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = _sustained(lambda: torch.mm(a, b), device, seconds)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = _sustained(lambda: target.copy_(source), device, seconds)
    return Ceilings(
        tflops=2 * size**3 / product / 1e12,
        tbs=2 * source.nbytes / copy / 1e12,
        matmul=f"{size} x {size} x {size}, {str(dtype).removeprefix('torch.')}",
        copy=f"{source.nbytes / 1e6:,.0f} MB, read and written",
    )


def _sustained(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 3:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    later = sorted(times[len(times) // 2 :])
    return later[len(later) // (2 if device.type == "cuda" else 10)]


@dataclass
class Watch:
    """Watches clocks and other load while something is measured. Use as a context manager.

    Attributes:
        warnings: what a reader of the figures should know, once the stretch has ended.
        facts: clocks, power and load as they were.
    """

    device: torch.device
    interval_s: float = 1.0
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        self._begin = time.monotonic()
        self._own = _own_seconds()
        self._all = _busy_seconds()
        self._samples: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self.device.type == "cuda" and shutil.which("nvidia-smi"):
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=20)
        self._judge_cpu(time.monotonic() - self._begin)
        if self.device.type == "cuda":
            self._judge_gpu()

    def _look(self) -> None:
        while not self._stop.wait(self.interval_s):
            if (sample := gpu_state(self.device.index or 0)) is not None:
                self._samples.append(sample)

    def _judge_cpu(self, seconds: float) -> None:
        now = _busy_seconds()
        self.facts["load_average"] = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
        if self._all is None or now is None or seconds <= 0:
            return
        others = max(0.0, (now - self._all - (_own_seconds() - self._own)) / seconds)
        self.facts["other_busy_cores"] = round(others, 2)
        if others > _OTHER_LOAD * cores():
            self.warnings.append(
                f"other programs kept {others:.1f} of {cores()} CPU cores busy while this was measured"
            )

    def _judge_gpu(self) -> None:
        if not self._samples:
            self.facts["gpu_clocks"] = None
            self.warnings.append("the GPU's clocks could not be read, so throttling would have gone unnoticed")
            return
        clocks = sorted(sample["clock"] for sample in self._samples)
        reasons = 0
        for sample in self._samples:
            reasons |= int(sample["reasons"])
        slowed = [name for bit, name in _SLOWDOWN.items() if reasons & bit]
        self.facts["gpu_clocks"] = {
            "median_mhz": clocks[len(clocks) // 2],
            "lowest_mhz": clocks[0],
            "highest_possible_mhz": self._samples[0]["clock_limit"],
            "highest_power_w": max(sample["power"] for sample in self._samples),
            "highest_temperature_c": max(sample["temperature"] for sample in self._samples),
            "slowed_by": slowed,
        }
        if slowed:
            self.warnings.append(f"the GPU lowered its clocks: {', '.join(slowed)}")
        others = other_gpu_processes()
        self.facts["other_gpu_processes"] = others
        if others:
            self.warnings.append(f"{others} other process(es) hold GPU memory")


def gpu_state(index: int) -> dict[str, float] | None:
    """Clock and its limit (MHz), power (W), temperature (C) and slow-down bits; None where the driver does not tell."""
    answer = _nvidia_smi("--id", str(index), f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
    parts = [part.strip() for part in (answer or "").split(",")]
    if len(parts) != 5:
        return None
    try:
        clock, limit, power, temperature = (float(part) for part in parts[:4])
        return {
            "clock": clock,
            "clock_limit": limit,
            "power": power,
            "temperature": temperature,
            "reasons": float(int(parts[4], 16)),
        }
    except ValueError:
        return None


def other_gpu_processes() -> int | None:
    """Processes beside this one that compute on a GPU, as far as the driver names them."""
    answer = _nvidia_smi("--query-compute-apps=pid", "--format=csv,noheader")
    if answer is None:
        return None
    # in a container the driver names process ids of the host, ours among them: one entry may be this process
    return max(0, len([line for line in answer.splitlines() if line.strip().isdigit()]) - 1)


def _nvidia_smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _own_seconds() -> float:
    """CPU seconds of this process and of those that it started and waited for, such as engines of other packages."""
    return sum(os.times()[:4])


def _busy_seconds() -> float | None:
    """CPU seconds that all cores were busy since the machine started."""
    try:
        fields = [int(part) for part in _STAT.read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return None
    idle = fields[3] + (fields[4] if len(fields) > 4 else 0)
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Machine and versions for the report."""
    facts = asdict(machine(gpus(with_torch=device.type == "cuda")))
    return {
        **facts,
        "versions": facts["versions"] | installed_packages(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else facts["cpu"],
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }

"""Facts about the machine and the installed packages, for ``xgr doctor``, run manifests and memory plans.

Nothing in here imports torch unless ``gpus(with_torch=True)`` asks for it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Libraries that decide what a run computes, for manifests.
_LIBRARIES = ("torch", "triton", "numpy", "pyarrow", "polars", "tokenizers", "safetensors", "transformers")
# A cgroup without a limit says "max" (v2) or a number near 2**63 (v1).
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Gpu:
    """One GPU: name, memory in bytes, driver version, and compute capability where torch was asked."""

    name: str
    memory_bytes: int
    driver: str | None = None
    capability: str | None = None


@dataclass(frozen=True)
class Gpus:
    """The GPUs that can be used; ``reason`` says why there are none, ``cuda`` is the version torch was built for."""

    found: tuple[Gpu, ...]
    reason: str = ""
    cuda: str | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory this process may use, and how many are free now; a container's limit is obeyed."""

    total: int
    available: int
    limited_by_cgroup: bool


@dataclass(frozen=True)
class Package:
    """A declared dependency beside what is installed (``installed`` is None when it is missing)."""

    name: str
    wanted: str
    installed: str | None
    fits: bool
    extra: str | None = None


@dataclass(frozen=True)
class Machine:
    """What a manifest records. Versions only of packages that are installed; ``gpus`` is None where nobody asked."""

    python: str
    system: str
    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...] | None
    versions: dict[str, str]


def let_waiting_threads_sleep() -> None:
    """Call it before torch is imported: waiting OpenMP threads then soon sleep, unless the user says otherwise.

    By default GNU's spin for milliseconds, which is ruinous beside other work on the same cores: with 18 processes on 2
    cores, 32 users of the fixture model had not ended after 120 s; asleep at once they took 2.6 s. But waking costs as
    much as a small product: on two quiet cores (W 50) asleep at once 48 users/s, after 2000 spins 82, without end 69;
    with 6 busy processes beside them 9 asleep at once, 11 after 2000 spins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def keep_few_kernels() -> None:
    """Call it before torch is imported: matrix products of shapes seen before are kept for 64 shapes, not 1024.

    Every batch has shapes of its own, and on a CPU both torch and oneDNN below it keep code and buffers of the shapes
    they have seen, up to half a megabyte each: a job's memory grew with its batches. Layers and steps of one batch
    share their shapes, of which there are some twenty. The variables in the environment overrule it.
    """
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "64")


def machine(found: Gpus | None = None) -> Machine:
    """Machine and versions for a manifest, with the GPUs that :func:`gpus` found."""
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cores=cores(),
        memory_bytes=memory().total,
        gpus=None if found is None else tuple(gpu.name for gpu in found.found),
        versions={name: installed for name in ("xgr", *_LIBRARIES) if (installed := version(name))},
    )


def version(distribution: str) -> str | None:
    """Installed version of a distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def packages() -> list[Package]:
    """The dependencies that xgr declares for this platform, extras included, beside what is installed.

    Empty where xgr runs from its source tree without being installed.
    """
    from packaging.requirements import Requirement

    try:
        declared = metadata.requires("xgr") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in declared:
        requirement = Requirement(line)
        extra = next((name for name in ("hf", "dev") if _applies(requirement, name)), None)
        needed = _applies(requirement, "")
        if requirement.name == "xgr" or not (needed or extra):
            continue
        installed = version(requirement.name)
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        found.append(Package(requirement.name, str(requirement.specifier), installed, fits, None if needed else extra))
    return found


def cpu_name() -> str:
    """Model name of the CPU, or the machine type where the system does not tell."""
    for line in _lines(_CPUINFO):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use: its affinity and its container's quota, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders():
        quota = (_first_line(folder / "cpu.max") or "max").split()
        if quota[0].isdigit() and len(quota) == 2:
            usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    return usable


def memory() -> Memory:
    """Main memory of the machine, or of the container where that is less."""
    table = {key: value for key, _, value in (line.partition(":") for line in _lines(_MEMINFO))}
    if "MemTotal" not in table:
        # No /proc (macOS): the total is known, what is free is not.
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Memory(total, total, limited_by_cgroup=False)
    total = int(table["MemTotal"].split()[0]) * 1024
    available = int(table.get("MemAvailable", table["MemTotal"]).split()[0]) * 1024
    limited = False
    for limit, used in _cgroup_memory():
        if limit < total:
            total, limited = limit, True
        available = min(available, max(0, limit - used))
    return Memory(total, available, limited)


def gpus(*, with_torch: bool) -> Gpus:
    """GPUs that can be used, or why none can.

    Args:
        with_torch: ask torch (imports it: seconds) whether CUDA works; else ask ``nvidia-smi`` what is there.
    """
    return _gpus_by_torch() if with_torch else _gpus_by_driver()


def _gpus_by_torch() -> Gpus:
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        return Gpus((), "torch is built for the CPU alone")
    if not torch.cuda.is_available():
        try:
            torch.zeros(1, device="cuda")  # raises with the reason
        except (RuntimeError, AssertionError) as error:
            return Gpus((), str(error).splitlines()[0], cuda)
        return Gpus((), "torch sees no CUDA device", cuda)
    driver = next((gpu.driver for gpu in _gpus_by_driver().found), None)
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append(Gpu(properties.name, properties.total_memory, driver, capability))
    return Gpus(tuple(found), "", cuda)


def _gpus_by_driver() -> Gpus:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Gpus((), "CUDA_VISIBLE_DEVICES hides every GPU")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Gpus((), "no NVIDIA driver found (nvidia-smi is not on the PATH)")
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stdout", "") or "").strip()
        return Gpus((), f"nvidia-smi failed: {output.splitlines()[0] if output else error}")
    found = []
    for line in answer.stdout.splitlines():
        name, mebibytes, driver = (part.strip() for part in line.split(","))
        found.append(Gpu(name, int(mebibytes) << 20 if mebibytes.isdigit() else 0, driver))
    return Gpus(tuple(found), "" if found else "nvidia-smi lists no GPU")


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _cgroup_folders() -> Iterator[Path]:
    """Folders of this process's cgroup (v2), innermost first; limits of every one of them count."""
    for line in _lines(_OWN_CGROUP):
        if line.startswith("0::"):
            folder = _CGROUP_ROOT / line.removeprefix("0::").strip().lstrip("/")
            while folder != _CGROUP_ROOT and _CGROUP_ROOT in folder.parents:
                yield folder
                folder = folder.parent
    yield _CGROUP_ROOT


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes for every limit above this process. Page cache that can be dropped is not used."""
    for folder in _cgroup_folders():
        yield from _limit_and_use(folder / "memory.max", folder / "memory.current", folder / "memory.stat")
    old = _CGROUP_ROOT / "memory"
    yield from _limit_and_use(old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat")


def _limit_and_use(limit_file: Path, usage_file: Path, stat_file: Path) -> Iterator[tuple[int, int]]:
    limit = _first_line(limit_file)
    if limit is None or not limit.isdigit() or int(limit) > _UNLIMITED:
        return
    stats = dict(line.split(" ", 1) for line in _lines(stat_file) if " " in line)
    droppable = int(stats.get("inactive_file", stats.get("total_inactive_file", "0")))
    used = int(_first_line(usage_file) or "0")
    yield int(limit), max(0, used - droppable)


def _first_line(path: Path) -> str | None:
    return next(iter(_lines(path)), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def python_fits() -> bool:
    """Whether this interpreter is one that xgr is tested with (3.11 to 3.13)."""
    return (3, 11) <= sys.version_info[:2] <= (3, 13)

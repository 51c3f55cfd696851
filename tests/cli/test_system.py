"""Facts about machine and packages, from planted system files."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from xgr_engine import system

GIB = 1 << 30


@pytest.fixture
def fake_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB of which 40 are free, in no container yet."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n")
    (tmp_path / "own_cgroup").write_text("0::/pod/box\n")
    (tmp_path / "cgroup" / "pod" / "box").mkdir(parents=True)
    monkeypatch.setattr(system, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(system, "_OWN_CGROUP", tmp_path / "own_cgroup")
    monkeypatch.setattr(system, "_CGROUP_ROOT", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def test_memory_without_a_limit(fake_system: Path) -> None:
    (fake_system / "memory.max").write_text("max\n")
    assert system.memory() == system.Memory(64 * GIB, 40 * GIB, limited_by_cgroup=False)


@pytest.mark.parametrize("folder", ["pod/box", "pod", "."])
def test_memory_limit_of_any_enclosing_cgroup_counts(fake_system: Path, folder: str) -> None:
    place = fake_system / folder
    (place / "memory.max").write_text(f"{8 * GIB}\n")
    (place / "memory.current").write_text(f"{5 * GIB}\n")
    (place / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    # 5 GiB are used, of which 2 are page cache that the kernel gives back.
    assert system.memory() == system.Memory(8 * GIB, 5 * GIB, limited_by_cgroup=True)


def test_old_cgroups(fake_system: Path) -> None:
    (fake_system / "memory").mkdir()
    (fake_system / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (fake_system / "memory" / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    assert system.memory() == system.Memory(4 * GIB, 3 * GIB, limited_by_cgroup=True)
    (fake_system / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert not system.memory().limited_by_cgroup


def test_cores_obey_the_quota(fake_system: Path) -> None:
    unlimited = system.cores()
    assert unlimited == len(os.sched_getaffinity(0))
    (fake_system / "pod" / "cpu.max").write_text("150000 100000\n")
    assert system.cores() == 1
    (fake_system / "pod" / "cpu.max").write_text("max 100000\n")
    assert system.cores() == unlimited


def test_packages_are_judged_against_the_declared_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["rich>=13.7", "typer>=999", "no-such-package>=1", 'torch; platform_system == "Plan 9"']
    declared += ['pytest>=8; extra == "dev"', 'xgr[hf]; extra == "dev"', 'absent>=1; extra == "hf"']
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    found = {package.name: package for package in system.packages()}
    assert set(found) == {"rich", "typer", "no-such-package", "pytest", "absent"}
    assert found["rich"].fits and found["rich"].extra is None
    assert not found["typer"].fits and found["typer"].installed is not None
    assert not found["no-such-package"].fits and found["no-such-package"].installed is None
    assert found["pytest"].extra == "dev" and found["absent"].extra == "hf"


def test_source_tree_that_is_not_installed_has_no_declared_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert system.packages() == []


def test_machine_is_known_without_importing_torch() -> None:
    code = "import sys; from xgr_engine import system; m = system.machine(); print(m.cores, m.versions['torch']); "
    code += "assert 'torch' not in sys.modules and m.memory_bytes > 2**20"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == metadata.version("torch")


def _fake_driver_tool(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_gpus_as_the_driver_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi" in system.gpus(with_torch=False).reason
    _fake_driver_tool(tmp_path, 'echo "NVIDIA H200, 143771, 570.10"')
    assert system.gpus(with_torch=False).found == (system.Gpu("NVIDIA H200", 143771 << 20, "570.10"),)
    _fake_driver_tool(tmp_path, 'echo "Driver/library version mismatch"; exit 18')
    assert "mismatch" in system.gpus(with_torch=False).reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in system.gpus(with_torch=False).reason


def test_torch_without_cuda_says_why() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert system.gpus(with_torch=True).reason


_GROWTH = """
import sys
from xgr_engine.system import keep_few_kernels
keep_few_kernels()
import torch
from xgr_engine.kernels.linear import linear

def products(first, last):
    for rows in range(first, last):
        linear(torch.zeros(rows, 64), torch.zeros(48, 64))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.set_num_threads(1)
with torch.inference_mode():
    products(1000, 1100)
    before = resident()
    products(1100, 1500)
print((resident() - before) / 1e6)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read the resident memory")
def test_memory_does_not_grow_with_the_shapes_of_batches() -> None:
    """400 shapes took 280 MB with the libraries' own limits (on a CPU where oneDNN compiles a kernel a shape)."""
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _GROWTH], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60

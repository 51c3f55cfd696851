"""Check that this machine can run xgr: Python, packages, GPU, memory, write access.

Exit code 1 if something that every run needs is broken. Having no GPU is not an error: xgr then computes on the CPU.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xgr_cli.output import Output

if TYPE_CHECKING:
    from xgr_engine.system import Gpus

EXAMPLES = ("xgr doctor", "xgr doctor --json")


@dataclass(frozen=True)
class Check:
    """One line of the report: ``fail`` makes the exit code 1, ``warn`` does not."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def doctor(output: Output) -> int:
    """Run every check, also after one has failed."""
    from xgr_engine import system

    checks = [_python(), *_packages(), _torch()]
    gpus = _gpus() if checks[-1].state == "ok" else system.gpus(with_torch=False)
    checks += [_gpu(gpus), _triton(gpus), _memory(), _cores(), *_write_access()]
    broken = any(check.state == "fail" for check in checks)
    record = {
        "ok": not broken,
        "checks": [asdict(check) for check in checks],
        "machine": asdict(system.machine(gpus)),
        "gpus": asdict(gpus),
    }
    rows = [(check.name, check.state, check.found, check.advice) for check in checks]
    output.result(record, lambda out: out.table(["check", "state", "found", "what to do"], rows))
    return 1 if broken else 0


def _python() -> Check:
    import platform

    from xgr_engine.system import python_fits

    state: Literal["ok", "warn"] = "ok" if python_fits() else "warn"
    return Check("python", state, platform.python_version(), "" if state == "ok" else "use Python 3.11, 3.12 or 3.13")


def _packages() -> list[Check]:
    """One line for all packages that fit, one more for each that does not. Extras are judged only if installed."""
    from xgr_engine.system import packages

    fitting, checks = 0, []
    for package in packages():
        if package.fits:
            fitting += 1
        elif package.extra is None:
            found = package.installed or "missing"
            advice = f"install {package.name}{package.wanted}"
            checks.append(Check(f"package {package.name}", "fail", found, advice))
        elif package.installed is not None:
            advice = f"the extra [{package.extra}] needs {package.name}{package.wanted}"
            checks.append(Check(f"package {package.name}", "warn", package.installed, advice))
    if fitting == 0 and not checks:
        return [Check("packages", "warn", "not checked: xgr runs from its source", "install it: pip install -e .")]
    return [Check("packages", "ok", f"{fitting} as declared"), *checks]


def _torch() -> Check:
    """Torch can be imported and computes."""
    try:
        import torch

        right = bool((torch.ones(2, 2) @ torch.ones(2, 2)).sum() == 8)
    except Exception as error:  # a broken installation can raise anything
        return Check("torch", "fail", f"{type(error).__name__}: {error}", "install torch again")
    if not right:
        return Check("torch", "fail", f"{torch.__version__}: computes wrong results", "install torch again")
    return Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _gpus() -> Gpus:
    from xgr_engine import system

    return system.gpus(with_torch=True)


def _gpu(gpus: Gpus) -> Check:
    if not gpus.found:
        advice = "fine for CPU runs (--device cpu); for a GPU: a driver, and a CUDA build of torch"
        return Check("gpu", "warn", f"none: {gpus.reason}", advice)
    names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in gpus.found)
    return Check("gpu", "ok", f"{names}, driver {gpus.found[0].driver or 'unknown'}, CUDA {gpus.cuda or 'unknown'}")


def _triton(gpus: Gpus) -> Check:
    try:
        triton = importlib.import_module("triton")
    except Exception as error:  # a broken installation can raise anything
        advice = "needed on a GPU: install triton" if gpus.found else "only needed on a GPU"
        return Check("triton", "fail" if gpus.found else "warn", f"{type(error).__name__}: {error}", advice)
    return Check("triton", "ok", str(triton.__version__))


def _memory() -> Check:
    from xgr_engine.system import memory

    facts = memory()
    limit = ", limited by the container" if facts.limited_by_cgroup else ""
    found = f"{facts.available / 2**30:.1f} GiB free of {facts.total / 2**30:.1f} GiB{limit}"
    if facts.available < 1 << 30:
        return Check("memory", "warn", found, "less than 1 GiB is free: use a small --max-memory")
    return Check("memory", "ok", found)


def _cores() -> Check:
    from xgr_engine.system import cores, cpu_name

    return Check("cpu", "ok", f"{cores()} cores, {cpu_name()}")


def _write_access() -> list[Check]:
    """Output goes to the working directory unless told otherwise; compiled kernels (GPU) to Triton's cache."""
    return [
        _writable("working directory", Path.cwd(), "fail", "change to a directory that can be written"),
        _writable("kernel cache", _kernel_cache(), "warn", "for GPU runs: point TRITON_CACHE_DIR elsewhere"),
    ]


def _kernel_cache() -> Path:
    """Where Triton keeps compiled kernels. Without HOME there is no home directory to put them in."""
    given = os.environ.get("TRITON_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("TRITON_HOME") or _home()) / ".triton" / "cache"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def _writable(name: str, folder: Path, otherwise: Literal["warn", "fail"], advice: str) -> Check:
    """A file can be made in the folder, or in the nearest parent that exists."""
    existing: Path = next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check(name, "ok", f"{folder} can be written")
    except OSError as error:
        return Check(name, otherwise, f"{folder}: {error.strerror}", advice)

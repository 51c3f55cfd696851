"""Packages that contenders drive and that are not part of xgr: where they are, and which versions are known."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from xgr_engine.system import version


@dataclass(frozen=True)
class Package:
    """A package that a contender drives.

    Attributes:
        name: of the distribution.
        wanted: versions whose interface the adapter knows.
        install: the command that installs it.
        variable: environment variable with a Python interpreter that has it; empty where it must be our own.
    """

    name: str
    wanted: str
    install: str
    variable: str = ""

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        return os.environ.get(self.variable, "") or sys.executable

    def installed(self) -> str | None:
        """Its version, without importing it; None where it is missing."""
        if self.python == sys.executable:
            return version(self.name)
        code = f"from importlib.metadata import version; print(version({self.name!r}))"
        try:
            done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    def missing(self) -> str | None:
        """None, or why it cannot be used and what to do."""
        from packaging.specifiers import SpecifierSet

        found = self.installed()
        elsewhere = f" into an environment of its own, and set {self.variable} to its python" if self.variable else ""
        if found is None:
            where = "" if self.python == sys.executable else f" for {self.python} ({self.variable})"
            return f"{self.name} is not installed{where}: {self.install}{elsewhere}"
        if not SpecifierSet(self.wanted).contains(found, prereleases=True):
            return f"{self.name} {found} is installed, but the adapter needs {self.wanted}: {self.install}{elsewhere}"
        return None


# Written from the sources of FlashInfer 0.7.4, FlashRec 0.1.2 and vLLM 0.33.0; what is called of FlashInfer is the same
# in 0.2.5, 0.4.1, 0.6.4, 0.6.18 and 0.7.2, and of vLLM in 0.10.2. FlashRec 0.1.2 allows FlashInfer below 0.7 alone.
FLASHINFER = Package("flashinfer-python", ">=0.2.5,<0.8", "pip install flashinfer-python")
FLASHREC = Package("flashrec", ">=0.1.2,<0.2", "pip install flashrec", "XGR_FLASHREC_PYTHON")
VLLM = Package("vllm", ">=0.10.2,<0.40", "pip install vllm", "XGR_VLLM_PYTHON")


def installed_packages() -> dict[str, str]:
    """Versions of those that are there, for the machine's record."""
    found = {package.name: package.installed() for package in (FLASHINFER, FLASHREC, VLLM)}
    return {name: text for name, text in found.items() if text is not None}

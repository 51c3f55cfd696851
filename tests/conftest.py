"""What all tests share: the fixture data's place, quiet threads, and an environment without the user's settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before torch is imported: several test processes on two cores must not fight over threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Without a GPU, Triton kernels run in its interpreter, which has to be chosen before anything imports them.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Variables that steer the tests themselves, not the command line.
_KEPT = {"XGR_TEST_DATA"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine lacks."""
    data = os.environ.get("XGR_TEST_DATA")
    no_data = pytest.mark.skip(reason="XGR_TEST_DATA names no directory with the shared fixture data")
    for item in items:
        if item.get_closest_marker("shared_data") and not (data and Path(data).is_dir()):
            item.add_marker(no_data)
        if item.get_closest_marker("cuda") and not _cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory with the fixture catalog, users and models (mark the test ``shared_data``)."""
    return Path(os.environ["XGR_TEST_DATA"])


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own XGR_* variables and colour wishes must not change what tests see."""
    for name in list(os.environ):
        if (name.startswith("XGR_") and name not in _KEPT) or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)

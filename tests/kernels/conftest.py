"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before Triton decorates anything."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def poisoned_memory():
    """``torch.empty`` gives NaN, so that a result nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # a GPU has operators without such a form
    yield
    torch.use_deterministic_algorithms(False)

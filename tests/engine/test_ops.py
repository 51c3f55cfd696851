"""Which kernels a model gets."""

from __future__ import annotations

import logging

import pytest
import torch

from xgr_engine.errors import BackendUnavailableError, UsageError
from xgr_engine.models import ops


def test_a_fall_back_to_plain_torch_is_said_and_a_name_is_taken_literally(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> ops.Ops:
        raise BackendUnavailableError("the Triton kernels cannot be loaded", why="No module named 'triton'")

    monkeypatch.setattr(ops, "triton_ops", missing)
    gpu = torch.device("cuda")
    with caplog.at_level(logging.WARNING, logger="xgr_engine"):
        assert ops.choose_ops(torch.device("cpu")).name == "reference"
        assert ops.choose_ops(gpu, "reference").name == "reference"
        assert not caplog.messages
        assert ops.choose_ops(gpu).name == "reference"
    assert caplog.messages == [
        "the Triton kernels cannot be loaded: No module named 'triton'; using plain torch, which is slower"
    ]
    with pytest.raises(BackendUnavailableError, match="cannot be loaded"):
        ops.choose_ops(gpu, "triton")


def test_triton_on_a_cpu_and_unknown_names_are_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="need a GPU"):
        ops.choose_ops(torch.device("cpu"), "triton")
    with pytest.raises(UsageError, match="auto, reference or triton"):
        ops.choose_ops(torch.device("cpu"), "cuda")

"""Which implementation of the kernels a model runs on: plain torch (the definition) or Triton (the GPU path)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from xgr_engine.errors import BackendUnavailableError, UsageError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ops:
    """What a model computes besides plain matrix products, in one implementation.

    Signatures and shapes are those of ``kernels.reference`` and ``xattention.reference``.
    """

    name: str
    add_rms_norm: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    rope_and_store: Callable[..., Tensor]
    beam_attention: Callable[..., Tensor]
    prompt_attention: Callable[..., Tensor]
    vocabulary_logsumexp: Callable[..., Tensor]
    prefill_scope: Callable[[], AbstractContextManager[None]] = nullcontext  # to be entered around a whole prefill


def reference_ops() -> Ops:
    """Plain torch, on any device."""
    from xgr_engine.kernels import reference as elementwise
    from xgr_engine.xattention import reference as attention

    return Ops(
        name="reference",
        add_rms_norm=elementwise.add_rms_norm,
        swiglu=elementwise.swiglu,
        rope_and_store=elementwise.rope_and_store,
        beam_attention=attention.beam_attention,
        prompt_attention=attention.prompt_attention,
        vocabulary_logsumexp=elementwise.vocabulary_logsumexp,
    )


def triton_ops() -> Ops:
    """Triton kernels.

    Raises:
        BackendUnavailableError: triton is not installed.
    """
    try:
        from xgr_engine.kernels import triton as elementwise
        from xgr_engine.xattention import triton as attention
    except ImportError as error:
        raise BackendUnavailableError(
            "the Triton kernels cannot be loaded", why=str(error), hint="install triton, or use the reference kernels"
        ) from error
    from xgr_engine.xattention import prefill

    return Ops(
        name="triton",
        add_rms_norm=elementwise.add_rms_norm,
        swiglu=elementwise.swiglu,
        rope_and_store=elementwise.rope_and_store,
        beam_attention=attention.beam_attention,
        prompt_attention=prefill.prompt_attention,
        vocabulary_logsumexp=elementwise.vocabulary_logsumexp,
        prefill_scope=prefill.preferred_kernels,
    )


def choose_ops(device: torch.device, wanted: str = "auto") -> Ops:
    """The kernels for a device.

    Args:
        wanted: ``auto``: Triton on a GPU, or plain torch with a warning if Triton is missing; plain torch elsewhere.
            ``triton`` or ``reference``: that and nothing else.

    Raises:
        UsageError: no such implementation.
        BackendUnavailableError: the named one cannot run on this device.
    """
    if wanted not in ("auto", "reference", "triton"):
        raise UsageError(f"kernels {wanted}: must be auto, reference or triton")
    if wanted == "reference" or (wanted == "auto" and device.type != "cuda"):
        return reference_ops()
    if device.type != "cuda":
        raise BackendUnavailableError(
            f"the Triton kernels need a GPU, but this model is on {device}", hint="use the reference kernels on a CPU"
        )
    try:
        return triton_ops()
    except BackendUnavailableError as error:
        if wanted == "triton":
            raise
        _LOG.warning("%s: %s; using plain torch, which is slower", error.what, error.why)
        return reference_ops()

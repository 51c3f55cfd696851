"""FlashAttention-3 for prompts (arXiv 2407.08608), where a package that contains it is installed.

Neither package is required: ``flash_attn_interface`` is what the authors' build for Hopper GPUs installs, and
``fa3_fwd_interface`` a smaller one with the forward pass alone (``pip install fa3-fwd``).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xgr_engine.errors import BackendUnavailableError
from xgr_engine.kernels.launch import is_hopper
from xgr_engine.xattention import reference
from xgr_engine.xattention.ragged import Ragged

PACKAGES = ("flash_attn_interface", "fa3_fwd_interface")
_TOLERANCE = 1e-2  # of the trial call, relative; bfloat16 alone costs 4e-3
_LOG = logging.getLogger(__name__)


def covers(q: Tensor) -> bool:
    """Whether FlashAttention-3 can run a call: a Hopper GPU, bfloat16, D of 64 or 128, and a package that works."""
    return q.dtype == torch.bfloat16 and q.shape[2] in (64, 128) and works(q.device)


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float) -> Tensor:
    """As :func:`xgr_engine.xattention.reference.prompt_attention`, for inputs that it :func:`covers`.

    Raises:
        BackendUnavailableError: no installed package contains FlashAttention-3.
    """
    name, call = _entry()
    if call is None:
        raise BackendUnavailableError(
            "FlashAttention-3 is not installed", why=name, hint="pip install fa3-fwd, or leave the choice open"
        )
    # The kernel reads whole tiles. What lies after the last key is cut off here, so that it is read as zeros.
    k, v = (t[: sequences.key_start[-1]] for t in (k, v))
    result = call(
        *(q, k, v, *sequences.offsets(q.device), *sequences.longest),
        softmax_scale=scale,
        causal=True,
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result  # some versions give the log-sum-exp as well
    return out


@functools.cache
def works(device: torch.device) -> bool:
    """Whether a trial call on the device gives the right numbers. A package that fails logs a warning."""
    if not is_hopper(device) or _entry()[1] is None:
        return False
    try:
        error = _trial(device)
    except torch.OutOfMemoryError:  # says nothing about the package
        raise
    except Exception as problem:  # whatever a foreign binary raises: it must not end a job that can do without
        _LOG.warning("%s: a trial call failed (%s); FlashAttention-3 is not used", _entry()[0], problem)
        return False
    if not error < _TOLERANCE:
        _LOG.warning("%s: a trial call was wrong by %.1e; FlashAttention-3 is not used", _entry()[0], error)
        return False
    return True


def _trial(device: torch.device) -> float:
    """Relative error over two sequences, one of them with a prefix."""
    generator = torch.Generator(device).manual_seed(0)
    sequences = Ragged.of(queries=[70, 200], keys=[70, 300])
    q, k, v = (
        torch.randn((rows, heads, 64), generator=generator, device=device).bfloat16()
        for rows, heads in ((270, 4), (370, 2), (370, 2))
    )
    got = prompt_attention(q, k, v, sequences, 0.125).float()
    expected = reference.prompt_attention(q.float(), k.float(), v.float(), sequences, 0.125)
    return float((got - expected).norm() / expected.norm())


@functools.cache
def _entry() -> tuple[str, Callable[..., Any] | None]:
    """The first package that can be imported and its function for ragged sequences; or why there is none, and None."""
    reasons = []
    for package in PACKAGES:
        try:
            call: Callable[..., Any] = importlib.import_module(package).flash_attn_varlen_func
        except ModuleNotFoundError as missing:
            reasons.append(str(missing))
        except Exception as problem:  # an extension built for another torch fails in many ways
            _LOG.warning("%s cannot be loaded (%s); FlashAttention-3 is not used", package, problem)
            reasons.append(f"{package}: {problem}")
        else:
            return package, call
    return "; ".join(reasons), None

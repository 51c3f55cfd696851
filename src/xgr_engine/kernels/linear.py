"""``x @ weight.T + bias``, on a CPU through oneDNN: for float32, torch calls a BLAS that is slow on many CPUs.

On an AMD EPYC with AVX-512 (one thread, torch 2.13) oneDNN reaches 250 GFLOP/s, ``torch.nn.functional.linear`` 108.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _onednn() -> Any:
    """torch's oneDNN product, or None where this build of torch lacks it or takes other arguments."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        product = torch.ops.mkldnn._linear_pointwise
        product(torch.zeros(2, 2), torch.zeros(2, 2), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return product


_PRODUCT = _onednn()
_BLOCK, _ROUND = 256, 32  # rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, written to ``out`` if given. float32 stays IEEE.

    Args:
        x: [N, K].
        weight: [M, K].
        bias: [M].
        out: [N, M].

    Returns:
        [N, M] in the dtype of x.
    """
    if _PRODUCT is not None and x.dtype == torch.float32 and not x.is_cuda and len(x) > 1:
        return _in_blocks(x, weight, bias, x.new_empty(len(x), len(weight)) if out is None else out)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """oneDNN compiles a kernel for each number of rows, and every batch has a new one. So rows are computed in whole
    blocks, with a last one that is padded to one of a few sizes."""
    for at in range(0, len(x), _BLOCK):
        part = x[at : at + _BLOCK]
        missing = -len(part) % _ROUND
        if missing:
            part = F.pad(part, (0, 0, 0, missing))
        out[at : at + _BLOCK] = _PRODUCT(part, weight, bias, "none", [], "")[: len(x) - at]
    return out


def float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` as float32 [N, M], never rounded to the dtype of the inputs on the way."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return linear(x.float(), weight.float())

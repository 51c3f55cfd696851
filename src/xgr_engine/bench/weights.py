"""Random weights of a given size, made on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.models.loading import AnyModel, build_model, compute_dtype
from xgr_engine.models.ops import Ops, choose_ops
from xgr_engine.models.spec import AnySpec

_DEVIATION = 0.02


def random_model(spec: AnySpec, device: torch.device, seed: int, ops: Ops | None = None) -> tuple[AnyModel, Tensor]:
    """A model with weights N(0, 0.02), norms of one, and its output projection [V, H].

    The same seed gives the same weights on the same kind of device.
    """
    shapes, dtype = spec.tensor_shapes(), compute_dtype(spec.dtype, device)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*names: str) -> Tensor:
        rows = sum(shapes[name][0] for name in names)
        tensor = torch.empty((rows, *shapes[names[0]][1:]), dtype=dtype, device=device)
        if names[0].endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, _DEVIATION, generator=generator)

    return build_model(spec, draw, ops or choose_ops(device))

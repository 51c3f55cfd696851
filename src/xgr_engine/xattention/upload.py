"""From host to device without waiting for the copy."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``.

    The copy to a GPU is queued in the current stream, from pinned memory: with pageable memory the host would wait
    until the device has finished all that is queued.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

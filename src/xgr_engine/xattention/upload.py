"""From host to device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. To a GPU it goes from pinned memory, in the current stream, and nothing waits for the
    copy: from pageable memory the host would wait for all that the device still has to do."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

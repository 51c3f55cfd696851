"""Tensors of a checkpoint into ``model.safetensors``: each checked, cast and written, one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from xgr_engine.checkpoint.hf_source import Shards
from xgr_engine.checkpoint.plan import Plan
from xgr_engine.checkpoint.weights import StreamingWriter
from xgr_engine.errors import CheckpointError
from xgr_engine.models.loading import TORCH_DTYPES
from xgr_engine.progress import ProgressSink
from xgr_engine.tokens.table import SidTokenTable


def transfer_weights(
    path: Path, plan: Plan, shards: Shards, table: SidTokenTable, progress: ProgressSink
) -> tuple[dict[str, str], int]:
    """Check, cast and write every tensor. Returns the checksum of each and the file's size in bytes."""
    dtype = TORCH_DTYPES[plan.spec.dtype]
    writer = StreamingWriter(path, plan.spec.tensor_shapes(), plan.spec.dtype)
    progress.start(len(plan.ours), "tensors")
    try:
        for foreign, tensor in shards.stream():
            if foreign not in plan.ours:
                continue
            own = plan.ours[foreign]
            stored = _cast(foreign, tensor, dtype)
            if own == "embed.weight":
                _check_trained(stored, table)
            writer.write(own, stored)
            progress.advance(1)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    finally:
        progress.finish()
    return dict(sorted(writer.checksums.items())), writer.size


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not _is_finite(tensor):
        raise CheckpointError(
            f"{name}: contains NaN or infinity",
            why="a model with such weights computes NaN for every user",
            hint="use an earlier checkpoint of the training run",
        )
    cast = tensor.to(dtype)
    if cast.dtype != tensor.dtype and not _is_finite(cast):
        raise CheckpointError(
            f"{name}: holds {tensor.abs().max().item():g}, more than {str(dtype).removeprefix('torch.')} can hold",
            hint="use --dtype bfloat16 or float32",
        )
    return cast


def _is_finite(tensor: Tensor) -> bool:
    # NaN shows in the extremes too, and unlike torch.isfinite they need no copy of the tensor.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _check_trained(embedding: Tensor, table: SidTokenTable) -> None:
    """Refuse rows that are all equal, since they were never trained: a resize fills new rows with one mean."""
    for level, ids in enumerate(table.token_ids):
        rows = embedding[ids.astype("int64")]
        if len(ids) > 1 and bool((rows == rows[0]).all()):
            raise CheckpointError(
                f"level {level + 1}: the embeddings of all {len(ids)} semantic-ID tokens are equal",
                why="the tokens were added, but the model was never trained on them",
                hint="convert the checkpoint after training",
            )

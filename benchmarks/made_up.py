"""A model directory with random weights, a vocabulary and users' histories, for benchmarks without real data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from xgr_engine.bench.baselines.hf_weights import write_checkpoint
from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.workloads import random_weights, synthetic_catalog
from xgr_engine.catalog.build import BuildOptions, build_vocabulary
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.options import ConvertOptions

_TOKENS = (512, 1000)


def make_world(place: Path, geometry: str, users: int, items: float, codes: str) -> tuple[Path, Path, Path]:
    """Paths of the model directory, the vocabulary and the users' file, all below ``place``."""
    size, levels = (int(part) for part in codes.split("x"))
    shape = find_geometry(geometry)
    catalog = synthetic_catalog(int(items), size, levels)
    _write_catalog(place / "catalog.parquet", catalog.sids)
    build_vocabulary([place / "catalog.parquet"], place / "vocab", ReadOptions(), BuildOptions())
    (place / "source").mkdir()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_checkpoint(random_weights(shape, size, levels, device, "bfloat16", seed=0), place / "source")
    convert(ConvertOptions(source=place / "source", out=place / "model", prompt="sids-only"))
    _write_users(place / "users.parquet", users, len(catalog.sids), levels)
    return place / "model", place / "vocab", place / "users.parquet"


def _write_catalog(path: Path, sids: np.ndarray) -> None:
    offsets = pa.array(np.arange(len(sids) + 1, dtype=np.int32) * sids.shape[1])
    lists = pa.ListArray.from_arrays(offsets, pa.array(sids.reshape(-1)))
    pq.write_table(pa.table({"item_id": pa.array(np.arange(len(sids))), "sid": lists}), path)


def _write_users(path: Path, users: int, items: int, levels: int) -> None:
    """Histories whose prompts have ``_TOKENS`` tokens, evenly spread."""
    generator = np.random.default_rng(0)
    counts = generator.integers(-(-_TOKENS[0] // levels), _TOKENS[1] // levels + 1, users)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    values = pa.array(generator.integers(0, items, int(counts.sum())))
    history = pa.ListArray.from_arrays(offsets, values)
    pq.write_table(pa.table({"user_id": np.arange(users), "history": history}), path, row_group_size=4096)

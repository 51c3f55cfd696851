"""A model directory with random weights, a vocabulary and users' histories, for benchmarks without real data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.workloads import synthetic_catalog
from xgr_engine.catalog.build import BuildOptions, build_vocabulary
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.models.spec import ModelSpec

_TOKENS = (512, 1000)


def make_world(place: Path, geometry: str, users: int, items: float, codes: str) -> tuple[Path, Path, Path]:
    """Paths of the model directory, the vocabulary and the users' file, all below ``place``."""
    size, levels = (int(part) for part in codes.split("x"))
    shape = find_geometry(geometry)
    catalog = synthetic_catalog(int(items), size, levels)
    _write_catalog(place / "catalog.parquet", catalog.sids)
    build_vocabulary([place / "catalog.parquet"], place / "vocab", ReadOptions(), BuildOptions())
    _write_checkpoint(place / "source", shape.spec(size, levels, "bfloat16"))
    offsets = tuple(shape.text_tokens + level * size for level in range(levels))
    convert(ConvertOptions(source=place / "source", out=place / "model", token_offsets=offsets, prompt="sids-only"))
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


def _write_checkpoint(path: Path, spec: ModelSpec) -> None:
    """A Hugging Face checkpoint with weights N(0, 0.02) and norms of one."""
    path.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_context,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": spec.dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0.0, 0.02, generator=generator).cpu()

    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    query, key = spec.num_heads * dim, spec.num_kv_heads * dim
    tensors = {
        "model.embed_tokens.weight": normal(spec.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            tensors[f"{at}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] = torch.ones(dim, dtype=torch.bfloat16)
        tensors[f"{at}self_attn.q_proj.weight"] = normal(query, hidden)
        tensors[f"{at}self_attn.k_proj.weight"] = normal(key, hidden)
        tensors[f"{at}self_attn.v_proj.weight"] = normal(key, hidden)
        tensors[f"{at}self_attn.o_proj.weight"] = normal(hidden, query)
        tensors[f"{at}mlp.gate_proj.weight"] = normal(inner, hidden)
        tensors[f"{at}mlp.up_proj.weight"] = normal(inner, hidden)
        tensors[f"{at}mlp.down_proj.weight"] = normal(hidden, inner)
    if not spec.tied:
        tensors["lm_head.weight"] = normal(spec.vocab_size, hidden)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

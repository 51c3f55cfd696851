"""Tiny random checkpoints as transformers saves them, and ways to spoil them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from token_support import byte_level, save_tokenizer
from torch import Tensor

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.checkpoint.options import ConvertOptions

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def options(source: Path, **more: Any) -> ConvertOptions:
    """Of a conversion into the directory beside the source."""
    return ConvertOptions(**{"source": source, "out": source.parent / "out", **more})


def make_checkpoint(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    shard_size: str | None = None,
    seed: int = 0,
    eos: str | None = "<|im_end|>",
    **config: Any,
) -> Path:
    """A random model of ``family`` with a tokenizer that has SID tokens, saved by transformers."""
    import transformers

    tokenizer = byte_level()
    kind = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    sizes = {**SIZES, **({"head_dim": 16} if family != "qwen2" else {}), **config}
    sizes.setdefault("vocab_size", tokenizer.get_vocab_size() + 5)
    settings = getattr(transformers, f"{kind}Config")(tie_word_embeddings=tied, **sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(settings)
    for name, parameter in model.named_parameters():
        # Norms of one and biases of zero would hide mistakes.
        scale = 0.3 if parameter.dim() > 1 else 0.5
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=scale)
    model.to(dtype).save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    save_tokenizer(tokenizer, folder, eos=eos)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; a value of None removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None], file: str = "model.safetensors") -> None:
    """Change the tensors of one safetensors file in place."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*-of-*.safetensors"))


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@dataclass(frozen=True)
class FakeVocabulary:
    """What conversion asks of a vocabulary."""

    path: Path
    content_hash: str
    trie: ItemTrie
    sid_templates: tuple[str, ...] | None = None


def one_sid_vocabulary(*sid: int, content_hash: str = "abc") -> FakeVocabulary:
    """A vocabulary of a single item."""
    depth = len(sid)
    trie = ItemTrie(
        codes=tuple(np.array([code], np.int32) for code in sid),
        child_start=tuple(np.array([0, 1], np.int32) for _ in sid),
        leaf_start=tuple(np.array([0], np.int32) for _ in sid),
        leaf_depth=np.array([depth], np.uint8),
        item_start=np.array([0, 1], np.int32),
        items=np.array([0], np.int32),
    )
    return FakeVocabulary(Path("vocab"), content_hash, trie)

"""Converted models step by step: prefill and cached decode of beams against transformers, with and without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_support import LLAMA3_ROPE, make_checkpoint

from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.models.loading import load_model
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.rows import Rows

MODELS: dict[str, dict[str, Any]] = {
    "qwen2 tied": {"family": "qwen2", "tied": True},
    "qwen2 untied sharded": {"family": "qwen2", "tied": False, "shard_size": "20KB"},
    "qwen3 tied sharded": {"family": "qwen3", "tied": True, "shard_size": "20KB"},
    "qwen3 untied": {"family": "qwen3", "tied": False},
    "llama tied, llama3 rope": {"family": "llama", "tied": True, "rope_parameters": LLAMA3_ROPE},
    "llama untied sharded": {"family": "llama", "tied": False, "shard_size": "20KB"},
}
BEAMS, STEPS = 3, 3


@pytest.mark.parametrize("name", MODELS)
def test_beams_step_by_step(name: str, tmp_path: Path) -> None:
    """Three users with a common beginning, three beams each, three tokens deep, parents in any order: the logits of
    every step are those of transformers for the whole sequence at once, and token by token through its own cache."""
    import transformers

    source = make_checkpoint(tmp_path / "source", **MODELS[name])
    model_dir = convert(ConvertOptions(source=source, out=tmp_path / "model", prompt="sids-only")).model
    model, head = load_model(model_dir.spec, model_dir.weights_path)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    start = rng.integers(0, model_dir.spec.vocab_size, 5)
    prompts = [
        np.concatenate([start, rng.integers(0, model_dir.spec.vocab_size, n)]).astype(np.int32) for n in (1, 9, 17)
    ]
    users = len(prompts)
    with torch.inference_mode():
        pack = PackedPrompts.of(prompts, model.device)
        assert pack.prefix == 5
        cache = model.new_cache(pack.cache_tokens, users, BEAMS * STEPS)
        same(model.prefill(pack, cache) @ head.T, [theirs_whole(theirs, prompt.tolist()) for prompt in prompts])
        sequences = [[prompt.tolist() for _ in range(BEAMS)] for prompt in prompts]
        ancestors = torch.empty((users, BEAMS, 0), dtype=torch.int32)
        for step in range(STEPS):
            parent = torch.from_numpy(rng.integers(0, BEAMS, (users, BEAMS)))
            tokens = torch.from_numpy(rng.integers(0, model_dir.spec.vocab_size, (users, BEAMS)))
            own = (step * BEAMS + torch.arange(BEAMS, dtype=torch.int32)).expand(users, -1)
            inherited = ancestors.gather(1, parent[:, :, None].expand(-1, -1, step))
            ancestors = torch.cat([inherited, own[:, :, None]], 2).contiguous()
            sequences = [
                [beams[parent[user, beam]] + [int(tokens[user, beam])] for beam in range(BEAMS)]
                for user, beams in enumerate(sequences)
            ]
            rows = Rows(
                tokens=tokens.flatten(),
                position=(cache.lengths[:users, None] + step).expand(-1, BEAMS).flatten(),
                slots=(torch.arange(users)[:, None] * cache.slots + own).flatten(),
                ancestors=ancestors,
                cells=None,
            )
            mine = model.decode(rows, cache) @ head.T
            flat = [sequence for beams in sequences for sequence in beams]
            same(mine, [theirs_whole(theirs, sequence) for sequence in flat])
            same(mine, [theirs_cached(theirs, sequence, step + 1) for sequence in flat])


def theirs_whole(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


def theirs_cached(model: Any, tokens: list[int], generated: int) -> torch.Tensor:
    """Logits after the last token, the ``generated`` last tokens fed one at a time through transformers' cache."""
    out = model(torch.tensor([tokens[:-generated]]), use_cache=True)
    for token in tokens[-generated:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def same(mine: torch.Tensor, theirs: list[torch.Tensor]) -> None:
    """float32 on both sides, logits of size 10: 1e-4 leaves room for another order of summation, no more."""
    torch.testing.assert_close(mine, torch.stack(theirs), rtol=0, atol=1e-4)

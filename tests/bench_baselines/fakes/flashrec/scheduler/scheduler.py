"""FlashRec's search as its sources describe it: the best 2 W tokens of a level, then the trie, then the best W.

The first level's scores are normalised over the tokens of all levels, a later one's over its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers


class BeamRecEngine:
    def __init__(self, config):
        assert config.quantization is None and not config.enable_radix and not config.enable_warmup
        assert config.max_running_requests * config.beam_width + 7 >= config.max_batch_requests * (
            config.beam_width + 1
        )
        self.config = config
        self.model = transformers.AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.float32)
        self.model.config.vocab_size  # noqa: B018
        text = config.sid_token_range
        if isinstance(text, str):
            low, high = text.split(":")
            text = list(range(int(low), int(high) + 1))
        sizes = config.sid_codebook_sizes
        assert sum(sizes) == len(text)
        ends = [sum(sizes[: level + 1]) for level in range(len(sizes))]
        self.levels = [torch.tensor(text[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        sids = json.loads(Path(config.sid_vocab_file).read_text())
        self.prefixes = {tuple(sid[:depth]) for sid in sids for depth in range(1, len(sid) + 1)}
        self.boundary = [int(token) for token in config.sid_boundary_tokens.split(",")]
        there = None if os.environ.get("FAKE_FAULT") == "plain" else object()
        self.runner = SimpleNamespace(graph=None, attn=SimpleNamespace(_fi_decode=there))

    @torch.inference_mode()
    def generate_many(self, requests):
        self.runner.graph = self.runner.attn._fi_decode  # captured when the first batch comes
        return [SimpleNamespace(sequences=self._one(request)) for request in requests]

    def _one(self, request):
        assert len(request.input_ids) + request.max_new_tokens < self.config.max_seq_len
        width = request.beam_width
        beams = [([], 0.0)]
        for depth in range(request.max_new_tokens):
            ids = self.levels[depth]
            prompts = torch.tensor([request.input_ids + tokens for tokens, _ in beams])
            logits = self.model(prompts).logits[:, -1].float()
            norm = torch.cat(self.levels) if depth == 0 else ids
            log_p = logits[:, ids] - torch.logsumexp(logits[:, norm], 1, keepdim=True)
            best = log_p.topk(min(2 * width, len(ids)))
            if depth == 0 and best.values.shape[1] < width:
                raise ValueError(f"topk={best.values.shape[1]} < beam_width={width}")
            longer = []
            for (tokens, score), places, values in zip(beams, best.indices.tolist(), best.values.tolist(), strict=True):
                for place, value in zip(places, values, strict=True):
                    child = [*tokens, int(ids[place])]
                    alive = tuple(child) in self.prefixes
                    longer.append((child, score + value if alive else -torch.inf))
            beams = sorted(longer, key=lambda beam: beam[1], reverse=True)[:width]
        if os.environ.get("FAKE_FAULT") == "best":
            beams = beams[1:]
        begin, end = self.boundary
        return [SimpleNamespace(tokens=[begin, *tokens, end], cum_logprob=score) for tokens, score in beams]

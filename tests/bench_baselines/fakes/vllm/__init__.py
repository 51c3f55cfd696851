"""vLLM's offline beam search as documented, over the checkpoint's model in transformers. FAKE_FAULT spoils it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch

from vllm.sampling_params import BeamSearchParams


class LLM:
    """Known arguments only: an unknown one is a TypeError, as it is there."""

    def __init__(
        self, model, dtype="auto", max_model_len=None, max_logprobs=20, enable_prefix_caching=True, seed=0,
        gpu_memory_utilization=0.92,
    ):  # fmt: skip
        import transformers

        print("vLLM greets on standard output")
        fault = os.environ.get("FAKE_FAULT", "")
        if fault == "start":
            raise ValueError("Unknown architecture")
        if fault == "pool":
            raise ValueError("No available memory for the cache blocks.")
        if fault == "die":
            print("Segmentation fault", flush=True)
            os._exit(139)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        assert len(self.tokenizer) == self.model.config.vocab_size
        self.fault, self.max_model_len, self.max_logprobs = fault, max_model_len, max_logprobs
        self.cache = []

    def reset_prefix_cache(self):
        self.cache.clear()
        return True

    @torch.inference_mode()
    def beam_search(self, prompts, params):
        assert isinstance(params, BeamSearchParams)
        return [SimpleNamespace(sequences=self._one(prompt["prompt_token_ids"], params)) for prompt in prompts]

    def _one(self, prompt, params):
        assert prompt not in self.cache, "the prefix cache was not emptied"
        self.cache.append(prompt)
        kept = 2 * params.beam_width
        if kept > self.max_logprobs:
            raise ValueError(f"Requested logprobs of {kept}, which is greater than max allowed: {self.max_logprobs}")
        assert len(prompt) + params.max_tokens <= self.max_model_len
        beams = [(list(prompt), 0.0)]
        for _ in range(params.max_tokens):
            logits = self.model(torch.tensor([tokens for tokens, _ in beams])).logits[:, -1].float()
            best = logits.log_softmax(-1).topk(min(kept, logits.shape[1]))
            longer = [
                ([*tokens, token], score + log_p)
                for (tokens, score), ids, values in zip(beams, best.indices.tolist(), best.values.tolist(), strict=True)
                for token, log_p in zip(ids, values, strict=True)
            ]
            beams = sorted(longer, key=lambda beam: beam[1], reverse=True)[: params.beam_width]
        if self.fault == "scores":
            beams = [(tokens, score - 1.0) for tokens, score in beams]
        if self.fault == "best":
            beams = beams[1:]
        if self.fault == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
        if self.fault == "short":
            beams[-1] = (beams[-1][0][:-1], beams[-1][1])
        return [
            SimpleNamespace(tokens=tokens, cum_logprob=score, text=self.tokenizer.decode(tokens))
            for tokens, score in beams
        ]

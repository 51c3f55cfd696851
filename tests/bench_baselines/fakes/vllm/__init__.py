"""vLLM's offline beam search as its sources have it, over the checkpoint's model in transformers. FAKE_FAULT spoils it.

It refuses what the package refuses: names of arguments, what is keyword only, and bounds are those of 0.33.0.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch

from vllm.sampling_params import BeamSearchParams


class LLM:
    """Known arguments only: an unknown one is a TypeError, as it is there."""

    def __init__(
        self, model, *, dtype="auto", max_model_len=None, max_logprobs=20, enable_prefix_caching=None, seed=0,
        gpu_memory_utilization=0.92,
    ):  # fmt: skip
        import transformers

        print("vLLM greets on standard output")
        fault = os.environ.get("FAKE_FAULT", "")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError("1 validation error for CacheConfig: gpu_memory_utilization")
        longest = transformers.AutoConfig.from_pretrained(model).max_position_embeddings
        if max_model_len > longest:
            raise ValueError(
                f"User-specified max_model_len ({max_model_len}) is greater than the derived max_model_len ({longest})"
            )
        if fault == "start":
            raise ValueError("Unknown architecture")
        if fault == "pool":
            raise ValueError("No available memory for the cache blocks.")
        if fault == "small pool":
            raise ValueError(
                f"To serve at least one request with the model's max seq len ({max_model_len}), (1.0 GiB KV cache is "
                "needed, which is larger than the available KV cache memory (0.5 GiB). Try increasing "
                "`gpu_memory_utilization`"
            )
        if fault == "die":
            print("Segmentation fault", flush=True)
            os._exit(139)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        # transformers gives a Qwen2 tokenizer an end token of its own, beyond the model's
        assert len(self.tokenizer) >= self.model.config.vocab_size
        self.fault, self.max_model_len, self.max_logprobs = fault, max_model_len, max_logprobs
        self.cache = []

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.cache.clear()
        return True

    @torch.inference_mode()
    def beam_search(
        self, prompts, params, lora_request=None, use_tqdm=False, concurrency_limit=None, priority=None
    ):  # fmt: skip
        assert isinstance(params, BeamSearchParams) and params.ignore_eos
        return [SimpleNamespace(sequences=self._one(prompt["prompt_token_ids"], params)) for prompt in prompts]

    def _one(self, prompt, params):
        assert prompt not in self.cache, "the prefix cache was not emptied"
        self.cache.append(prompt)
        beams = [(list(prompt), 0.0)]
        for _ in range(params.max_tokens):
            best = self._candidates([tokens for tokens, _ in beams], 2 * params.beam_width)
            longer = [
                ([*tokens, token], score + log_p)
                for (tokens, score), ids, values in zip(beams, best.indices.tolist(), best.values.tolist(), strict=True)
                for token, log_p in zip(ids, values, strict=True)
            ]
            # without an end token all are of one length, which is what the penalty divides by
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

    def _candidates(self, sequences, kept):
        """The best tokens after each, as its engine is asked for them: each is a prompt, for one token more."""
        length, vocab = len(sequences[0]), self.model.config.vocab_size
        if kept > self.max_logprobs:
            raise ValueError(
                f"Requested sample logprobs of {kept}, which is greater than max allowed: {self.max_logprobs}"
            )
        if length == 0:
            raise ValueError("The decoder prompt cannot be empty")
        if length >= self.max_model_len:
            raise ValueError(f"The decoder prompt (length {length}) is longer than {self.max_model_len}")
        if max(map(max, sequences)) >= vocab:
            raise ValueError(f"Token id {max(map(max, sequences))} is out of vocabulary")
        logits = self.model(torch.tensor(sequences)).logits[:, -1].float()
        return logits.log_softmax(-1).topk(kept)  # more than the vocabulary has: "selected index k out of range"

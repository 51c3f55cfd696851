"""What a T5 must answer, the slow way: float64, no cache, one sequence and one query at a time, whole-number buckets.

Shares no code with the engine; :func:`oracle.beam_search` searches over it.
"""

from __future__ import annotations

import math

import torch
from oracle import Weights
from torch import Tensor

from xgr_engine.models.spec import EncoderDecoderSpec


def random_t5_weights(spec: EncoderDecoderSpec, seed: int, scale: float = 0.3) -> Weights:
    """Norms near 1, biases of distances and embedding N(0, 1), the rest N(0, scale).

    Queries are smaller by the root of the head dimension: attention scores are not scaled, and training leaves that to
    the weights too. Otherwise attention is all or nothing, and small errors grow.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in spec.tensor_shapes().items():
        values = torch.randn(*shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * values
        elif name == "embed.weight" or name.endswith(".bias.weight"):
            weights[name] = values
        else:
            weights[name] = values * scale * (spec.head_dim**-0.5 if name.endswith(".q.weight") else 1)
    return weights


def bucket_of(distance: int, both_ways: bool, buckets: int, far: int) -> int:
    """Whose bias a key ``distance`` tokens after its query has.

    First single distances, then edges in geometric steps: the k-th at exact * (far / exact) ** (k / steps).
    """
    first = 0
    if both_ways:
        buckets //= 2
        first = buckets if distance > 0 else 0
    away = abs(distance) if both_ways else max(0, -distance)
    exact = buckets // 2
    if away < exact:
        return first + away
    steps = buckets - exact
    return first + exact + sum(away**steps * exact**k >= exact**steps * far**k for k in range(1, steps))


class NaiveT5:
    """Logits after a prompt and an answer's first tokens, [V] in float64."""

    def __init__(self, spec: EncoderDecoderSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self._encoded: dict[tuple[int, ...], Tensor] = {}
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def of(self, prompt: tuple[int, ...]) -> AnswersTo:
        return AnswersTo(self, prompt)

    def logits(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
        if prompt not in self._encoded:
            self._encoded[prompt] = self._encode(prompt)
        if (prompt, answer) not in self._known:
            self._known[prompt, answer] = self._decode(answer, self._encoded[prompt])
        return self._known[prompt, answer]

    def _encode(self, tokens: tuple[int, ...]) -> Tensor:
        x = self.weights["embed.weight"][list(tokens)]
        for index in range(self.spec.num_encoder_layers):
            at = f"encoder.layers.{index}"
            y = self._norm(f"{at}.attn_norm", x)
            x = x + self._attention(f"{at}.attn", y, y, "encoder")
            x = x + self._feed_forward(f"{at}.mlp", self._norm(f"{at}.mlp_norm", x))
        return self._norm("encoder.norm", x)

    def _decode(self, answer: tuple[int, ...], encoded: Tensor) -> Tensor:
        x = self.weights["embed.weight"][[self.spec.start_token, *answer]]
        for index in range(self.spec.num_layers):
            at = f"decoder.layers.{index}"
            y = self._norm(f"{at}.attn_norm", x)
            x = x + self._attention(f"{at}.attn", y, y, "decoder")
            x = x + self._attention(f"{at}.cross", self._norm(f"{at}.cross_norm", x), encoded, None)
            x = x + self._feed_forward(f"{at}.mlp", self._norm(f"{at}.mlp_norm", x))
        last = self._norm("decoder.norm", x)[-1]
        if self.spec.scaled_output:
            last = last / math.sqrt(self.spec.hidden_size)
        return last @ self.weights["embed.weight" if self.spec.tied else "head.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.spec.rms_eps).sqrt() * self.weights[f"{name}.weight"]

    def _attention(self, at: str, x: Tensor, source: Tensor, stack: str | None) -> Tensor:
        """Of the tokens x to the tokens ``source``; a stack has its bias, and a decoder sees no token ahead."""
        spec = self.spec
        shape = (-1, spec.num_heads, spec.head_dim)
        q = (x @ self.weights[f"{at}.q.weight"].T).view(shape)
        k, v = ((source @ self.weights[f"{at}.{name}.weight"].T).view(shape) for name in "kv")
        mixed = torch.empty_like(q)
        for place in range(len(x)):
            keys = place + 1 if stack == "decoder" else len(source)
            rows = [
                bucket_of(key - place, stack == "encoder", spec.num_buckets, spec.max_distance) for key in range(keys)
            ]
            for head in range(spec.num_heads):
                scores = k[:keys, head] @ q[place, head]
                if stack is not None:
                    scores = scores + self.weights[f"{stack}.bias.weight"][rows, head]
                mixed[place, head] = scores.softmax(0) @ v[:keys, head]
        return mixed.flatten(1) @ self.weights[f"{at}.o.weight"].T

    def _feed_forward(self, at: str, x: Tensor) -> Tensor:
        up = x @ self.weights[f"{at}.up.weight"].T
        if self.spec.gated:
            gate = x @ self.weights[f"{at}.gate.weight"].T
            inner = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        else:
            inner = up.clamp_min(0)
        return inner @ self.weights[f"{at}.down.weight"].T


class AnswersTo:
    """A :class:`NaiveT5` and a prompt, as :func:`oracle.beam_search` asks: logits after the prompt and more tokens."""

    def __init__(self, model: NaiveT5, prompt: tuple[int, ...]) -> None:
        self.model = model
        self.prompt = prompt

    def logits(self, tokens: tuple[int, ...]) -> Tensor:
        count = len(self.prompt)
        assert tokens[:count] == self.prompt
        return self.model.logits(self.prompt, tokens[count:])

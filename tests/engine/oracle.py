"""What the search must return, the slow way: a whole forward pass in float64 for every prefix, and Python lists.

Shares no code with the engine: no cache, no trie arrays, no tensors in the search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from xgr_engine.models.spec import ModelSpec

Sid = tuple[int, ...]
Weights = dict[str, Tensor]


def random_weights(spec: ModelSpec, seed: int, scale: float = 0.3) -> Weights:
    """Weights under the names of :class:`ModelSpec`; norms near 1, the rest N(0, scale)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = scale) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    width, dim = spec.hidden_size, spec.head_dim
    heads = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim, "v": spec.num_kv_heads * dim}
    weights = {"embed.weight": normal(spec.vocab_size, width, std=1.0), "norm.weight": 1 + normal(width, std=0.1)}
    if not spec.tied:
        weights["head.weight"] = normal(spec.vocab_size, width)
    for index in range(spec.num_layers):
        at = f"layers.{index}."
        weights[f"{at}attn_norm.weight"] = 1 + normal(width, std=0.1)
        weights[f"{at}mlp_norm.weight"] = 1 + normal(width, std=0.1)
        for name, rows in heads.items():
            weights[f"{at}attn.{name}.weight"] = normal(rows, width)
            if spec.qkv_bias:
                weights[f"{at}attn.{name}.bias"] = normal(rows)
        weights[f"{at}attn.o.weight"] = normal(width, heads["q"])
        if spec.o_bias:
            weights[f"{at}attn.o.bias"] = normal(width)
        if spec.qk_norm:
            weights[f"{at}attn.q_norm.weight"] = 1 + normal(dim, std=0.1)
            weights[f"{at}attn.k_norm.weight"] = 1 + normal(dim, std=0.1)
        for name in ("gate", "up"):
            weights[f"{at}mlp.{name}.weight"] = normal(spec.intermediate_size, width)
            if spec.mlp_bias:
                weights[f"{at}mlp.{name}.bias"] = normal(spec.intermediate_size)
        weights[f"{at}mlp.down.weight"] = normal(width, spec.intermediate_size)
        if spec.mlp_bias:
            weights[f"{at}mlp.down.bias"] = normal(width)
    return weights


class NaiveModel:
    """log p(next token | tokens) in float64, without a cache, one sequence at a time."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: tuple[int, ...]) -> Tensor:
        """[V] float64 logits after the last of ``tokens``."""
        if tokens not in self._known:
            self._known[tokens] = self._forward(tokens)
        return self._known[tokens]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.spec.rms_eps).sqrt() * self.weights[f"{name}.weight"]

    def _turn(self, x: Tensor) -> Tensor:
        """Rotary embedding as complex numbers: coordinate j and j + D/2 are one plane. x [T, heads, D]."""
        half = x.shape[-1] // 2
        angle = torch.arange(len(x)).double()[:, None] * self.spec.rope.theta ** (-torch.arange(half).double() / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    def _forward(self, tokens: tuple[int, ...]) -> Tensor:
        spec, count = self.spec, len(tokens)
        x = self.weights["embed.weight"][list(tokens)]
        for index in range(spec.num_layers):
            at = f"layers.{index}."
            y = self._norm(f"{at}attn_norm", x)
            q, k, v = (self._linear(f"{at}attn.{name}", y).view(count, -1, spec.head_dim) for name in "qkv")
            if spec.qk_norm:
                q, k = self._norm(f"{at}attn.q_norm", q), self._norm(f"{at}attn.k_norm", k)
            q, k = self._turn(q), self._turn(k)
            mixed = torch.empty_like(q)
            for head, position in itertools.product(range(spec.num_heads), range(count)):
                group = head // spec.group
                weights = (k[: position + 1, group] @ q[position, head] / math.sqrt(spec.head_dim)).softmax(0)
                mixed[position, head] = weights @ v[: position + 1, group]
            x = x + self._linear(f"{at}attn.o", mixed.flatten(1))
            y = self._norm(f"{at}mlp_norm", x)
            gate = self._linear(f"{at}mlp.gate", y)
            x = x + self._linear(f"{at}mlp.down", gate * gate.sigmoid() * self._linear(f"{at}mlp.up", y))
        head = self.weights["embed.weight" if spec.tied else "head.weight"]
        return self._norm("norm", x[-1:])[0] @ head.T


def beam_search(
    model: NaiveModel,
    prompt: tuple[int, ...],
    catalog: list[tuple[object, Sid]],
    tokens: list[dict[int, int]],
    *,
    beam: int,
    top_k: int,
    score_over: str = "vocab",
    collisions: str = "all",
    excluded: Iterable[object] = (),
    suffix: tuple[int, ...] = (),
) -> list[tuple[object, Sid, float]]:
    """The design's search, literally. ``catalog`` lists (item, SID), best item of a SID first; ``tokens[d][code]``."""
    banned = set(excluded)
    allowed = [(item, sid) for item, sid in catalog if item not in banned]
    sids = {sid for _, sid in allowed}
    prefixes = {sid[:length] for sid in sids for length in range(len(sid))}

    def path(sid: Sid) -> tuple[int, ...]:
        return prompt + tuple(tokens[level][code] for level, code in enumerate(sid))

    def log_p(parent: Sid, code: int) -> float:
        logits, level = model.logits(path(parent)), len(parent)
        if score_over == "vocab":
            over = logits
        elif score_over == "level":
            over = logits[list(tokens[level].values())]
        else:
            children = {s[level] for s in sids if len(s) > level and s[:level] == parent}
            over = logits[[tokens[level][c] for c in sorted(children)]]
        return float(logits[tokens[level][code]] - over.logsumexp(0))

    def best(scored: dict[Sid, float], count: int) -> dict[Sid, float]:
        return dict(sorted(scored.items(), key=lambda pair: (-pair[1], pair[0]))[:count])

    open_: dict[Sid, float] = {(): 0.0}
    pool: dict[Sid, float] = {}
    while open_:
        children: dict[Sid, float] = {}
        for parent, score in open_.items():
            for code in {s[len(parent)] for s in sids if len(s) > len(parent) and s[: len(parent)] == parent}:
                children[(*parent, code)] = score + log_p(parent, code)
        pool = best(pool | {sid: score for sid, score in children.items() if sid in sids}, beam)
        open_ = best({sid: score for sid, score in children.items() if sid in prefixes}, beam)
    for sid in pool:
        sequence = path(sid)
        for token in suffix:
            pool[sid] += float(model.logits(sequence).log_softmax(0)[token])
            sequence += (token,)
    result = []
    for sid, score in best(pool, beam).items():
        items = [item for item, other in allowed if other == sid]
        result += [(item, sid, score) for item in (items if collisions == "all" else items[:1])]
    return result[:top_k]

"""The work a row of the benchmark cannot do without: floating-point operations and bytes, from sizes alone.

Achieved TFLOP/s and TB/s are this work over the measured time. So a contender that computes a prompt once a beam, or
reads it once a beam, gets no credit for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from xgr_engine.bench.workloads import Workload
from xgr_engine.models.spec import ModelSpec


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes read or written."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes


def rows_a_level(workload: Workload) -> list[int]:
    """Beam rows a user at each level: one at the root, then ``min(W, prefixes with children)``."""
    trie, width = workload.catalog.trie, workload.search.beam
    rows = [1]
    for depth in range(1, trie.levels):
        starts = trie.child_start[depth]
        rows.append(min(width, int((starts[1:] > starts[:-1]).sum())))
    return rows


def prefill_work(workload: Workload, users: int) -> Work:
    """Every prompt once: linears of all tokens (the last layer's feed-forward and output for the last token alone),
    causal attention, weights read once, keys and values written once."""
    spec, size = workload.model.spec, _itemsize(workload)
    lengths = prompt_lengths(workload, users)
    tokens = sum(lengths) - (users - 1) * workload.shared_prefix
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    linears, last = _linear_parameters(spec), _last_layer_saving(spec)
    flops = 2.0 * tokens * linears - 2.0 * (tokens - users) * last
    flops += 4 * pairs * spec.num_heads * spec.head_dim * max(0, spec.num_layers - 1)
    return Work(flops, linears * size + tokens * _kv_bytes_a_token(spec, size))


def decode_work(workload: Workload, users: int) -> Work:
    """All levels after the prefill: linears and attention of the beam rows, the head over what scores need, weights
    and prompts read once a level."""
    spec, size = workload.model.spec, _itemsize(workload)
    head = spec.vocab_size if workload.search.score_over == "vocab" else len(workload.model.table.codes[0])
    total, prompts = Work(0.0, 0.0), sum(prompt_lengths(workload, users))
    for depth, rows in enumerate(rows_a_level(workload)):
        work = Work(2.0 * users * rows * head * spec.hidden_size, float(head * spec.hidden_size * size))
        if depth:
            linears = _linear_parameters(spec)
            attention = 4 * rows * (prompts + users * depth) * spec.num_heads * spec.head_dim * spec.num_layers
            read = linears * size + (prompts + users * depth * rows) * _kv_bytes_a_token(spec, size)
            work += Work(2.0 * users * rows * linears + attention, float(read))
        total += work
    return total


def kv_cache_bytes(workload: Workload, users: int) -> int:
    """What the design keeps for a batch: each prompt once, and one token a beam row of each level but the last."""
    per_token = _kv_bytes_a_token(workload.model.spec, _itemsize(workload))
    generated = sum(rows_a_level(workload)[1:])
    return (sum(prompt_lengths(workload, users)) + users * generated) * per_token


def prompt_lengths(workload: Workload, users: int) -> list[int]:
    """Tokens of each prompt of the first batch."""
    return [len(prompt) for prompt in workload.batch(0, users).prompts]


def _linear_parameters(spec: ModelSpec) -> int:
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.num_layers * spec.hidden_size * (2 * query + 2 * key + 3 * spec.intermediate_size)


def _last_layer_saving(spec: ModelSpec) -> int:
    """Parameters of the last layer that only each prompt's last token needs."""
    query = spec.num_heads * spec.head_dim
    return spec.hidden_size * (query + 3 * spec.intermediate_size)


def _kv_bytes_a_token(spec: ModelSpec, size: int) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size


def _itemsize(workload: Workload) -> int:
    return workload.model.decoder.embed.element_size()

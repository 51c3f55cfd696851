"""The work a row of the benchmark cannot do without: floating-point operations and bytes, from sizes alone.

Achieved TFLOP/s and TB/s are this work over the measured time. So a contender that computes a prompt once a beam, or
reads it once a beam, gets no credit for it. All beam rows count; where K below W lets a contender leave some out, who
asks has to take them off.
"""

from __future__ import annotations

from dataclasses import dataclass

from xgr_engine.bench.workloads import Workload
from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec, ModelSpec


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes read or written."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def rows_a_level(workload: Workload) -> list[int]:
    """Beam rows a user at each level: one at the root, then ``min(W, prefixes with children)``."""
    trie, width = workload.catalog.trie, workload.search.beam
    rows = [1]
    for depth in range(1, trie.levels):
        starts = trie.child_start[depth]
        rows.append(min(width, int((starts[1:] > starts[:-1]).sum())))
    return rows


def prefill_work(workload: Workload, users: int) -> Work:
    """Every prompt once, up to the hidden state that the first level is scored with: linears, attention, weights read
    once, keys and values written once."""
    spec, size = workload.model.spec, _itemsize(workload)
    lengths, parameters = prompt_lengths(workload, users), Parameters.of(spec)
    shared = workload.shared_prefix if workload.model.decoder.causal else 0
    tokens = sum(lengths) - (users - 1) * shared
    flops = 2.0 * tokens * parameters.prompt + 2.0 * users * parameters.last
    pairs = sum(_prefill_pairs(spec, length) for length in lengths)
    if shared:
        pairs -= (users - 1) * _prefill_pairs(spec, shared)
    flops += 4.0 * pairs * spec.num_heads * spec.head_dim
    written = tokens + users * spec.extra_slots
    return Work(flops, float((parameters.prompt + parameters.last) * size + written * _kv_bytes_a_token(spec, size)))


def decode_work(workload: Workload, users: int) -> Work:
    """All levels after the prefill, and the tokens of a score suffix: linears and attention of the beam rows, the head
    over what scores need, weights and prompts read once a step.

    Under ``--score-over allowed`` the head counts all codes of a level, although each row needs its children alone.
    """
    spec, whole = workload.model.spec, workload.model.spec.vocab_size
    over_vocabulary = workload.search.score_over == "vocab"
    heads = [whole if over_vocabulary else len(codes) for codes in workload.model.table.codes]
    steps = list(zip(rows_a_level(workload), heads, strict=False))
    finished = min(workload.search.beam, workload.catalog.trie.num_leaves)
    steps += [(finished, whole)] * len(workload.model.score_suffix)
    size, prompts = _itemsize(workload), sum(prompt_lengths(workload, users))
    total = Work(0.0, 0.0)
    for depth, (rows, head) in enumerate(steps):
        total += Work(2.0 * users * rows * head * spec.hidden_size, float(head * spec.hidden_size * size))
        if depth:
            total += _rows_work(spec, users, rows, depth, prompts, size)
    return total


def _rows_work(spec: AnySpec, users: int, rows: int, depth: int, prompts: int, size: int) -> Work:
    """``rows`` beam rows of each user through the model, which see ``prompts`` tokens in all and ``depth`` of their
    own."""
    linears, start = Parameters.of(spec).row, users * spec.extra_slots
    seen = prompts + start + users * depth  # by one row of each user
    attention = 4 * rows * seen * spec.num_heads * spec.head_dim * spec.num_layers
    read = linears * size + (prompts + start + users * depth * rows) * _kv_bytes_a_token(spec, size)
    return Work(2.0 * users * rows * linears + attention, float(read))


def kv_cache_bytes(workload: Workload, users: int) -> int:
    """What the design keeps for a batch: each prompt once, an encoder-decoder's start token, and one token a beam row
    of each level but the last."""
    spec = workload.model.spec
    generated = spec.extra_slots + sum(rows_a_level(workload)[1:])
    tokens = sum(prompt_lengths(workload, users)) + users * generated
    return tokens * _kv_bytes_a_token(spec, _itemsize(workload))


def prompt_lengths(workload: Workload, users: int) -> list[int]:
    """Tokens of each prompt of the first batch."""
    return [len(prompt) for prompt in workload.batch(0, users).prompts]


@dataclass(frozen=True)
class Parameters:
    """Weights of the linears, by the tokens that go through them.

    Attributes:
        prompt: every token of a prompt; last: once a user, what gives the hidden state for the first level.
        row: a beam row.
    """

    prompt: int
    last: int
    row: int

    @classmethod
    def of(cls, spec: AnySpec) -> Parameters:
        """Of either kind of model."""
        return cls._encoder_decoder(spec) if isinstance(spec, EncoderDecoderSpec) else cls._decoder_only(spec)

    @classmethod
    def _decoder_only(cls, spec: ModelSpec) -> Parameters:
        """Of the last layer a prompt's tokens need keys and values alone, except its last token."""
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        row = spec.num_layers * spec.hidden_size * (2 * query + 2 * key + 3 * spec.intermediate_size)
        last = spec.hidden_size * (2 * query + 3 * spec.intermediate_size)  # all but its keys and values
        return cls(row - last, last, row)

    @classmethod
    def _encoder_decoder(cls, spec: EncoderDecoderSpec) -> Parameters:
        """A prompt's tokens go through the encoder, and become keys and values of every decoder layer. The start token
        goes through the decoder as beam rows do: self-attention, query and output of cross-attention, feed-forward."""
        square = spec.hidden_size * spec.num_heads * spec.head_dim
        feed_forward = (3 if spec.gated else 2) * spec.hidden_size * spec.intermediate_size
        row = spec.num_layers * (4 * square + 2 * square + feed_forward)
        prompt = spec.num_encoder_layers * (4 * square + feed_forward) + spec.num_layers * 2 * square
        return cls(prompt, row, row)


def _prefill_pairs(spec: AnySpec, length: int) -> float:
    """Pairs of a query and a key of one head in all layers, for a prompt of ``length`` tokens.

    Of a decoder-only model's last layer, whose one query is next to nothing, they are left out.
    """
    if isinstance(spec, EncoderDecoderSpec):  # every token with every token, then the start token with them and itself
        return spec.num_encoder_layers * length**2 + spec.num_layers * (length + 1)
    return max(0, spec.num_layers - 1) * length * (length + 1) / 2


def _kv_bytes_a_token(spec: AnySpec, size: int) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size


def _itemsize(workload: Workload) -> int:
    return workload.model.decoder.dtype.itemsize

"""How large a batch may be: a cost model computed from the model's sizes, and limits planned from it before the run.

``bytes(batch) = fixed + per_token * T + per_row * R + per_user * U + min(logits_cap, logits_per_row * R)``

for U users with T prompt tokens together and R = U * rows_per_user beam rows (H hidden, I intermediate, n layers, Hq
and Hkv heads of D, V vocabulary, C codes of a level, b bytes per value, S slots per user for generated tokens):

* prompt KV, kept for the whole batch:     ``per_token += 2 n Hkv D b``
* prefill of one layer (residual twice, normed input, q k v, attention output, gate up, activation):
  ``per_token += (4 H + 2 (Hq + 2 Hkv) D + 3 I) b``; where a fused kernel stores gate and up of G rows at most, ``1 I``
  instead of ``3 I``, and ``fixed = 2 I b G``
* a decode step of one layer:              ``per_row   += (4 H + 2 (Hq + 2 Hkv) D + 3 I) b``
  (with a fused kernel too, since what captured graphs keep is as large: all that a row of Qwen3-1.7B takes was measured
  as 347 KB; this plans 369 KB, and without gate and up it would be 344)
* attention scores against the prompt in float32, where no fused kernel runs: ``per_row += 4 Hq T`` for T = 1024
* logits of a level's codes in float32:    ``per_row   += 4 C``
* generated KV:                            ``per_user  += 2 n Hkv D b S``
* candidates of all levels, at most c (the children of the widest nodes, as many nodes as there are rows):
  ``per_user += 32 c``; ``3 * 32 c`` with graphs, since those of smaller batches keep buffers too
* logits of the vocabulary and their exponentials in float32, computed in chunks: ``logits_per_row = 8 V`` up to twice
  the chunk, where the score mode or a score suffix needs them

An encoder-decoder (A = Hq D; f = 3 where the feed-forward block is gated, else 1) has other layers, no fused gate and
up, and a start token of each user in the cache:

* encoder (residual, two deltas, normed inputs; q k v, their copies sequence by sequence, two outputs; activation):
  ``per_token += (6 H + 8 A + f I) b`` in place of the prefill's line
* the bias on its attention's scores, m x m for the longest prompt m there may be: ``fixed = Hq b m^2``
* a decode step of one layer (the same, with queries, own keys and values in float32, and the queries of both
  attentions): ``per_row += (6 H + 8 A + f I) b + 20 A`` in place of the decode step's line

The beam width is never lowered to fit: if a single user does not fit, the run is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import UsageError
from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec
from xgr_engine.options import LANES, SearchOptions
from xgr_engine.xschedule.scheduler import BatchLimits, largest_captured

# Share of the budget that the plan uses; the rest is for fragmentation and for what the cost model leaves out.
_SAFETY = 0.8
# (tokens, rows). Larger batches gain nothing: on a CPU the working set no longer fits the cache, on a GPU the matrix
# products are saturated. Fixed caps also keep the plan, and so every bit of the output, independent of the machine's
# load.
_CPU_CAP = (4096, 4096)
_GPU_CAP = (131_072, 65_536)
# The default budget on a CPU is fixed, and not what happens to be free, for the same reason.
_CPU_BUDGET = 2 << 30
_TYPICAL_PROMPT = 1024
# kernels.reference.LOGITS_BYTES, which cannot be imported without torch; a test compares them
_LOGITS_CHUNK = 256 << 20


@dataclass(frozen=True)
class CostModel:
    """Bytes of a batch by the module's formula; ``level_rows`` are the rows of one user, summed over the levels."""

    per_token: int
    per_row: int
    per_user: int
    rows_per_user: int
    logits_per_row: int = 0
    logits_cap: int = 0
    level_rows: int = 1
    fixed: int = 0

    def of_batch(self, tokens: int, users: int) -> int:
        """Bytes of ``users`` users with ``tokens`` prompt tokens together."""
        rows = users * self.rows_per_user
        logits = min(self.logits_cap, self.logits_per_row * rows)
        return self.fixed + self.per_token * tokens + self.per_row * rows + self.per_user * users + logits


def cost_model(
    spec: AnySpec,
    trie: ItemTrie,
    options: SearchOptions,
    suffix: int,
    itemsize: int,
    *,
    gpu: bool = False,
    gate_up_rows: int | None = None,
) -> CostModel:
    """The module's formula for a model, a catalog and a beam width.

    Args:
        suffix: how many tokens the score contract has after every SID.
        itemsize: bytes of a value in the dtype of computation.
        gpu: whether fused kernels and captured graphs run.
        gate_up_rows: most rows whose gate and up products are ever stored; None: those of all rows are.
    """
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize
    layer = _layer_costs(spec, itemsize, gate_up_rows)
    widths = [min(options.beam, trie.num_nodes(depth)) for depth in range(1, trie.levels + 1)]
    slots = sum(widths[:-1]) + options.beam * suffix + spec.extra_slots
    level_codes = max((int(codes.max()) + 1 for codes in trie.codes if len(codes)), default=1)
    rows = [1, *widths[:-1]]
    candidates = sum(_widest(starts, count) for starts, count in zip(trie.child_start, rows, strict=False))
    attention = 0 if gpu else 4 * spec.num_heads * min(_TYPICAL_PROMPT, spec.max_context)
    whole_vocabulary = options.score_over == "vocab" or suffix > 0
    return CostModel(
        per_token=kv + layer.token,
        per_row=layer.row + attention + 4 * level_codes,
        per_user=kv * slots + 32 * candidates * (3 if gpu else 1),
        rows_per_user=max(widths, default=1),
        logits_per_row=8 * spec.vocab_size if whole_vocabulary else 0,
        logits_cap=2 * _LOGITS_CHUNK if whole_vocabulary else 0,
        level_rows=1 + sum(widths[:-1]),
        fixed=layer.fixed,
    )


@dataclass(frozen=True)
class _LayerCosts:
    """Bytes of one layer's activations: per prompt token, per beam row, and fixed for a batch."""

    token: int
    row: int
    fixed: int


def _layer_costs(spec: AnySpec, itemsize: int, gate_up_rows: int | None) -> _LayerCosts:
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads
    if isinstance(spec, EncoderDecoderSpec):
        wide = heads * spec.head_dim
        layer = (6 * hidden + 8 * wide + (3 if spec.gated else 1) * inner) * itemsize
        return _LayerCosts(layer, layer + 20 * wide, heads * itemsize * spec.max_context**2)
    layer = (4 * hidden + 2 * (heads + 2 * spec.num_kv_heads) * spec.head_dim + 3 * inner) * itemsize
    gate_up = 2 * inner * itemsize
    hidden_part = 0 if gate_up_rows is None else gate_up
    return _LayerCosts(layer - hidden_part, layer, gate_up * (gate_up_rows or 0))


def _widest(child_start: NDArray[np.integer[Any]], rows: int) -> int:
    """How many children the ``rows`` nodes with the most children have together."""
    counts = np.diff(child_start)
    return int(np.partition(counts, -rows)[-rows:].sum() if rows < len(counts) else counts.sum())


def plan_limits(cost: CostModel, budget: int, longest_prompt: int, gpu: bool, lanes: int = LANES) -> BatchLimits:
    """Token and row budgets of a batch.

    Users without their prompts get up to half of the memory and prompt tokens the rest, each up to a cap beyond which
    larger batches gain nothing.

    Args:
        budget: bytes for a batch, weights not counted.
        longest_prompt: tokens of the longest prompt that the model can read.
        gpu: whether batches are computed on a GPU, in captured shapes.
        lanes: batches side by side on a GPU. Each gets an equal share of the budget, and the limits hold for each; if a
            share is too small for one user, there is one lane.

    Raises:
        UsageError: a single user with a prompt of one token does not fit.
    """
    usable = int(budget * _SAFETY)
    alone = cost.of_batch(1, 1)
    if alone > usable:
        raise UsageError(
            f"one user at this beam width needs {_size(int(alone / _SAFETY))} of memory, "
            f"and {_size(budget)} may be used",
            why="the beam width is never lowered to fit memory",
            hint="give more with --max-memory, or ask for a smaller --beam",
        )
    lanes = lanes if gpu and lanes * alone <= usable else 1
    usable //= lanes
    cap_tokens, cap_rows = _GPU_CAP if gpu else _CPU_CAP
    users = max(1, cap_rows // cost.rows_per_user)
    while users > 1 and cost.of_batch(0, users) > usable // 2:
        users -= 1
    if gpu:
        users = largest_captured(users)
    longest = min(longest_prompt, (usable - cost.of_batch(0, 1)) // cost.per_token)
    tokens = min((usable - cost.of_batch(0, users)) // cost.per_token, cap_tokens)
    return BatchLimits(
        tokens=max(1, tokens),
        rows=users * cost.rows_per_user,
        rows_per_user=cost.rows_per_user,
        longest_prompt=longest,
        fixed_shapes=gpu,
        level_rows=cost.level_rows,
        lanes=lanes,
    )


def default_budget(gpu_free: int | None, host_free: int | None) -> int:
    """Bytes for a batch without ``--max-memory``: most of a GPU's free memory, or a fixed amount of RAM.

    Rounded down to a power of two, so that a little more or less free memory does not change the plan.

    Args:
        gpu_free: free bytes of the GPU; None: the batch is computed on a CPU.
        host_free: free bytes of RAM; None: not known.
    """
    if gpu_free is not None:
        return _power_of_two_below(int(gpu_free * 0.9))
    free = _CPU_BUDGET if host_free is None else min(_CPU_BUDGET, host_free // 2)
    return _power_of_two_below(free)


def _power_of_two_below(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def _size(value: int) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"

"""Prefill of a single prompt as a CUDA graph: the GPU computes a short one faster than the host launches its kernels.

With several prompts in a batch the launches hide behind the device's work, and their ragged shapes rarely recur, so
those run kernel by kernel. A single prompt is padded to one of a few sizes: causal attention keeps the padding, which
comes after the prompt, from changing anything, and its keys are never read. An encoder would attend to padding, so its
prompts run kernel by kernel too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xgr_engine.models.model import Model
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.search.capture import RecentGraphs, capturing
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xattention.ragged import Ragged

_GRAPHS_KEPT = 8
_STEP = 128  # sizes are multiples of this
_LONGEST = 4096  # tokens; a longer prompt takes the device longer than the launches take the host


def rounded_up(tokens: int) -> int:
    """The size of the graph for a prompt of ``tokens`` tokens. The cache must have room for it, or no graph is used."""
    return -(-tokens // _STEP) * _STEP


@dataclass(frozen=True)
class _Captured:
    """A graph and the tensors whose addresses it holds: the pack's, with uploads of its sequences, and the result."""

    graph: torch.cuda.CUDAGraph
    pack: PackedPrompts
    hidden: Tensor


class GraphedPrefill:
    """Prefills over one cache.

    Args:
        cache: every call fills it; graphs hold its addresses.
        capture: False runs everything kernel by kernel.
    """

    def __init__(self, model: Model, cache: KVCache, *, capture: bool) -> None:
        self.model = model
        self.cache = cache
        self.capture = capture
        self._graphs: RecentGraphs[int, _Captured] = RecentGraphs(_GRAPHS_KEPT)
        # one pool for all sizes, since only one of these graphs runs at a time
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def run(self, pack: PackedPrompts) -> Tensor:
        """The last hidden states [U, H] of a batch, which the next call overwrites."""
        size = rounded_up(pack.lengths[0])
        alone = len(pack.lengths) == 1 and self.model.causal
        if not self.capture or not alone or size > min(_LONGEST, self.cache.tokens):
            return self.model.prefill(pack, self.cache)
        self.cache.begin(pack.lengths, shared=0)
        captured = self._graphs.get(size, lambda: self._record(size))
        captured.pack.tokens[: len(pack.tokens)].copy_(pack.tokens)
        captured.pack.last.copy_(pack.last)
        captured.graph.replay()
        return captured.hidden

    def _record(self, size: int) -> _Captured:
        """Run the prefill once to compile and to let libraries allocate, then record it."""
        device = self.model.device
        places = torch.arange(size, device=device)
        pack = PackedPrompts(
            tokens=torch.zeros_like(places),
            # padding may reach beyond the last position that the rotary table has
            positions=places.clamp_max(self.model.spec.max_context - 1),
            prefix=0,
            lengths=[size],
            sequences=Ragged.of(queries=[size], keys=[size]),
            cache_rows=places,
            prefix_rows=places.new_empty((1, 0)),
            last=places[-1:].clone(),
        )
        graph = torch.cuda.CUDAGraph()
        with self.model.ops.prefill_scope():
            self.model.fill(pack, self.cache)
            with capturing(graph, self._pool):
                hidden = self.model.fill(pack, self.cache)
        return _Captured(graph, pack, hidden)

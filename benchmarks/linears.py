"""The linear layers of a batch on their own: operations from sizes, and time measured for the same rows.

They are the floor of a batch: prompt tokens once, the beam rows of every level but the first, and the output
projection over the vocabulary for the rows of all levels. How this floor grows with the beam width is what a batch's
time is held against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rows import Shape, World

from xgr_engine.bench.cost import rows_a_level
from xgr_engine.bench.timing import call_ms
from xgr_engine.bench.workloads import Workload
from xgr_engine.models.decoder_only import CPU_ROWS, GPU_ROWS, LayerWeights
from xgr_engine.models.spec import ModelSpec
from xgr_engine.options import SearchOptions

_LAYERS_MEASURED = 4  # their weights together exceed the cache


@dataclass(frozen=True)
class Floor:
    """Of a batch: the prefill and everything after it, head included."""

    prefill: float
    tail: float

    @property
    def batch(self) -> float:
        return self.prefill + self.tail


def flops(spec: ModelSpec, shape: Shape, rows: list[int]) -> Floor:
    """Floating-point operations of the linears.

    Args:
        rows: beam rows of one user at each level, the root's first.
    """
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    feed_forward = query + 3 * spec.intermediate_size
    layer = spec.hidden_size * (query + 2 * key + feed_forward)
    tokens = shape.context * shape.users
    # of the last layer, only keys, values and queries are computed for all tokens
    prefill = 2.0 * (tokens * spec.num_layers * layer - (tokens - shape.users) * spec.hidden_size * feed_forward)
    decode = 2.0 * shape.users * sum(rows[1:]) * spec.num_layers * layer
    head = 2.0 * shape.users * sum(rows) * spec.vocab_size * spec.hidden_size
    return Floor(prefill, decode + head)


class LinearFloor:
    """Measures products once for each number of rows, on the weights that the batches use.

    Attributes:
        tflops: rate of a large square bfloat16 product, sustained, in this process.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.tflops = self._large_product()
        self._known: dict[tuple[str, str, int], float] = {}

    def of(self, geometry: str, shape: Shape) -> dict[str, Any]:
        """The floor of a row: operations, their time at the rate of a large product, and their own measured time."""
        model = self.world.model(geometry)
        spec = model.spec
        workload = Workload(
            model, self.world.catalog, SearchOptions(shape.beam, shape.beam), shape.context, shape.users
        )
        rows = rows_a_level(workload)
        work = flops(spec, shape, rows)
        tokens = shape.context * shape.users
        last = self._ms(geometry, "qkv", tokens) + self._ms(geometry, "rest", shape.users)
        prefill = (spec.num_layers - 1) * self._ms(geometry, "layer", tokens) + last
        decode = sum(spec.num_layers * self._ms(geometry, "layer", shape.users * count) for count in rows[1:])
        head = sum(self._ms(geometry, "head", shape.users * count) for count in rows)
        return {
            "linears_tflop": float(f"{work.batch / 1e12:.5g}"),
            "linears_tail_tflop": float(f"{work.tail / 1e12:.5g}"),
            "linears_at_rate_ms": round(work.batch / self.tflops / 1e9, 2),
            "linears_alone_ms": round(prefill + decode + head, 2),
            "linears_tail_alone_ms": round(decode + head, 2),
        }

    @torch.inference_mode()
    def _ms(self, geometry: str, what: str, rows: int) -> float:
        """Milliseconds of one layer's products (or some of them), or of the head, for ``rows`` rows."""
        key = (geometry, what, rows)
        if key not in self._known:
            model = self.world.model(geometry)
            decoder = model.decoder
            x = torch.randn(rows, model.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
            calls: list[Callable[[], object]]
            if what == "head":
                calls = [partial(decoder.ops.vocabulary_logsumexp, x, model.head)] * 2
            else:
                calls = [partial(_products, x, layer, what) for layer in decoder.layers[:_LAYERS_MEASURED]]
            self._known[key] = call_ms(calls, self.world.device, seconds=0.16)
        return self._known[key]

    def _large_product(self) -> float:
        gpu = self.world.device.type == "cuda"
        size, dtype = (8192, torch.bfloat16) if gpu else (512, torch.float32)
        a, b = (torch.randn(size, size, dtype=dtype, device=self.world.device) for _ in range(2))
        calls: list[Callable[[], object]] = [partial(torch.mm, a, b)] * 4
        ms = call_ms(calls, self.world.device, seconds=2.0 if gpu else 0.1, repeats=3)
        return 2 * size**3 / ms / 1e9


def _products(x: torch.Tensor, layer: LayerWeights, what: str) -> None:
    """The products of one layer, in the blocks of rows that the engine uses; activations are stood in for."""
    block = GPU_ROWS if x.is_cuda else CPU_ROWS
    for at in range(0, len(x), block):
        part = x[at : at + block]
        if what != "rest":
            qkv = F.linear(part, layer.qkv)
            if what == "qkv":
                continue
            mixed = qkv[:, : layer.out.shape[1]]
        else:
            mixed = part.new_zeros(len(part), layer.out.shape[1])
        F.linear(mixed, layer.out)
        inner = F.linear(part, layer.gate_up)[:, : layer.down.shape[1]]
        F.linear(inner, layer.down)


def growth(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each geometry, prompt length and batch size with several widths: how times and floors grow with W.

    Ratios are to the narrowest. ``no_faster_than_linears`` says whether the batch's time at the widest grew by no more
    than the operations of its linears did; ``_alone`` asks the same of those products' own measured time.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["geometry"], line["context"], line["users"]), []).append(line)
    found = []
    for (geometry, context, users), group in groups.items():
        if len(group) < 2:
            continue
        group = sorted(group, key=lambda line: line["beam"])
        entry: dict[str, Any] = {
            "geometry": geometry,
            "context": context,
            "users": users,
            "beam": [line["beam"] for line in group],
        }
        for name in (
            "ms",
            "linears_tflop",
            "linears_alone_ms",
            "tail_ms",
            "linears_tail_tflop",
            "linears_tail_alone_ms",
        ):
            values: list[Any] = [line.get(name) for line in group]
            entry[name] = values
            if all(values):
                entry[f"{name}_growth"] = [round(value / values[0], 3) for value in values]
        entry["no_faster_than_linears"] = entry["ms_growth"][-1] <= entry["linears_tflop_growth"][-1]
        entry["no_faster_than_linears_alone"] = entry["ms_growth"][-1] <= entry["linears_alone_ms_growth"][-1]
        found.append(entry)
    return found

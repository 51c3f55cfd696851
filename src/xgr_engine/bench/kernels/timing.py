"""Decode attention a layer: paged and the paper's stages beside the engine's, at a shape, on this GPU.

    python -m xgr_engine.bench.kernels.timing [--quick] [--out FILE.json]

A time stands only beside an error: each contender is first compared with the definition in float64.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xgr_engine.bench.kernels import paged_triton, staged_triton
from xgr_engine.bench.kernels.paged_triton import VARIANTS, PagedTiles
from xgr_engine.search.capture import capturing
from xgr_engine.xattention import reference
from xgr_engine.xattention.triton import beam_attention

BLOCK = 16
_CHECKED_BEAMS = 4  # a user, spread over the beams: the definition in float64 is slow


@dataclass(frozen=True)
class DecodeShape:
    """One decode step: U users of ``context`` tokens, R beams with ``own`` generated tokens each."""

    context: int
    users: int
    beams: int
    own: int = 2
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.context} x {self.users} x {self.beams}, {self.heads}/{self.kv_heads} x {self.dim}"


# milliseconds a layer of FlashInfer's paged decode, one sequence a beam, on an H200: what paged is held against
FLASHINFER_PAGED = {
    DecodeShape(1000, 1, 256): 0.158,
    DecodeShape(1000, 8, 256): 1.19,
    DecodeShape(1000, 32, 512): 9.7,
    DecodeShape(5000, 8, 256): 4.84,
    DecodeShape(5000, 32, 512): 38.3,
}


@dataclass(frozen=True, eq=False)
class Layer:
    """Keys and values of one layer in the forms of all three contenders, with the same contents.

    Attributes:
        pool: keys and values [M, Hkv, D], the packed prompts, then a tail a beam; tables: int32 [N, 1 + B] context
            and blocks.
        own: keys and values [U, R, S, Hkv, D] of generated tokens; ancestors: int32 [U, R, S] places in [R * S].
    """

    q: Tensor
    pool: tuple[Tensor, Tensor]
    tables: Tensor
    start: Tensor
    own: tuple[Tensor, Tensor]
    ancestors: Tensor
    scale: float

    @classmethod
    def random(cls, shape: DecodeShape, device: torch.device, seed: int = 0) -> Layer:
        """Unit variance, the same prompt length for all."""
        rng = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, generator=rng, device=device, dtype=shape.dtype)
        users, beams, own_count = shape.users, shape.beams, shape.own
        in_tail, tail_rows = shape.context % BLOCK, BLOCK - 1 + own_count
        prompt_rows, rows = users * shape.context, users * beams
        pool = normal(2, prompt_rows + rows * tail_rows, shape.kv_heads, shape.dim)
        own = normal(2, users, beams, own_count, shape.kv_heads, shape.dim)
        start = torch.arange(users + 1, device=device) * shape.context
        tail = prompt_rows + torch.arange(rows, device=device) * tail_rows
        user = torch.arange(rows, device=device) // beams
        for row in range(in_tail):
            pool[:, tail + row] = pool[:, start[user] + shape.context - in_tail + row]
        for token in range(own_count):
            pool[:, tail + in_tail + token] = own[:, :, :, token].flatten(1, 2)
        block = torch.arange(-(-(shape.context + own_count) // BLOCK), device=device)
        whole = shape.context // BLOCK
        table = torch.where(block < whole, start[user, None] + block * BLOCK, tail[:, None] + (block - whole) * BLOCK)
        context = torch.full((rows, 1), shape.context + own_count, device=device)
        return cls(
            q=normal(users, beams, shape.heads, shape.dim),
            pool=(pool[0], pool[1]),
            tables=torch.cat([context, table], 1).to(torch.int32),
            start=start.to(torch.int32),
            own=(own[0], own[1]),
            ancestors=torch.arange(beams * own_count, dtype=torch.int32, device=device)
            .view(1, beams, own_count)
            .expand(users, -1, -1)
            .contiguous(),
            scale=shape.dim**-0.5,
        )

    def paged(self, tiles: PagedTiles | None = None) -> Tensor:
        """One sequence a beam."""
        context, blocks = self.tables[:, 0], self.tables[:, 1:]
        q = self.q.flatten(0, 1)
        out = paged_triton.paged_attention(q, *self.pool, context, blocks, BLOCK, self.scale, tiles=tiles)
        return out.view(self.q.shape)

    def engine(self) -> Tensor:
        """Fused, the prompt read once a tile of beams."""
        own_k, own_v = (t.flatten(1, 2) for t in self.own)
        return beam_attention(self.q, *self.pool, self.start, own_k, own_v, self.ancestors, self.scale)

    def staged(self) -> Tensor:
        """Shared stage, unshared stage, merge."""
        shared = staged_triton.shared_stage(self.q, *self.pool, self.start, self.scale)
        own = staged_triton.unshared_stage(self.q, *self.own, self.ancestors.shape[2], self.scale)
        return staged_triton.merge_stages(shared, own, torch.empty_like(self.q))

    def error(self, out: Tensor) -> float:
        """Relative error of a few beams of each user, against the definition in float64."""
        beams = self.q.shape[1]
        some = torch.linspace(0, beams - 1, min(beams, _CHECKED_BEAMS), device=out.device).long()
        total, wrong = 0.0, 0.0
        for user in range(len(self.q)):
            part = slice(int(self.start[user]), int(self.start[user + 1]))
            prompt_k, prompt_v = (t[part].double() for t in self.pool)
            own_k, own_v = (t[user : user + 1].flatten(1, 2).double() for t in self.own)
            expected = reference.beam_attention(
                self.q[user : user + 1, some].double(),
                prompt_k,
                prompt_v,
                torch.tensor([0, part.stop - part.start]),
                own_k,
                own_v,
                self.ancestors[user : user + 1, some],
                self.scale,
            )
            wrong += float((out[user, some].double() - expected[0]).square().sum())
            total += float(expected.square().sum())
        return math.sqrt(wrong / total)


def median_ms(calls: list[Callable[[], object]], *, repeats: int = 5, least_ms: float = 30.0) -> float:
    """Median milliseconds of one call, from replays of a CUDA graph of all ``calls`` that last ``least_ms`` each."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for call in calls:
            call()

    def replay_ms(count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(count):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / count

    count = max(1, int(least_ms / max(replay_ms(2), 1e-3)))
    return statistics.median(replay_ms(count) for _ in range(repeats)) / len(calls)


@cache
def fastest_tiles(shape: DecodeShape, device: torch.device) -> PagedTiles:
    """The fastest of the variants at a shape, by trying them (a second or two, and once a shape)."""
    layer = Layer.random(shape, device)
    times = {tiles: median_ms([partial(layer.paged, tiles)], repeats=3, least_ms=5.0) for tiles in VARIANTS}
    return min(times, key=times.__getitem__)


def compare(shape: DecodeShape, device: torch.device, *, variants: bool = False) -> dict[str, Any]:
    """One row of the table: milliseconds a layer and relative errors of paged, engine and the paper's stages.

    Args:
        variants: also the time of each of paged's variants.
    """
    prompt_bytes = 4 * shape.users * shape.context * shape.kv_heads * shape.dim
    sets = max(1, min(8, int(2.5e8 // prompt_bytes)))  # several layers, so that short prompts are not always in L2
    layers = [Layer.random(shape, device, seed) for seed in range(sets)]
    tiles = fastest_tiles(shape, device)
    forms: dict[str, Callable[[Layer], Tensor]] = {
        "paged": lambda layer: layer.paged(tiles),
        "xgr": Layer.engine,
        "paper": Layer.staged,
    }
    row: dict[str, Any] = {"shape": str(shape), "paged_tiles": asdict(tiles)}
    for name, form in forms.items():
        row[f"{name}_error"] = layers[0].error(form(layers[0]))
        row[f"{name}_ms"] = median_ms([partial(form, layer) for layer in layers])
    row["paged_over_xgr"] = row["paged_ms"] / row["xgr_ms"]
    if shape in FLASHINFER_PAGED:
        row["flashinfer_paged_ms"] = FLASHINFER_PAGED[shape]
        row["paged_over_flashinfer"] = row["paged_ms"] / FLASHINFER_PAGED[shape]
    if variants:
        row["variants_ms"] = {
            f"{t.keys} keys, {t.warps} warps, {t.stages} stages": median_ms(
                [partial(layer.paged, t) for layer in layers], repeats=3
            )
            for t in VARIANTS
        }
    return row


def main() -> int:
    """Time all shapes of ``FLASHINFER_PAGED`` and one of narrow heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first three shapes, without the variants' times")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: the kernels are checked on the CPU by tests/bench_baselines, and timed only on a GPU")
    shapes = [*FLASHINFER_PAGED, DecodeShape(1000, 8, 256, heads=12, kv_heads=12, dim=64)]
    device, rows, wrong = torch.device("cuda", torch.cuda.current_device()), [], 0
    for shape in shapes[:3] if args.quick else shapes:
        row = compare(shape, device, variants=not args.quick)
        rows.append(row)
        wrong += sum(not row[f"{name}_error"] < 1e-2 for name in ("paged", "xgr", "paper"))
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

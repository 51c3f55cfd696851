"""Decode attention: every variant against float64, then its time a layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from isolation import Job, run_isolated
from timing import graph_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xgr_engine.bench.kernels.decode_layer import DecodeShape, Layer, cold_layers
from xgr_engine.xattention.triton import AttentionTiles, beam_attention

CUDA = torch.device("cuda")
MOST_LAYERS = 28  # so that a single user's short prompts leave the L2 cache as well
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}

HOPPER = [
    AttentionTiles(128, 64, stages=4, hopper=True),
    AttentionTiles(128, 128, stages=2, hopper=True),
]
PLAIN = [
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(128, 128, 8, 2),
    AttentionTiles(64, 64, 4, 3),
    AttentionTiles(64, 128, 4, 2),
]


TIMED = [
    DecodeShape(1000, 8, 256),
    DecodeShape(5000, 32, 512),
    DecodeShape(1000, 1, 256),
    DecodeShape(1000, 8, 512),
    DecodeShape(1000, 32, 512),
    DecodeShape(5000, 8, 256),
    DecodeShape(1000, 8, 48, own=1),
    DecodeShape(1000, 8, 256, heads=12, kv_heads=12, dim=64),
    DecodeShape(1000, 8, 256, heads=32),
]
CHECKED = [
    DecodeShape(1000, 3, 333),
    DecodeShape(17, 2, 33, own=1),
    DecodeShape(1, 2, 127, own=3, heads=8, kv_heads=8),
    DecodeShape(4097, 1, 127, own=2, heads=32, kv_heads=8, dim=64),
    DecodeShape(257, 2, 31, own=4, heads=16, kv_heads=2),
    DecodeShape(128, 2, 64, own=0),
    DecodeShape(0, 2, 65, own=2),
]


def poisoned(layer: Layer) -> Layer:
    """For the engine's form alone: users after the first have shorter prompts, some beams lack a token, and NaN stands
    wherever no table points."""
    users = torch.arange(len(layer.q), device=layer.q.device)
    lengths = (layer.start.diff() - 61 * users).clamp_min(0)
    start = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    ancestors = layer.ancestors.clone()
    if ancestors.shape[2] > 1:
        ancestors[:, ::7, 1] = -1
    unnamed = torch.ones(layer.slots[0].shape[:2], dtype=torch.bool, device=start.device)
    for user in users.tolist():
        unnamed[user, ancestors[user][ancestors[user] >= 0].long()] = False
    beyond = torch.arange(len(layer.pool[0]), device=start.device) >= start[-1]
    pool_k, pool_v = (t.masked_fill(beyond[:, None, None], torch.nan) for t in layer.pool)
    slots_k, slots_v = (t.masked_fill(unnamed[:, :, None, None], torch.nan) for t in layer.slots)
    return replace(layer, pool=(pool_k, pool_v), start=start, slots=(slots_k, slots_v), ancestors=ancestors)


def call(layer: Layer, tiles: AttentionTiles | None) -> Tensor:
    """The engine's form with these tiles."""
    return layer.engine(partial(beam_attention, tiles=tiles))


def with_splits(tiles: AttentionTiles, splits: int) -> AttentionTiles:
    return AttentionTiles(**{**vars(tiles), "splits": splits})


def label(tiles: AttentionTiles | None) -> str:
    if tiles is None:
        return "automatic"
    kind = "hopper" if tiles.hopper else f"triton w{tiles.warps}"
    return f"{kind} {tiles.rows}x{tiles.keys} s{tiles.stages}" + (f" /{tiles.splits}" if tiles.splits > 1 else "")


def check(shape: DecodeShape, tiles: AttentionTiles | None, device: torch.device = CUDA) -> float:
    """Relative error of one call on poisoned inputs and a poisoned result; NaN or inf when anything went wrong."""
    layer = poisoned(Layer.random(shape, device, seed=shape.beams))
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN while this is on
    try:
        out = call(layer, tiles)
        if out.is_cuda:
            torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    return layer.error(out, most_beams=shape.beams)


def folded_cudnn_ms(shape: DecodeShape, sets: int) -> float:
    """cuDNN over the prompt part alone, beams and group folded into query rows: a practical ceiling."""
    group = shape.heads // shape.kv_heads

    def normal(rows: int) -> Tensor:
        return torch.randn(shape.users, shape.kv_heads, rows, shape.dim, device="cuda", dtype=torch.bfloat16)

    data = [(normal(shape.beams * group), normal(shape.context), normal(shape.context)) for _ in range(sets)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return graph_ms([lambda x=x: F.scaled_dot_product_attention(*x) for x in data])  # type: ignore[misc]


def variants(shape: DecodeShape) -> list[AttentionTiles]:
    """Tile variants worth a try for a shape, with and without splitting the prompt."""
    lines = shape.beams * shape.heads // shape.kv_heads
    found = []
    for tiles in HOPPER + PLAIN:
        if tiles.hopper and (torch.cuda.get_device_capability()[0] != 9 or lines <= 64):
            continue
        programs = -(-lines // tiles.rows) * shape.kv_heads * shape.users
        fill = 132 // programs
        found.append(with_splits(tiles, max(1, fill)))
        if fill > 2:
            found.append(with_splits(tiles, fill // 2))
    return found


def examine(tiles: AttentionTiles | None, shapes: list[DecodeShape], warm: list[DecodeShape]) -> list[float]:
    """Errors of a variant on ``shapes``; then one call on each shape of ``warm``, to have it compiled."""
    errors = [check(shape, tiles) for shape in shapes]
    for shape in warm:
        timed = [tiles] if tiles is None else [v for v in variants(shape) if with_splits(v, 1) == tiles]
        if timed:
            layer = Layer.random(shape, CUDA)
            for variant in timed:
                call(layer, variant)
            torch.cuda.synchronize()
    return errors


def _examine_all(timed: list[DecodeShape]) -> tuple[list[dict[str, object]], set[str]]:
    hopper = HOPPER if torch.cuda.get_device_capability()[0] == 9 else []
    candidates = [None, *hopper, *PLAIN, *(with_splits(t, 3) for t in (*hopper[:1], PLAIN[0]))]
    jobs: dict[str, Job] = {label(tiles): (examine, (tiles, CHECKED, timed)) for tiles in candidates}
    results, failures = run_isolated(jobs, timeout_s=240)
    rows: list[dict[str, object]] = []
    wrong = set(failures)
    for name, reason in failures.items():
        print(f"WRONG attention {name}: {reason}", flush=True)
    for name, errors in results.items():
        for shape, error in zip(CHECKED, errors, strict=True):
            rows.append({"shape": str(shape), "variant": name, "error": error})
            if not error < TOLERANCE[torch.bfloat16]:
                wrong.add(name)
                print(f"WRONG attention {shape} {name}: {error:.2e}", flush=True)
    for dtype in (torch.float16, torch.float32):
        error = check(replace(CHECKED[0], dtype=dtype), None)
        rows.append({"shape": str(CHECKED[0]), "variant": f"automatic {dtype}", "error": error})
        if not error < TOLERANCE[dtype]:
            wrong.add(f"automatic {dtype}")
            print(f"WRONG attention {CHECKED[0]} {dtype}: {error:.2e}", flush=True)
    return rows, wrong


def run(limits: dict[str, float], quick: bool) -> tuple[list[dict[str, object]], int]:
    """Check all variants on awkward shapes, then time the right ones. Returns the rows and how many were wrong."""
    timed = TIMED[:2] if quick else TIMED
    rows, wrong = _examine_all(timed)
    print(f"attention: {len(rows)} checks, {len(wrong)} variants wrong", flush=True)
    for shape in timed:
        layers = cold_layers(shape, CUDA, MOST_LAYERS)
        floor = max(shape.flops / limits["matmul_tflops"] / 1e9, shape.bytes / limits["copy_tbs"] / 1e9)
        best: tuple[float, str] = (float("inf"), "none")
        for tiles in [None, *variants(shape)]:
            name = label(tiles)
            if label(tiles and with_splits(tiles, 1)) in wrong:
                continue
            ms = graph_ms([partial(call, layer, tiles) for layer in layers])
            rows.append({"shape": str(shape), "variant": name, "ms": ms, "floor_ms": floor})
            best = min(best, (ms, name))
            print(f"  {shape} {name}: {ms:.4f} ms, {shape.flops / ms / 1e9:.0f} TFLOP/s", flush=True)
        ceiling = folded_cudnn_ms(shape, len(layers))
        rows.append({"shape": str(shape), "variant": "cudnn folded, prompt only", "ms": ceiling, "floor_ms": floor})
        print(
            f"attention {shape}: {best[0]:.4f} ms ({best[1]}), floor {floor:.4f}, cuDNN folded {ceiling:.4f}",
            flush=True,
        )
    return rows, len(wrong)

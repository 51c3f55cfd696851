"""Candidate schedules of the Hopper attention kernel, checked and timed side by side.

    python benchmarks/attention_variants.py [--seconds 25] [--limit 50]

Every candidate runs in processes of its own first: compiled, checked on awkward shapes against float64 with poisoned
inputs and results, and called on the timed shapes. Those that were right are then timed in turns, round after round:
the card's clocks move by ten per cent as it warms up, which a single pass over the candidates would charge to the last
ones. A matrix product timed in each round says what the card gave meanwhile. The table comes last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from isolation import Job, run_isolated  # noqa: E402
from kernel_cases.attention import CUDA, MOST_LAYERS, TOLERANCE, call, check, folded_cudnn_ms  # noqa: E402
from timing import capture, span_ms  # noqa: E402

from xgr_engine.bench.kernels.decode_layer import DecodeShape, Layer, cold_layers  # noqa: E402
from xgr_engine.xattention.triton import AttentionTiles, choose_tiles  # noqa: E402

AUTOMATIC = AttentionTiles(128, 128, stages=2, hopper=True)
CANDIDATES: dict[str, AttentionTiles] = {
    "128x2 (automatic)": AUTOMATIC,
    "64x4": AttentionTiles(128, 64, stages=4, hopper=True),
    "plain w8 128x64": AttentionTiles(128, 64, 8, 3),
}
PARTS = 4  # processes a candidate: its cases are compiled side by side
TIMED = [
    DecodeShape(1000, 8, 256),
    DecodeShape(5000, 32, 512),
    DecodeShape(5000, 8, 256),
    DecodeShape(1000, 8, 512),
    DecodeShape(1000, 1, 256),
]
HARD = [
    DecodeShape(1000, 3, 333),
    DecodeShape(0, 2, 65),
    DecodeShape(1000, 2, 256, own=1),
    DecodeShape(128, 2, 64, own=0),
    DecodeShape(300, 2, 100, heads=4, kv_heads=4, own=3),
]
HARDER = [DecodeShape(300, 2, 100, heads=12, kv_heads=4, own=3), DecodeShape(4097, 1, 127, heads=32, dim=64)]


def few_programs(own: int, beams: int, tiles: AttentionTiles) -> float:
    """Error of one user's split call: a cache far larger than the prompt and more prompt starts than users."""
    layer = Layer.random(DecodeShape(1000, 1, max(beams, 256), own=own), CUDA, seed=5)
    room = 20000
    cache_k, cache_v = (torch.full((room, 8, 128), torch.nan, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    cache_k[:1000], cache_v[:1000] = (prompt[:1000] for prompt in layer.pool)
    starts = torch.tensor([0, 1000, room, room, room], dtype=torch.int32, device=CUDA)
    ancestors = layer.ancestors[:, :beams].contiguous()
    wide = replace(layer, q=layer.q[:, :beams], pool=(cache_k, cache_v), start=starts, ancestors=ancestors)
    out = call(wide, tiles)
    torch.cuda.synchronize()
    return wide.error(out, most_beams=beams)


def repeats_itself(tiles: AttentionTiles) -> float:
    """0 when a call gives the same bits every time, which a race would not; infinity otherwise."""
    layer = Layer.random(HARD[0], CUDA, seed=7)
    first = call(layer, tiles)
    return 0.0 if all(torch.equal(first, call(layer, tiles)) for _ in range(50)) else float("inf")


def cases(tiles: AttentionTiles) -> list[tuple[str, Callable[[], float]]]:
    """What a candidate is asked, each with a function that returns an error."""
    cut = replace(tiles, splits=4)
    shapes = HARD + (HARDER if tiles.hopper else [])
    owns = (0, 1, 2) if tiles == AUTOMATIC else (2,)
    return [
        *((str(shape), partial(check, shape, tiles)) for shape in shapes),
        (f"{HARD[0]} /4", partial(check, HARD[0], cut)),
        *((f"one user A{own} /4", partial(few_programs, own, 256, cut)) for own in owns),
        ("repeated", partial(repeats_itself, tiles)),
        *((f"{shape}, compiled", partial(called, tiles, shape)) for shape in TIMED),
    ]


def called(tiles: AttentionTiles, shape: DecodeShape) -> float:
    """0 once a timed shape was called: its kernel now lies in Triton's cache."""
    call(Layer.random(shape, CUDA), for_shape(tiles, shape))
    torch.cuda.synchronize()
    return 0.0


def examine(name: str, part: int) -> list[tuple[str, float]]:
    """Errors of a part of a candidate's cases."""
    return [(case, error()) for case, error in cases(CANDIDATES[name])[part::PARTS]]


def examine_one_row() -> list[tuple[str, float]]:
    """The first step of a search: one row a user, no own tokens, the prompt split over many programs."""
    tiles = choose_tiles(1, 1, 8, 2, torch.bfloat16, 132, hopper=True)
    return [(f"one row A0 /{tiles.splits}", few_programs(0, 1, tiles)), ("one row A2", few_programs(2, 1, tiles))]


def for_shape(tiles: AttentionTiles, shape: DecodeShape) -> AttentionTiles:
    programs = -(-shape.beams * shape.heads // shape.kv_heads // tiles.rows) * shape.kv_heads * shape.users
    return replace(tiles, splits=max(1, 132 // programs))


def measure(shape: DecodeShape, names: list[str], seconds: float) -> tuple[dict[str, float], float]:
    """Median milliseconds by candidate, and TFLOP/s of a matrix product in between."""
    layers = cold_layers(shape, CUDA, MOST_LAYERS)
    graphs = {}
    for name in names:
        tiles = for_shape(CANDIDATES[name], shape)
        graphs[name] = capture([partial(call, layer, tiles) for layer in layers])
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = capture([lambda: a @ b] * 8)
    times: dict[str, list[float]] = {name: [] for name in names}
    product: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(product) < 3:
        product.append(span_ms(matmul.replay, 8, 0.05))
        for name, graph in graphs.items():
            times[name].append(span_ms(graph.replay, len(layers), 0.05))
        names.append(names.pop(0))
        graphs = {name: graphs[name] for name in names}
    rate = 2 * 4096**3 / statistics.median(product) / 1e9
    return {name: statistics.median(values) for name, values in times.items()}, rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25, help="time spent on timing, over all shapes")
    parser.add_argument("--limit", type=float, default=50, help="seconds for compiling and checking")
    args = parser.parse_args()
    begin = time.perf_counter()
    jobs: dict[str, Job] = {f"{name} / {part}": (examine, (name, part)) for name in CANDIDATES for part in range(PARTS)}
    jobs["one row"] = (examine_one_row, ())
    results, failures = run_isolated(jobs, timeout_s=args.limit)
    wrong = {job.split(" / ")[0] for job in failures}
    for job, reason in failures.items():
        print(f"WRONG {job}: {reason}", flush=True)
    for job, errors in results.items():
        for case, error in errors:
            if not error < TOLERANCE[torch.bfloat16]:
                wrong.add(job.split(" / ")[0])
                print(f"WRONG {job} {case}: {error:.2e}", flush=True)
        print(f"checked {job}: {len(errors)} cases, worst {max(e for _, e in errors):.1e}", flush=True)
    print(f"checks took {time.perf_counter() - begin:.0f} s", flush=True)
    names = [name for name in CANDIDATES if name not in wrong]
    table, rates = [], []
    for shape in TIMED:
        times, rate = measure(shape, list(names), args.seconds / len(TIMED))
        table.append((shape, times, folded_cudnn_ms(shape, 2)))
        rates.append(rate)
    print(f"{'ms':22s}" + "".join(f"{f'{shape.context}x{shape.users}x{shape.beams}':>15s}" for shape, _, _ in table))
    for name in names:
        print(f"{name:22s}" + "".join(f"{times[name]:15.4f}" for _, times, _ in table))
    print(f"{'cuDNN, prompt only':22s}" + "".join(f"{folded:15.4f}" for _, _, folded in table))
    print(f"{'product, TFLOP/s':22s}" + "".join(f"{rate:15.0f}" for rate in rates))
    floors = [shape.flops / rate / 1e9 for (shape, _, _), rate in zip(table, rates, strict=True)]
    print(f"{'floor at that rate':22s}" + "".join(f"{floor:15.4f}" for floor in floors))
    print(f"wrong: {sorted(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

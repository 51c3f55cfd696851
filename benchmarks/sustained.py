"""Sustained time of a batch on one GPU, geometry by geometry: the rows of docs/performance.md, checked, then timed.

    python benchmarks/sustained.py --geometry qwen3-1.7b,qwen3-0.6b --rows 1000x8x128,1000x8x256,1000x8x512

A row is context x users x beam, K = W, so that no row of the search can be skipped. Before timing, two users of the
row are computed again by the plain torch implementation, and the lists compared. Batches are submitted one ahead, as
a job does; a time is that of many batches, from the end of the first to the end of the last, results on the host.

Beside each time stand the row's linear layers on their own (benchmarks/linears.py), and how many of the candidates that
the trie allows the selection read again, with K = W and with K = 50. Rows that differ in W alone are put together in
``growth``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from intervals import extent_us, kernel_totals, traced
from linears import LinearFloor, growth
from rows import Prompts, Shape, World, compare, elapsed, nothing, print_table, synchronize, write

from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.phases import busy_time
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.search.setup import DeadNodes

SHORT_LIST = 50  # a usual K, beside K = W


def main(given: list[str] | None = None, world: World | None = None) -> int:
    args = arguments(given)
    world = world or World(args.device, args.items, args.codes)
    floor = None if args.no_floor else LinearFloor(world)
    record: dict[str, Any] = {
        **world.facts(),
        "options": {name: value for name, value in vars(args).items() if name != "out"},
        "rows": [],
        "growth": [],
    }
    if floor is not None:
        record["large_product_tflops"] = round(floor.tflops, 1)
    for geometry in args.geometry.split(","):
        for shape in Shape.parse(args.rows):
            line = measure(world, geometry, shape, args)
            if floor is not None:
                line |= floor.of(geometry, shape)
            record["rows"].append(line)
            record["growth"] = growth(record["rows"]) if floor is not None else []
            print(line, flush=True)
            write(args.out, record)
    for line in record["rows"]:  # at the end: the profiler slows every later launch of the process
        shape = Shape(line["context"], line["users"], line["beam"])
        if str(shape) in args.profile.split(","):
            line |= profiled(world, line["geometry"], shape)
            print(f"{line['geometry']} {shape}: {line['kernels']}", flush=True)
            write(args.out, record)
    show(record)
    return int(any(not line.get("matches", True) for line in record["rows"]))


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-1.7b", help="names, separated by commas")
    parser.add_argument("--rows", required=True, help="context x users x beam, separated by commas")
    parser.add_argument("--items", type=float, default=1e6)
    parser.add_argument("--codes", default="8192x3")
    parser.add_argument("--lanes", type=int, default=1, help="batches side by side")
    parser.add_argument("--seconds", type=float, default=4.0, help="of sustained running a row")
    parser.add_argument("--profile", default="", help="rows whose kernels are listed")
    parser.add_argument("--unchecked", action="store_true", help="skip the comparison (for shapes checked before)")
    parser.add_argument("--no-floor", action="store_true", help="do not time the linear layers on their own")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def show(record: dict[str, Any]) -> None:
    """The rows and their growth, as tables."""
    lines = [
        {**line, "read share, K = W / 50": [shares["read_share"] for shares in line["candidates"].values()]}
        for line in record["rows"]
    ]
    columns = ["geometry", "context", "users", "beam", "ms", "users_per_s", "prefill_ms", "tail_ms"]
    columns += ["linears_alone_ms", "linears_at_rate_ms", "read share, K = W / 50", "matches"]
    print_table("Sustained, milliseconds a batch", lines, columns)
    if record["growth"]:
        columns = ["geometry", "context", "users", "beam", "ms_growth", "linears_tflop_growth"]
        columns += ["linears_alone_ms_growth", "tail_ms_growth", "linears_tail_tflop_growth"]
        columns += ["no_faster_than_linears"]
        print_table("Growth with the width: time against linear layers", record["growth"], columns)


def measure(world: World, geometry: str, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """One row: check, warm up, time; then the same with a short list."""
    batches = [world.prompts(geometry, shape.context, shape.users, seed) for seed in range(4)]
    line = {"geometry": geometry, **vars(shape), "lanes": args.lanes} | time_row(world, geometry, shape, batches, args)
    line["candidates"][f"K = {SHORT_LIST}"] = with_short_list(world, geometry, shape, batches)
    return line


def time_row(
    world: World, geometry: str, shape: Shape, batches: list[Prompts], args: argparse.Namespace
) -> dict[str, Any]:
    """A row with K = W."""
    gpu = world.device.type == "cuda"
    free_memory(world.device)
    base = _reset_peak(gpu)
    options = SearchOptions(beam=shape.beam, top_k=shape.beam)
    recommender = world.recommender(geometry, options, args.lanes)
    first, line = batches[0], dict[str, Any]()
    result = recommender.run(first, nothing(shape.users))
    peak = _peak(gpu)
    if not args.unchecked:
        line |= compare(world, geometry, options, first[:2], (result.counts, result.leaves, result.scores))
        free_memory(world.device)
    _reset_peak(gpu)
    for prompts in batches[1:]:
        recommender.run(prompts, nothing(shape.users))
    once = elapsed(lambda: recommender.run(first, nothing(shape.users)), world.device)
    count = max(4, int(args.seconds / once))
    seconds = sustained(recommender, batches, count)
    repeats = 5 if 5 * once < args.seconds else 3
    alone = [elapsed(lambda: recommender.run(first, nothing(shape.users)), world.device) for _ in range(repeats)]
    line |= {
        "ms": round(1e3 * seconds, 2),
        "users_per_s": round(shape.users / seconds, 1),
        "alone_ms": round(1e3 * statistics.median(alone), 2),
        "batches": count,
    }
    line |= {name: round(value, 2) for name, value in phases(recommender, first, repeats).items()}
    if gpu:
        peak = max(peak, _peak(gpu))
        line |= {"peak_gib": round(peak / 2**30, 2), "beyond_weights_gib": round((peak - base) / 2**30, 2)}
    line["candidates"] = {"K = W": candidates(recommender, batches[:2])}
    return line


def sustained(recommender: Recommender, batches: list[Prompts], count: int) -> float:
    """Seconds a batch, from the end of the first, behind which the second is queued already, to the end of the last."""
    users = len(batches[0])
    pending = recommender.submit(batches[0], nothing(users))
    start = 0.0
    for number in range(1, count + 1):
        following = recommender.submit(batches[number % len(batches)], nothing(users))
        recommender.collect(pending)
        start = start or time.perf_counter()
        pending = following
    recommender.collect(pending)
    return (time.perf_counter() - start) / count


def candidates(recommender: Recommender, batches: list[Prompts]) -> dict[str, Any]:
    """Candidates that the trie allowed a user, and those that the selection read once their scores were known.

    The device reads all block maxima (a 32nd of the candidates) and then the blocks that can hold one of the best. On a
    CPU rows that cannot win are not expanded at all, so only what was scored is known.
    """
    before = _counts(recommender)
    for prompts in batches:
        recommender.run(prompts, nothing(len(prompts)))
    allowed, read = (after - old for after, old in zip(_counts(recommender), before, strict=True))
    users = sum(len(prompts) for prompts in batches)
    known = recommender.lane is not None
    return {
        "allowed_per_user": round(allowed / users, 1) if known else None,
        "read_per_user": round(read / users, 1),
        "read_share": round(read / allowed, 4) if known and allowed else None,
    }


def _counts(recommender: Recommender) -> tuple[int, int]:
    lane = recommender.lane
    return (0, recommender.counters.candidates) if lane is None else lane.search.candidates_read()


def with_short_list(world: World, geometry: str, shape: Shape, batches: list[Prompts]) -> dict[str, Any]:
    """The same batches with a K of 50: candidates, and a short timing."""
    free_memory(world.device)
    options = SearchOptions(beam=shape.beam, top_k=min(SHORT_LIST, shape.beam))
    recommender = world.recommender(geometry, options)
    recommender.run(batches[0], nothing(shape.users))
    found = candidates(recommender, batches[:2])
    return {**found, "ms": round(1e3 * sustained(recommender, batches, 3), 2)}


def phases(recommender: Recommender, prompts: Prompts, repeats: int) -> dict[str, float]:
    """Device milliseconds of the prefill and of the tail behind it; empty on a CPU."""
    lane = recommender.lane
    if lane is None:
        return {}
    pack = PackedPrompts.of(prompts, recommender.model.device)
    dead = DeadNodes.none(len(recommender.setup.levels), len(prompts), torch.device("cpu"))
    times: dict[str, list[float]] = {"prefill_ms": [], "tail_ms": []}
    with torch.inference_mode():
        for _ in range(repeats):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # so that launches run ahead and the device's own time is seen
            marks[0].record()
            hidden = lane.prefill.run(pack)
            marks[1].record()
            lane.search.run(hidden, dead)
            marks[2].record()
            torch.cuda.synchronize()
            times["prefill_ms"].append(marks[0].elapsed_time(marks[1]))
            times["tail_ms"].append(marks[1].elapsed_time(marks[2]))
    return {name: statistics.median(values) for name, values in times.items()}


def profiled(world: World, geometry: str, shape: Shape) -> dict[str, Any]:
    """Share of the wall time in which something runs on the device (union of intervals), and the kernels by time."""
    free_memory(world.device)
    batches = [world.prompts(geometry, shape.context, shape.users, seed) for seed in range(4)]
    recommender = world.recommender(geometry, SearchOptions(beam=shape.beam, top_k=shape.beam))
    for prompts in batches:
        recommender.run(prompts, nothing(shape.users))
    device = recommender.model.device
    count = 2 * len(batches)
    walls: list[float] = []

    def work() -> None:
        start = time.perf_counter()
        sustained(recommender, batches, count - 1)
        synchronize(device)
        walls.append(time.perf_counter() - start)

    found = traced(work, device)
    busy = busy_time(found)
    return {
        "busy": round(busy / 1e6 / walls[0], 4),
        "busy_between_first_and_last": round(busy / extent_us(found), 4),
        "kernels": kernel_totals(found, count),
    }


def _reset_peak(gpu: bool) -> int:
    """Forget the peak; bytes in use now."""
    if not gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak(gpu: bool) -> int:
    return int(torch.cuda.max_memory_allocated()) if gpu else 0


if __name__ == "__main__":
    sys.exit(main())

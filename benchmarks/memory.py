"""Peak device memory of a batch against the formula that plans it, and against a copy of the prompt for each beam.

    python benchmarks/memory.py --geometry qwen3-1.7b,qwen3-0.6b [--rows 3000x8x512,...] [--out F.json]

Each row (context x users x beam) runs in a fresh recommender. Beside the weights there are

* *fixed*: the catalog's trie and the rows of the output projection that belong to SID tokens, once for all batches,
* keys and values: ``kv`` bytes a token, for every prompt token once and for every generated token that later levels
  read (slots); what the cache really allocates stands beside it (it has room for a captured number of users),
* activations, candidates, logits and graphs. The plan (``xgr_engine/xschedule/memory.py``) predicts all but *fixed*.

``first`` is the peak of the first batch, in which kernels are compiled and graphs recorded; ``steady`` that of later
batches, one queued behind the other, plus what the graphs' pools hold without using it just then. Both are bytes that
tensors occupy; ``reserved`` is what the allocator took from the device for them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rows import Prompts, Shape, World, compare, nothing, print_table, synchronize, write

from xgr_engine.bench.memory import free_memory
from xgr_engine.kernels.launch import gate_up_rows
from xgr_engine.models.spec import EncoderDecoderSpec
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.xschedule.memory import CostModel, cost_model

ROWS = ",".join([*(f"3000x{users}x{beam}" for users in (1, 4, 8) for beam in (128, 256, 512)), "1000x8x512"])
FORMULA = {
    "kv_a_token": "2 x layers x Hkv x D x bytes of a value",
    "shared_kv": "kv_a_token x users x prompt tokens",
    "generated_kv": "kv_a_token x users x slots; slots: min(W, nodes with children) of all levels but the last, summed",
    "plan": "fixed + per_token x prompt tokens + per_row x rows + per_user x users + "
    "min(logits_cap, logits_per_row x rows), rows = users x rows_per_user; coefficients: each row's cost_model, made "
    "as in xgr_engine/xschedule/memory.py",
    "copy_a_beam": "kv_a_token x users x W x (prompt tokens + levels): by arithmetic, nothing shared between beams",
    "peak": "allocated bytes at the peak minus those before the recommender was made, minus fixed",
}


def main(given: list[str] | None = None, world: World | None = None) -> int:
    args = arguments(given)
    world = world or World(args.device, args.items, args.codes)
    record: dict[str, Any] = {**world.facts(), "formula": FORMULA, "rows": []}
    for geometry in args.geometry.split(","):
        for shape in Shape.parse(args.rows):
            record["rows"].append(measure(world, geometry, shape))
            write(args.out, record)
    show(record["rows"])
    return int(any(not line["matches"] for line in record["rows"]))


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-1.7b,qwen3-0.6b", help="names, separated by commas")
    parser.add_argument("--rows", default=ROWS, help="context x users x beam, separated by commas")
    parser.add_argument("--items", type=float, default=1e6)
    parser.add_argument("--codes", default="8192x3")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script, nothing is measured")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def show(lines: list[dict[str, Any]]) -> None:
    """The table, in MiB."""
    names = ["shared_kv", "generated_kv", "cache", "plan", "steady", "first", "reserved", "graph_pools", "fixed"]
    names += ["copy_a_beam"]
    columns = ["geometry", "context", "users", "beam", *names, "steady / plan", "copies / steady", "matches"]
    rows = []
    for line in lines:
        sizes = {name: line["bytes"].get(name) for name in names}
        mib = {name: None if size is None else round(size / 2**20) for name, size in sizes.items()}
        rows.append(
            {**line, **mib, "steady / plan": line["steady_over_plan"], "copies / steady": line["copies_over_steady"]}
        )
    print_table("Device memory of a batch beside the weights, MiB", rows, columns)


def measure(world: World, geometry: str, shape: Shape) -> dict[str, Any]:
    """One row: the formula, the peaks, and two users' lists compared."""
    options = SearchOptions(beam=shape.beam, top_k=shape.beam)
    batches = [world.prompts(geometry, shape.context, shape.users, seed) for seed in range(3)]
    predicted, cost = formula(world, geometry, shape, options)
    measured, found = peaks(world, geometry, options, batches)
    free_memory(world.device)
    checked = compare(world, geometry, options, batches[0][:2], found)
    steady = measured.get("steady")
    return {
        "geometry": geometry,
        **vars(shape),
        "bytes": {**predicted, **measured},
        "steady_over_plan": None if steady is None else round(steady / predicted["plan"], 3),
        "first_over_plan": None if steady is None else round(measured["first"] / predicted["plan"], 3),
        "copies_over_steady": None if steady is None else round(predicted["copy_a_beam"] / steady, 1),
        "cost_model": asdict(cost),
        **checked,
    }


def formula(world: World, geometry: str, shape: Shape, options: SearchOptions) -> tuple[dict[str, int], CostModel]:
    """Bytes from sizes alone."""
    model = world.model(geometry)
    spec, size = model.spec, model.decoder.embed.element_size()
    sizes, gpu = (spec.hidden_size, spec.intermediate_size), world.device.type == "cuda"
    stored = None
    if not isinstance(spec, EncoderDecoderSpec):
        stored = gate_up_rows(world.device, model.decoder.dtype, *sizes, bias=spec.mlp_bias)
    cost = cost_model(spec, world.catalog.trie, options, 0, size, gpu=gpu, gate_up_rows=stored)
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size
    tokens, slots = shape.users * shape.context, world.recommender(geometry, options).setup.slots
    predicted = {
        "kv_a_token": kv,
        "slots_a_user": slots,
        "shared_kv": kv * tokens,
        "generated_kv": kv * shape.users * slots,
        "plan": cost.of_batch(tokens, shape.users),
        "copy_a_beam": kv * shape.users * shape.beam * (shape.context + world.levels),
    }
    return predicted, cost


def peaks(
    world: World, geometry: str, options: SearchOptions, batches: list[Prompts]
) -> tuple[dict[str, int], tuple[Any, Any, Any]]:
    """Bytes measured (none on a CPU), and the first batch's lists."""
    device, gpu = world.device, world.device.type == "cuda"
    users, tokens = len(batches[0]), sum(len(prompt) for prompt in batches[0])
    forget_workspaces(world)
    before = _allocated(gpu)
    recommender = world.recommender(geometry, options)
    fixed = _allocated(gpu) - before
    _reset_peak(gpu)
    recommender.reserve(tokens, users)
    result = recommender.run(batches[0], nothing(users))
    found = (result.counts, result.leaves, result.scores)
    if not gpu:
        return {}, found
    floor = before + fixed
    first = int(torch.cuda.max_memory_allocated()) - floor
    free_memory(device)
    _reset_peak(gpu)
    run_ahead(recommender, batches)
    used = int(torch.cuda.max_memory_allocated()) - floor
    pools, idle = graph_pools()
    assert recommender.lane is not None
    cache = recommender.lane.cache
    tensors = (cache.prompt_k, cache.prompt_v, cache.generated_k, cache.generated_v)
    measured = {
        "weights": model_bytes(world, geometry),
        "before": before,
        "fixed": fixed,
        "cache": sum(tensor.nbytes for tensor in tensors),
        "first": first,
        "steady": used + idle,
        "steady_without_idle_pools": used,
        "graph_pools": pools,
        "reserved": int(torch.cuda.max_memory_reserved()) - floor,
    }
    return measured, found


def model_bytes(world: World, geometry: str) -> int:
    """Of the weights."""
    return world.model(geometry).bytes


def run_ahead(recommender: Recommender, batches: list[Prompts]) -> None:
    """Batches as a job submits them: the next is queued while one computes."""
    users = len(batches[0])
    pending = recommender.submit(batches[0], nothing(users))
    for prompts in batches[1:]:
        following = recommender.submit(prompts, nothing(users))
        recommender.collect(pending)
        pending = following
    recommender.collect(pending)
    synchronize(recommender.model.device)


def graph_pools() -> tuple[int, int]:
    """Bytes that the pools of all CUDA graphs hold, and those of them that belong to no live tensor.

    While a graph replays it uses them, but the allocator counts them as free.
    """
    return pool_bytes(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]


def pool_bytes(segments: list[dict[str, Any]]) -> tuple[int, int]:
    """:func:`graph_pools` of a snapshot. Ordinary segments have the pool (0, 0)."""
    private = [part for part in segments if tuple(part.get("segment_pool_id", (0, 0))) != (0, 0)]
    held = sum(part["total_size"] for part in private)
    return held, held - sum(part["allocated_size"] for part in private)


def forget_workspaces(world: World) -> None:
    """Give back what earlier rows left behind, matrix products' scratch memory included."""
    free_memory(world.device)
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if world.device.type == "cuda" and forget is not None:
        forget()
        free_memory(world.device)


def _allocated(gpu: bool) -> int:
    return int(torch.cuda.memory_allocated()) if gpu else 0


def _reset_peak(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main())

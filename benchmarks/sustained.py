"""Sustained time of a batch on one GPU, geometry by geometry: the rows of docs/performance.md, checked, then timed.

    python benchmarks/sustained.py --geometry qwen3-1.7b --rows 1000x8x256,5000x8x256 [--items 1e6]

A row is context x users x beam, K = W, so that no row of the search can be skipped. Before timing, two users of the
row are computed again by the plain torch implementation, and the lists compared. Batches are submitted one ahead, as
a job does; a time is that of many batches, from the end of the first to the end of the last, results on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from xgr_engine.bench.geometries import find_geometry  # noqa: E402
from xgr_engine.bench.workloads import BenchCatalog, BenchModel, random_weights, synthetic_catalog  # noqa: E402
from xgr_engine.models.decoder_only import DecoderOnly  # noqa: E402
from xgr_engine.models.ops import reference_ops  # noqa: E402
from xgr_engine.options import SearchOptions  # noqa: E402
from xgr_engine.recommender import Recommender  # noqa: E402
from xgr_engine.xbeam.ranking import BatchResult  # noqa: E402

Prompts = list[np.ndarray]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-1.7b")
    parser.add_argument("--rows", required=True, help="context x users x beam, separated by commas")
    parser.add_argument("--items", type=float, default=1e6)
    parser.add_argument("--codes", default="8192x3")
    parser.add_argument("--lanes", type=int, default=1, help="batches side by side")
    parser.add_argument("--seconds", type=float, default=4.0, help="of sustained running a row")
    parser.add_argument("--profile", default="", help="rows whose kernels are listed")
    parser.add_argument("--unchecked", action="store_true", help="skip the comparison (for shapes checked before)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    codes, levels = (int(part) for part in args.codes.split("x"))
    model = random_weights(find_geometry(args.geometry), codes, levels, device)
    catalog = synthetic_catalog(int(args.items), codes, levels)
    record: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "geometry": args.geometry,
        "items": int(args.items),
        "rows": [],
    }
    for row in args.rows.split(","):
        context, users, beam = (int(part) for part in row.split("x"))
        line = measure(model, catalog, context, users, beam, args)
        record["rows"].append(line)
        print({key: value for key, value in line.items() if key != "kernels"}, flush=True)
        for kernel in line.get("kernels", []):
            print("   ", kernel)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return int(any(not line["matches"] for line in record["rows"]))


def measure(
    model: BenchModel, catalog: BenchCatalog, context: int, users: int, beam: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One row: check, warm up, time."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    options = SearchOptions(beam=beam, top_k=beam)
    recommender = Recommender(model.decoder, model.head, catalog.trie, model.table, options, lanes=args.lanes)
    rng = np.random.default_rng(context + users)
    vocabulary = model.spec.vocab_size

    def batch() -> Prompts:
        return list(rng.integers(0, vocabulary, (users, context), dtype=np.int32))

    line: dict[str, Any] = {"context": context, "users": users, "beam": beam, "lanes": args.lanes}
    first = batch()
    result = recommender.run(first, nothing(users))
    line |= {"matches": True} if args.unchecked else compare(model, catalog, options, first[:2], result)
    for _ in range(3):
        recommender.run(batch(), nothing(users))
    batches = [batch() for _ in range(4)]
    once = elapsed(lambda: recommender.run(batches[0], nothing(users)))
    count = max(4, int(args.seconds / once))
    # from the end of the first batch, behind which the second is queued already, to the end of the last
    pending = recommender.submit(batches[0], nothing(users))
    start = 0.0
    for number in range(1, count + 1):
        following = recommender.submit(batches[number % 4], nothing(users))
        recommender.collect(pending)
        start = start or time.perf_counter()
        pending = following
    recommender.collect(pending)
    sustained = (time.perf_counter() - start) / count
    line |= {
        "ms": round(1e3 * sustained, 2),
        "users_per_s": round(users / sustained, 1),
        "alone_ms": round(
            1e3 * statistics.median(elapsed(lambda: recommender.run(first, nothing(users))) for _ in range(5)), 2
        ),
        "batches": count,
        **{name: round(value, 2) for name, value in phases(recommender, first).items()},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "beyond_weights_gib": round((torch.cuda.max_memory_allocated() - base) / 2**30, 2),
    }
    if f"{context}x{users}x{beam}" in args.profile.split(","):
        line |= profile(recommender, batches, users)
    return line


def nothing(users: int) -> Prompts:
    return [np.empty(0, np.int32)] * users


def elapsed(work: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def phases(recommender: Recommender, prompts: Prompts) -> dict[str, float]:
    """Device milliseconds of the prefill and of the tail behind it."""
    from xgr_engine.models.packing import PackedPrompts
    from xgr_engine.search.setup import DeadNodes

    lane = recommender.lane
    assert lane is not None
    pack = PackedPrompts.of(prompts, recommender.model.device)
    dead = DeadNodes.none(len(recommender.setup.levels), len(prompts), torch.device("cpu"))
    times: dict[str, list[float]] = {"prefill_ms": [], "tail_ms": []}
    with torch.inference_mode():
        for _ in range(5):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(20_000_000)  # so that launches run ahead and the device's own time is seen
            marks[0].record()
            hidden = lane.prefill.run(pack)
            marks[1].record()
            lane.search.run(hidden, dead)
            marks[2].record()
            torch.cuda.synchronize()
            times["prefill_ms"].append(marks[0].elapsed_time(marks[1]))
            times["tail_ms"].append(marks[1].elapsed_time(marks[2]))
    return {name: statistics.median(values) for name, values in times.items()}


def compare(
    model: BenchModel, catalog: BenchCatalog, options: SearchOptions, prompts: Prompts, result: BatchResult
) -> dict[str, Any]:
    """The first users' lists against plain torch kernels and the host's search, same weights and dtype."""
    decoder = model.decoder
    plain = DecoderOnly(decoder.spec, decoder.embed, decoder.norm, decoder.layers, reference_ops())
    other = Recommender(plain, model.head, catalog.trie, model.table, options).run(prompts, nothing(len(prompts)))
    overlap, difference, top1, at, mine_at = [], 0.0, 0, 0, 0
    for user, count in enumerate(other.counts.tolist()):
        theirs = dict(zip(other.leaves[at : at + count].tolist(), other.scores[at : at + count].tolist(), strict=True))
        own = result.counts[user]
        leaves, scores = result.leaves[mine_at : mine_at + own], result.scores[mine_at : mine_at + own]
        common = [
            (theirs[leaf], score)
            for leaf, score in zip(leaves.tolist(), scores.tolist(), strict=True)
            if leaf in theirs
        ]
        overlap.append(len(common) / count)
        difference = max(difference, *(abs(one - two) for one, two in common))
        top1 += int(leaves[0]) == next(iter(theirs))
        at, mine_at = at + count, mine_at + own
    mean = float(np.mean(overlap))
    # random weights give nearly flat scores: lists differ at the cut, so the scores decide
    return {
        "overlap": round(mean, 4),
        "score_difference": float(f"{difference:.2g}"),
        "top1_equal": f"{top1}/{len(prompts)}",
        "matches": mean > 0.9 and difference < 0.25,
    }


def profile(recommender: Recommender, batches: list[Prompts], users: int) -> dict[str, Any]:
    """Share of the wall time in which a kernel runs (union of intervals), and the kernels by time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as trace:
        start = time.perf_counter()
        pending = recommender.submit(batches[0], nothing(users))
        for prompts in [*batches[1:], *batches]:
            following = recommender.submit(prompts, nothing(users))
            recommender.collect(pending)
            pending = following
        recommender.collect(pending)
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in trace.events() if event.device_type.name == "CUDA"
    )
    busy, reach = 0.0, -1.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    count = 2 * len(batches)
    totals: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type.name == "CUDA":
            totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    ranked = sorted(totals.items(), key=lambda pair: -sum(pair[1]))[:28]
    return {
        "busy": round(busy / 1e6 / wall, 4),
        "busy_between_first_and_last": round(busy / (reach - spans[0][0]), 4),
        "kernels": [f"{sum(t) / 1e3 / count:8.3f} ms {len(t) / count:6.0f}x  {name[:90]}" for name, t in ranked],
    }


if __name__ == "__main__":
    sys.exit(main())

"""How busy the GPU is over many users: union of kernel intervals in the profiler's trace over wall time.

    python benchmarks/busy.py --geometry qwen3-1.7b,qwen3-0.6b [--users 1000 --batch 32 --beam 256] [--out F.json]

The users' token ids are in memory; everything behind that is the job's own: the pipeline's threads plan, upload, launch
and fetch, with as many batches in flight. They run once without and once with the profiler, which sees the device
alone. Wall time is from the first launch to the end of the last batch on the device. ``busy`` counts kernels only,
streams united; with copies and fills by the driver it stands beside. The lists of both runs must be the same bits, and
those of two users agree with plain torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from intervals import Interval, extent_us, gap_report, kernel_totals, traced
from rows import Prompts, World, compare, nothing, print_table, synchronize, write

from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.phases import busy_time
from xgr_engine.options import Exclusion, SearchOptions
from xgr_engine.recommender import PendingBatch, ReadyBatch, Recommender, Span
from xgr_engine.xbeam.ranking import BatchResult
from xgr_engine.xschedule.pipeline import Pipeline, Stages, Summary
from xgr_engine.xschedule.results import Ranked
from xgr_engine.xschedule.scheduler import BatchLimits
from xgr_engine.xschedule.worker import IN_FLIGHT


@dataclass(frozen=True)
class Piece:
    """All users, tokenised: what the pipeline's steps before the engine would have made."""

    prompts: Prompts
    excluded: Prompts = field(repr=False)

    @property
    def rows(self) -> int:
        return len(self.prompts)


class Watched:
    """The engine, with the time of its first launch and that of the last batch's end on the device."""

    def __init__(self, engine: Recommender) -> None:
        self.engine = engine
        self.first_launch: float | None = None
        self.last_end = 0.0

    def prepare(self, prompts: list[np.ndarray], excluded: Sequence[Exclusion]) -> ReadyBatch:
        """The engine's."""
        return self.engine.prepare(prompts, excluded)

    def launch(self, ready: ReadyBatch) -> PendingBatch:
        """The engine's; the first is noted."""
        if self.first_launch is None:
            self.first_launch = time.perf_counter()
        return self.engine.launch(ready)

    def collect(self, pending: PendingBatch) -> BatchResult:
        """The engine's."""
        return self.engine.collect(pending)

    def span(self, pending: PendingBatch) -> Span:
        """The engine's; the latest end is noted."""
        span = self.engine.span(pending)
        self.last_end = max(self.last_end, span.end)
        return span


@dataclass(frozen=True)
class Ran:
    """One run over all users: seconds on the device from first launch to last end, and on the host until idle."""

    seconds: float
    host_seconds: float
    ranked: Ranked
    summary: Summary


def main(given: list[str] | None = None, world: World | None = None) -> int:
    args = arguments(given)
    world = world or World(args.device, args.items, args.codes)
    options = {name: value for name, value in vars(args).items() if name != "out"}
    record: dict[str, Any] = {**world.facts(), "options": options, "in_flight": IN_FLIGHT, "rows": []}
    for geometry in args.geometry.split(","):
        line = measure(world, geometry, args)
        record["rows"].append(line)
        write(args.out, record)
        print_table(f"{geometry}: longest gaps between kernels, us", line["gaps"]["largest"], GAP_COLUMNS)
        print_table("time lost by pair of kernels, us", line["gaps"]["by_pair"], PAIR_COLUMNS)
    print_table("Busy share of wall time", record["rows"], COLUMNS)
    return int(any(not (line["matches"] and line["same_lists_profiled"]) for line in record["rows"]))


COLUMNS = ["geometry", "users", "batches", "busy", "busy_with_copies", "busy_first_to_last", "busy_of_unprofiled_wall"]
COLUMNS += ["seconds", "seconds_profiled", "users_per_s", "kernels_a_batch", "matches", "same_lists_profiled"]
GAP_COLUMNS = ["us", "at_ms", "copies_us", "before", "after"]
PAIR_COLUMNS = ["total_us", "count", "before", "after"]


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-1.7b,qwen3-0.6b", help="names, separated by commas")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32, help="users a batch")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--beam", type=int, default=256)
    parser.add_argument("--items", type=float, default=1e6)
    parser.add_argument("--codes", default="8192x3")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script; operators stand in for kernels")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def measure(world: World, geometry: str, args: argparse.Namespace) -> dict[str, Any]:
    """One geometry: warm up, run, run under the profiler, compare."""
    free_memory(world.device)
    options = SearchOptions(beam=args.beam, top_k=args.beam)
    recommender = world.recommender(geometry, options)
    limits = limits_of(recommender, args)
    prompts = world.prompts(geometry, args.context, args.users, seed=0)
    recommender.reserve(limits.tokens, limits.users)
    for size in {min(args.batch, args.users), args.users % args.batch} - {0}:
        for _ in range(2):
            recommender.run(prompts[:size], nothing(size))
    plain = run_pipeline(recommender, limits, prompts)
    # the profiler's own start-up stays out of the measured trace
    traced(lambda: recommender.run(prompts[: args.batch], nothing(len(prompts[: args.batch]))), world.device)
    profiled: list[Ran] = []
    found = traced(lambda: profiled.append(run_pipeline(recommender, limits, prompts)), world.device)
    ran = profiled[0]
    same = bool(
        np.array_equal(plain.ranked.leaves, ran.ranked.leaves)
        and np.array_equal(plain.ranked.scores, ran.ranked.scores)
    )
    lists = (np.diff(plain.ranked.offsets), plain.ranked.leaves, plain.ranked.scores)
    free_memory(world.device)
    return {
        "geometry": geometry,
        "context": args.context,
        "users": args.users,
        "beam": args.beam,
        "batch": args.batch,
        **busy_shares(found, plain, ran),
        "gaps": gap_report(found),
        "kernels": kernel_totals(found, ran.summary.batches),
        "same_lists_profiled": same,
        **compare(world, geometry, options, prompts[:2], lists),
    }


def busy_shares(found: list[Interval], plain: Ran, ran: Ran) -> dict[str, Any]:
    """Shares of wall time; ``plain`` is the run without the profiler, ``ran`` the one that the intervals belong to.

    ``busy_of_unprofiled_wall`` sets the kernels' time under the profiler against the wall time without it.
    """
    kernels = [one for one in found if not one.is_copy]
    busy, busy_with_copies = busy_time(kernels) / 1e6, busy_time(found) / 1e6
    return {
        "batches": ran.summary.batches,
        "busy": round(busy / ran.seconds, 4),
        "busy_with_copies": round(busy_with_copies / ran.seconds, 4),
        "busy_first_to_last": round(1e6 * busy / extent_us(kernels), 4),
        "busy_of_unprofiled_wall": round(busy / plain.seconds, 4),
        "kernel_seconds": round(busy, 4),
        "seconds": round(plain.seconds, 4),
        "seconds_profiled": round(ran.seconds, 4),
        "profiler_cost": round(ran.seconds / plain.seconds - 1, 4),
        "host_seconds": round(plain.host_seconds, 4),
        "users_per_s": round(len(plain.ranked.offsets[1:]) / plain.seconds, 1),
        "kernels": len(kernels),
        "kernels_a_batch": round(len(kernels) / ran.summary.batches, 1),
        "copies": len(found) - len(kernels),
    }


def limits_of(recommender: Recommender, args: argparse.Namespace) -> BatchLimits:
    """Batches of ``--batch`` users; the cache holds once more what all prompts of a batch might begin with."""
    return BatchLimits(
        tokens=(args.batch + 1) * args.context,
        rows=args.batch * args.beam,
        rows_per_user=args.beam,
        longest_prompt=args.context,
        fixed_shapes=recommender.model.device.type == "cuda",
        level_rows=1 + recommender.setup.slots,
    )


def run_pipeline(recommender: Recommender, limits: BatchLimits, prompts: Prompts) -> Ran:
    """All users through the job's pipeline; results stay in memory."""
    ranked: list[Ranked] = []
    stages: Stages[Piece, Piece, Piece] = Stages(
        read=lambda piece: piece,
        prepare=lambda work, piece: piece,
        write=lambda work, piece, results: ranked.append(results),
    )
    engine = Watched(recommender)
    summary = Pipeline(engine, limits, stages).run([Piece(prompts, nothing(len(prompts)))])
    synchronize(recommender.model.device)
    end = time.perf_counter()
    assert engine.first_launch is not None
    assert not ranked[0].failed, ranked[0].failed
    return Ran(engine.last_end - engine.first_launch, end - engine.first_launch, ranked[0], summary)


if __name__ == "__main__":
    sys.exit(main())

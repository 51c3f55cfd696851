"""The whole job against the engine alone: what reading, tokenising, uploading, fetching and writing cost.

    python benchmarks/pipeline.py --model M --vocab V --in users.parquet --users 20000 --beam 16 --top-k 10
    python benchmarks/pipeline.py --geometry qwen3-0.6b --users 20000 --device cuda --out F.json

The engine alone computes the same batches from token ids in memory, two in flight, results fetched and not written.
The job is ``xgr recommend``'s, from the first row read to the last part committed. Both take turns over ``--rounds``
parts of the users, so that other load on the machine meets both; seconds of the clock and of the processor are given.
Lists of both are compared. ``--geometry`` makes a model with random weights, a catalog and users of 512 to 1000 prompt
tokens; files given are repeated up to ``--users`` rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402
from made_up import make_world  # noqa: E402
from provenance import provenance  # noqa: E402

from xgr_engine.catalog.vocabulary import load_vocabulary  # noqa: E402
from xgr_engine.checkpoint.model_dir import load_model_dir  # noqa: E402
from xgr_engine.job.engine import LoadedEngine, load_engine, plan_memory, resolve_device  # noqa: E402
from xgr_engine.job.histories import HistoryResolver  # noqa: E402
from xgr_engine.job.inputs import RowReader, open_inputs  # noqa: E402
from xgr_engine.job.options import HistoryOptions, OperationOptions, RecommendOptions  # noqa: E402
from xgr_engine.job.prompts import make_prompt_maker  # noqa: E402
from xgr_engine.job.run import Caller, run_job  # noqa: E402
from xgr_engine.job.shards import cut, plan_shards  # noqa: E402
from xgr_engine.options import SearchOptions  # noqa: E402
from xgr_engine.xschedule.results import Ranked  # noqa: E402
from xgr_engine.xschedule.worker import Batch, BatchWorker, Flight, Window  # noqa: E402


@dataclass
class Side:
    """Seconds and users of one of the two, round by round."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    users: int = 0

    def to_json(self) -> dict[str, Any]:
        wall, cpu = sum(self.seconds), sum(self.cpu_seconds)
        return {
            "users": self.users,
            "seconds": round(wall, 3),
            "cpu_seconds": round(cpu, 3),
            "users_per_second": round(self.users / wall, 2),
            "users_per_cpu_second": round(self.users / cpu, 2),
            "rounds": [round(second, 3) for second in self.seconds],
        }


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="xgr-pipeline-") as scratch:
        place = Path(scratch)
        if args.geometry:
            args.model, args.vocab, args.users_file = make_world(
                place, args.geometry, args.users, args.items, args.codes
            )
        record = compare(args, place)
    print(json.dumps({name: value for name, value in record.items() if name != "schedule"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0 if record["lists_equal"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--vocab", type=Path)
    parser.add_argument("--in", dest="users_file", type=Path)
    parser.add_argument("--geometry", help="random weights of this size instead of files")
    parser.add_argument("--items", type=float, default=1e6)
    parser.add_argument("--codes", default="8192x3")
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--beam", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="timeline of the last round's job")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.geometry and not (args.model and args.vocab and args.users_file):
        parser.error("give --geometry, or --model, --vocab and --in")
    return args


def compare(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Both, in turns."""
    device = resolve_device(args.device, print)
    model, vocabulary = load_model_dir(args.model), load_vocabulary(args.vocab)
    search = SearchOptions(beam=args.beam, top_k=args.top_k)
    memory = plan_memory(model, vocabulary, search, device, None)
    loaded = load_engine(model, vocabulary, search, device, memory, args.threads)
    alone, job, schedule, equal = Side(), Side(), {}, True
    for number, users in enumerate(split(args.users_file, place, args.users, args.rounds)):
        histories = HistoryOptions((str(users),))
        out = str(place / f"recs{number}")
        trace = str(args.trace) if args.trace and number + 1 == args.rounds else None
        options = RecommendOptions(
            histories,
            search,
            model=str(args.model),
            vocab=str(args.vocab),
            out=out,
            device=args.device,
            operation=OperationOptions(trace=trace),
        )
        windows = windows_of(options, loaded)
        if number == 0:
            warm_up(loaded, windows)
        ranked: list[Ranked] = []
        for turn in (0, 1) if number % 2 == 0 else (1, 0):
            if turn == 0:
                ranked = run_alone(loaded, windows, alone)
            else:
                schedule = run_whole(options, loaded, job)
        equal &= same_lists(Path(out), ranked)
    return {
        **(about := provenance()),
        "machine": about["machine"] | machine(device.label, loaded),
        "beam": args.beam,
        "top_k": args.top_k,
        "limits": vars(loaded.limits),
        "engine_alone": alone.to_json(),
        "job": job.to_json(),
        "ratio": round(sum(alone.seconds) / sum(job.seconds), 4),
        "ratio_cpu": round(sum(alone.cpu_seconds) / sum(job.cpu_seconds), 4),
        "lists_equal": equal,
        "schedule": schedule,
    }


def machine(label: str, loaded: LoadedEngine) -> dict[str, Any]:
    return {
        "device": label,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "implementation": loaded.description["implementation"],
    }


def split(source: Path, place: Path, users: int, rounds: int) -> list[Path]:
    """``users`` rows of the source, repeated as needed, in one file a round."""
    table = pq.ParquetFile(source).read(["user_id", "history"])
    table = pa.concat_tables([table] * -(-users // len(table))).slice(0, users)
    paths = []
    for number in range(rounds):
        first, end = (users * edge // rounds for edge in (number, number + 1))
        paths.append(place / f"users{number}.parquet")
        pq.write_table(table.slice(first, end - first), paths[-1], row_group_size=4096)
    return paths


def windows_of(options: RecommendOptions, loaded: LoadedEngine) -> list[Window]:
    """The pieces of the job with their prompts, in memory."""
    model, vocabulary = load_model_dir(options.model), load_vocabulary(options.vocab)
    inputs = open_inputs(options.histories)
    reader = RowReader(inputs)
    maker = make_prompt_maker(model, HistoryResolver(vocabulary, model.table, options.histories), options.histories)
    windows = []
    for shard in plan_shards([file.groups for file in inputs.files], options.shard_rows):
        for piece in cut(shard):
            prepared = maker.prepare(reader.read(shard.file, piece.start, piece.stop))
            windows.append(Window(prepared.prompts, prepared.excluded, loaded.limits))
    return windows


def warm_up(loaded: LoadedEngine, windows: list[Window]) -> None:
    """A batch of every size, on every lane: compiled kernels, captured graphs, allocated buffers."""
    sizes: dict[int, Batch] = {}
    for window in windows:
        for batch in window.batches():
            sizes.setdefault(batch.users, batch)
    largest = max(sizes)
    if loaded.limits.fixed_shapes:
        chosen = [sizes[size] for size in sorted(sizes, reverse=True)]
        compute(loaded, [batch for batch in chosen for _ in range(4)], keep=False)
    else:
        compute(loaded, [sizes[largest]] * 2, keep=False)


def compute(loaded: LoadedEngine, batches: list[Batch], keep: bool = True) -> None:
    """The engine alone over batches, two in flight; results go to their windows."""
    worker = BatchWorker(loaded.engine, reject_errors=False)
    waiting: deque[Flight] = deque()

    def settle() -> None:
        flight = waiting.popleft()
        settled = worker.settle(flight)
        if keep:
            flight.batch.window.add(settled)

    for batch in batches:
        flight = worker.prepare(batch)
        if len(waiting) >= 2:
            settle()
        waiting.append(worker.launch(flight))
    while waiting:
        settle()


def run_alone(loaded: LoadedEngine, windows: list[Window], side: Side) -> list[Ranked]:
    start, start_cpu = time.perf_counter(), time.process_time()
    compute(loaded, [batch for window in windows for batch in window.batches()])
    side.seconds.append(time.perf_counter() - start)
    side.cpu_seconds.append(time.process_time() - start_cpu)
    side.users += sum(window.total for window in windows)
    return [window.ranked() for window in windows]


def run_whole(options: RecommendOptions, loaded: LoadedEngine, side: Side) -> dict[str, Any]:
    """The job, over the engine that is loaded already."""
    report = run_job(
        options, Caller(engine_loader=lambda *given: replace(loaded, description=dict(loaded.description)))
    )
    assert report.failure is None, report.failure
    schedule: dict[str, Any] = report.record["schedule"]
    side.seconds.append(schedule["seconds"])
    side.cpu_seconds.append(schedule["cpu_seconds"])
    side.users += report.record["rows"]
    return {**schedule, "durations": report.record["durations"]}


def same_lists(out: Path, ranked: list[Ranked]) -> bool:
    """Whether the written scores are those of the engine alone (on a GPU up to the last bits)."""
    tables = [pq.ParquetFile(part).read(["items"]) for part in sorted(out.glob("part-*.parquet"))]
    items = pa.concat_tables(tables).column("items").combine_chunks()
    written = items.flatten().field("score").to_numpy()
    computed = np.concatenate([window.scores for window in ranked])
    return len(written) == len(computed) and bool(np.allclose(written, computed, rtol=0, atol=1e-5))


if __name__ == "__main__":
    sys.exit(main())

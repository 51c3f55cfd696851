"""Host memory of the job does not grow with the number of users.

    python benchmarks/memory_flat.py --model M --vocab V --in users.parquet [--users 20000,200000] [--out F.json]

Each size runs in a process of its own. The engine is a stand-in that returns the first K items of the catalog, so that
reading, tokenising, scheduling, writing and the audit are what is measured. Peaks are the process's largest resident
size while the job runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from provenance import provenance  # noqa: E402

from xgr_engine.job.engine import LoadedEngine  # noqa: E402
from xgr_engine.job.options import HistoryOptions, RecommendOptions  # noqa: E402
from xgr_engine.job.run import Caller, run_job  # noqa: E402
from xgr_engine.options import SearchOptions  # noqa: E402
from xgr_engine.xbeam.ranking import BatchResult  # noqa: E402


class FirstItems:
    """Everybody gets the first K items of the catalog."""

    def __init__(self, leaf_of_row: np.ndarray, top_k: int) -> None:
        self.rows = np.arange(top_k, dtype=np.int32)
        self.leaves = leaf_of_row[:top_k].astype(np.int32)
        self.scores = -np.arange(top_k, dtype=np.float32)

    def run(self, prompts: list[Any], excluded: list[Any]) -> BatchResult:
        """A batch."""
        users = len(prompts)
        return BatchResult(
            counts=np.full(users, len(self.rows), np.int32),
            item_rows=np.tile(self.rows, users),
            leaves=np.tile(self.leaves, users),
            scores=np.tile(self.scores, users),
            short=np.zeros(users, np.bool_),
        )

    def reserve(self, tokens: int, users: int) -> None:
        """Nothing to allocate."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--in", dest="users_file", type=Path, required=True)
    parser.add_argument("--users", default="20000,200000")
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return 0
    rows = []
    for users in args.users.split(","):
        done = subprocess.run([*_command(), "--one", users], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    growth = rows[-1]["peak_mb"] / rows[0]["peak_mb"]
    record = {**provenance(), "rows": rows, "growth": round(growth, 4)}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"peak of {rows[-1]['users']} users over peak of {rows[0]['users']}: {growth:.3f}")
    return 0


def _command() -> list[str]:
    return [sys.executable, *sys.argv]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One size, in this process."""
    with tempfile.TemporaryDirectory(prefix="xgr-memory-") as scratch:
        place = Path(scratch)
        _write_users(args.users_file, place / "users.parquet", args.one)
        options = RecommendOptions(
            HistoryOptions((str(place / "users.parquet"),)),
            SearchOptions(beam=args.top_k, top_k=args.top_k),
            model=str(args.model),
            vocab=str(args.vocab),
            out=str(place / "recs"),
            device="cpu",
        )

        def loader(model: Any, vocabulary: Any, search: Any, device: Any, plan: Any, threads: Any) -> LoadedEngine:
            description = {"device": "cpu", "device_name": "stand-in", "dtype": "-", "implementation": "stand-in"}
            return LoadedEngine(FirstItems(vocabulary.leaf_of_row, search.top_k), plan.limits, description)

        start = time.perf_counter()
        report = run_job(options, Caller(engine_loader=loader))
        assert report.failure is None, report.failure
        return {
            "users": args.one,
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "seconds": round(time.perf_counter() - start, 1),
            "shards": report.record["shards"],
        }


def _write_users(source: Path, target: Path, users: int) -> None:
    """Repeats the source up to ``users`` rows, one row group at a time."""
    table = pq.ParquetFile(source).read(["user_id", "history"])
    with pq.ParquetWriter(target, table.schema) as writer:
        for first in range(0, users, len(table)):
            writer.write_table(table.slice(0, min(len(table), users - first)))


if __name__ == "__main__":
    sys.exit(main())

"""Does the job's host memory grow with the number of users? Peak of whole runs over 20,000 and 200,000 users.

python benchmarks/host_memory.py            a stub-sized model, CPU; writes benchmarks/results/host_memory.json
python benchmarks/host_memory.py --users 5000,20000 --out /tmp/m.json

Each run is a process of its own, ``xgr recommend`` from Parquet to _SUCCESS, audit included; the peak is the process's
largest resident memory, from its manifest. Shards have the default size, so both inputs have at least one full shard.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "job"))

from job_support import make_model, make_vocabulary  # noqa: E402
from provenance import provenance  # noqa: E402

HISTORY, GROUP = 8, 50_000


def write_users(path: Path, users: int) -> None:
    """``users`` histories of 1 to HISTORY items, written in pieces."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("user_id", pa.int64()), ("history", pa.list_(pa.int64()))])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, users, GROUP):
            count = min(GROUP, users - start)
            lengths = rng.integers(1, HISTORY + 1, count)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            items = pa.array(rng.integers(100, 140, lengths.sum()))
            lists = pa.ListArray.from_arrays(pa.array(offsets), items)
            writer.write_table(pa.table([pa.array(np.arange(start, start + count)), lists], schema=schema))


def run(root: Path, users: int) -> dict[str, Any]:
    """One whole run; its peak memory and speed."""
    write_users(root / "users.parquet", users)
    out = root / f"recs-{users}"
    command = [
        *(sys.executable, "-m", "xgr_cli.main", "recommend", "-q", "--in", root / "users.parquet", "--device", "cpu"),
        *("--model", root / "model", "--vocab", root / "vocab", "--out", out, "--beam", "16", "--top-k", "10"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    record = json.loads((out / "_xgr" / "manifest.json").read_text())
    return {
        "users": users,
        "shards": record["shards"],
        "host_peak_mb": round(record["memory"]["host_peak_bytes"] / 1e6, 1),
        "seconds": round(record["durations"]["total"], 1),
        "audit": record["audit"]["line"],
    }


def main() -> int:
    """Runs all sizes; 0 if the largest needs at most a tenth more memory than the smallest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", default="20000,200000")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "host_memory.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xgr-memory-") as name:
        root = Path(name)
        make_vocabulary(root / "vocab")
        make_model(root / "model")
        runs = [run(root, int(users)) for users in given.users.split(",")]
    peaks = [entry["host_peak_mb"] for entry in runs]
    record = {
        **provenance(),
        "runs": runs,
        "growth": round(peaks[-1] / peaks[0] - 1, 4),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    return 0 if record["growth"] <= 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())

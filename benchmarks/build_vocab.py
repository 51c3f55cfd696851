"""How long ``xgr build-vocab`` takes, from a Parquet catalog to the finished directory, and how much memory.

    python benchmarks/build_vocab.py                      # 1 million and 10 million items, five runs each
    python benchmarks/build_vocab.py --items 1000000 --runs 3

The catalog: int64 ids, SIDs as list<int32> of 3 random codes of 8192 (nearly every SID is its own, the hardest case
for the trie's size). Each run is a fresh process with a fresh output, limited to ``--cores`` cores; its time includes
the start of the interpreter, its memory is the largest resident set. The result of the last run is compared with the
catalog. Writes benchmarks/results/build_vocab.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from provenance import provenance

from xgr_engine.catalog.vocabulary import load_vocabulary

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "build_vocab.json"
LEVELS, CODES, SEED = 3, 8192, 0
# What the project promises: seconds, and bytes of resident memory.
LIMITS = {1_000_000: (3.0, None), 10_000_000: (30.0, 6e9)}
CHECKED_ITEMS = 100_000
LOOKED_UP = 1_600_000


@dataclass(frozen=True)
class Run:
    """One process: wall-clock seconds, seconds on the CPU, largest resident set in bytes, load when it began."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    load_before: float


def write_catalog(path: Path, items: int) -> None:
    """Random ids and codes, in no order."""
    random = np.random.default_rng(SEED)
    ids = random.permutation(items).astype(np.int64) * 7 + 1_000_003
    codes = random.integers(0, CODES, (items, LEVELS), np.int32)
    offsets = np.arange(0, items * LEVELS + 1, LEVELS, dtype=np.int32)
    sids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(codes.reshape(-1)))
    pq.write_table(pa.table({"item_id": ids, "sid": sids}), path)


def build_once(catalog: Path, out: Path, cores: Sequence[int]) -> Run:
    """Build in a fresh process."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "xgr_cli.main", "build-vocab", str(catalog), "--out", str(out), "--json", "-q"]
    load = os.getloadavg()[0]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    # Kilobytes on Linux.
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, load)


def check(catalog: Path, out: Path) -> dict[str, Any]:
    """Compare the vocabulary with the catalog it was made from.

    Raises:
        AssertionError: they disagree.
    """
    table = pq.read_table(catalog)
    vocabulary = load_vocabulary(out)
    assert vocabulary.num_items == table.num_rows
    sample = np.random.default_rng(SEED + 1).choice(table.num_rows, min(CHECKED_ITEMS, table.num_rows), replace=False)
    taken = table.take(pa.array(sample)).combine_chunks()
    expected = taken["sid"].combine_chunks().flatten().to_numpy().reshape(-1, LEVELS)
    rows = vocabulary.rows_of(taken["item_id"])
    leaves = vocabulary.leaf_of_row[rows]
    assert rows.min() >= 0 and np.array_equal(vocabulary.sids()[0][leaves], expected)
    assert np.array_equal(vocabulary.leaves_of_codes(expected), leaves)
    stored = pq.read_table(out / "items.parquet", columns=["sid"])["sid"].take(pa.array(rows)).combine_chunks()
    assert np.array_equal(stored.flatten().to_numpy().reshape(-1, LEVELS), expected)
    codes = table["sid"].combine_chunks().flatten().to_numpy().reshape(-1, LEVELS).astype(np.int64)
    distinct = len(np.unique((codes[:, 0] * CODES + codes[:, 1]) * CODES + codes[:, 2]))
    assert vocabulary.num_sids == distinct
    return {"items_compared": len(sample), "sids": distinct, "content_hash": vocabulary.content_hash}


def time_use(catalog: Path, out: Path) -> dict[str, float]:
    """Seconds to open the vocabulary, to prepare the look-up of ids, and to look up 16 thousand users' 100 items."""
    ids = pq.read_table(catalog, columns=["item_id"])["item_id"].combine_chunks()
    asked = ids.take(pa.array(np.random.default_rng(SEED).integers(0, len(ids), LOOKED_UP)))
    times = [time.perf_counter()]
    vocabulary = load_vocabulary(out)
    times.append(time.perf_counter())
    vocabulary.rows_of(asked[:1])
    times.append(time.perf_counter())
    rows = vocabulary.rows_of(asked)
    times.append(time.perf_counter())
    assert vocabulary.item_ids.take(pa.array(rows)).equals(asked)
    opened, indexed, found = (float(seconds) for seconds in np.diff(times))
    return {"open_seconds": opened, "index_seconds": indexed, "look_up_1600000_ids_seconds": found}


def measure(items: int, runs: int, cores: Sequence[int], folder: Path) -> dict[str, Any]:
    """All runs of one size."""
    catalog, out = folder / f"catalog-{items}.parquet", folder / "vocab"
    write_catalog(catalog, items)
    done = [build_once(catalog, out, cores) for _ in range(runs)]
    seconds = [run.seconds for run in done]
    limit_seconds, limit_bytes = LIMITS.get(items, (None, None))
    peak = max(run.peak_bytes for run in done)
    result = {
        "items": items,
        "levels": LEVELS,
        "codes": CODES,
        "best_seconds": min(seconds),
        "median_seconds": statistics.median(seconds),
        "peak_bytes": peak,
        "limit_seconds": limit_seconds,
        "limit_bytes": limit_bytes,
        "within_limits": (limit_seconds is None or statistics.median(seconds) <= limit_seconds)
        and (limit_bytes is None or peak <= limit_bytes),
        "catalog_bytes": catalog.stat().st_size,
        "vocabulary_bytes": sum(path.stat().st_size for path in out.iterdir()),
        "runs": [asdict(run) for run in done],
        "checked": check(catalog, out),
        "use": time_use(catalog, out),
    }
    catalog.unlink()
    return result


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=list(LIMITS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    with tempfile.TemporaryDirectory(prefix="xgr-bench-") as folder:
        sizes = [measure(items, options.runs, cores, Path(folder)) for items in options.items]
    for size in sizes:
        print(
            f"{size['items']:>12,} items: best {size['best_seconds']:.2f} s, median {size['median_seconds']:.2f} s, "
            f"peak {size['peak_bytes'] / 1e9:.2f} GB, within limits: {size['within_limits']}"
        )
    record = {
        "benchmark": "build_vocab",
        **provenance(),
        "cores_used": len(cores),
        "sizes": sizes,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

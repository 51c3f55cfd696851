"""Everything that one H200 is asked for batches in one process: each kernel is compiled once, each model made once.

    python benchmarks/h200.py --out DIR [--parts sustained,smaller,memory,busy]

``sustained.json`` (sustained.py at 1.7B: the rows of docs/performance.md, with their growth from width to width),
``smaller.json`` (the same of two smaller geometries), ``memory.json`` and ``busy.json`` are written row by row, so a
run that is cut short leaves what it has. A part that fails is reported and the next one runs. ``--try-on-cpu`` runs
the same scripts at tiny sizes without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

import busy
import memory
import sustained
from rows import World

_ROWS = "1000x8x128,1000x8x256,1000x8x512,1000x32x256,1000x32x512"
_TABLE = f"1000x1x256,{_ROWS},5000x8x256"
_SMALL = ["--geometry", "quick", "--device", "cpu", "--seconds", "0.1", "--rows", "30x2x8,30x2x16"]
_TRY = ["--geometry", "quick", "--device", "cpu"]
# per part: the script, its arguments on the GPU, and those of a try on a CPU
PARTS = {
    "sustained": (
        sustained.main,
        ["--geometry", "qwen3-1.7b", "--seconds", "2", "--rows", _TABLE],
        _SMALL,
    ),
    "smaller": (
        sustained.main,
        ["--geometry", "qwen3-0.6b,onerec-0.1b", "--seconds", "1", "--rows", _ROWS],
        _SMALL,
    ),
    "memory": (memory.main, ["--geometry", "qwen3-1.7b,qwen3-0.6b"], [*_TRY, "--rows", "40x2x16"]),
    "busy": (
        busy.main,
        ["--geometry", "qwen3-1.7b,qwen3-0.6b", "--users", "1000", "--batch", "32", "--beam", "256"],
        [*_TRY, "--users", "11", "--batch", "4", "--beam", "8", "--context", "30"],
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the records")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--try-on-cpu", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    world = World("cpu", 5000, "64x3") if args.try_on_cpu else World("cuda", 1e6, "8192x3")
    print(f"catalog: {time.perf_counter() - start:.1f} s", flush=True)
    failed = []
    for name in args.parts.split(","):
        start = time.perf_counter()
        script, on_gpu, on_cpu = PARTS[name]
        given = [*(on_cpu if args.try_on_cpu else on_gpu), "--out", str(args.out / f"{name}.json")]
        try:
            wrong = script(given, world)
        except Exception:  # the parts after it are worth having all the same
            traceback.print_exc()
            wrong = 1
        if wrong:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.1f} s{', FAILED' if wrong else ''}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

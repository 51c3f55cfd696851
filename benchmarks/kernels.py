"""Every GPU kernel of the engine: checked against its reference, then timed, on the machine this runs on.

    python benchmarks/kernels.py [--only attention,elementwise,xbeam] [--quick] [--out FILE.json]

A time is printed only for a variant whose result was right in this run. ``floor`` is the larger of operations over
the matrix rate and bytes over the copy rate, both measured in the same run. Needs torch and triton alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import triton  # noqa: E402
from kernel_cases import attention, elementwise, xbeam  # noqa: E402
from timing import ceilings  # noqa: E402

SECTIONS = {"attention": attention.run, "elementwise": elementwise.run, "xbeam": xbeam.run}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="the first shapes and variants of each section")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: the kernels are checked on the CPU by tests/kernels, and timed only on a GPU")
    record: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    limits = ceilings()
    record["ceilings"] = limits
    print(
        f"{record['gpu']}: {limits['matmul_tflops']:.0f} TFLOP/s bf16, copy {limits['copy_tbs']:.2f} TB/s", flush=True
    )
    wrong = 0
    for name in args.only.split(","):
        rows, failures = SECTIONS[name](limits, args.quick)
        record[name] = rows
        wrong += failures
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{wrong} wrong results; {args.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

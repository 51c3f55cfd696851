"""Candidates for ``silu(x @ gate.T) * (x @ up.T)``, checked and timed side by side against cuBLAS and silu_mul.

    python benchmarks/swiglu_variants.py [--seconds 40] [--limit 60] [--only TEXT] [--out FILE]

Every candidate runs in processes of its own first: compiled, then checked on awkward shapes against float32 products of
the same bfloat16 inputs, with guards around the result, which starts as NaN. Those that were right are then timed in
turns, round after round, so that the card's clocks (ten per cent apart cold and warm) favour none. Inputs rotate over
28 weights, as the layers of a model do. The linear alone, without SwiGLU, is timed too: it is the rate to hold against.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from isolation import Job, run_isolated  # noqa: E402
from kernel_cases.swiglu_plain import plain_swiglu_product  # noqa: E402
from timing import capture, relative_error, span_ms  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import linear  # noqa: E402

from xgr_engine.kernels import triton as plain_kernels  # noqa: E402
from xgr_engine.kernels.hopper import SwigluTiles, swiglu_product  # noqa: E402

Candidate = Callable[[Tensor, Tensor, Tensor], object]  # x, weight, out


def two_kernels(x: Tensor, weight: Tensor, out: Tensor) -> object:
    return plain_kernels.silu_mul(linear(x, weight), out=out)


def hopper(group: int = 16, stages: int = 4, lead: int = 2, producers: int = 1) -> Candidate:
    return partial(_hopper, SwigluTiles(group, stages, lead, producers))


def _hopper(tiles: SwigluTiles, x: Tensor, weight: Tensor, out: Tensor) -> object:
    return swiglu_product(x, weight, out, tiles)


def _plain(stages: int, x: Tensor, weight: Tensor, out: Tensor) -> object:
    return plain_swiglu_product(x, weight, out, stages=stages)


REFERENCE = "linear + silu_mul"
CANDIDATES: dict[str, Candidate] = {
    REFERENCE: two_kernels,
    "hopper": hopper(),
    "hopper lead 0": hopper(lead=0),
    "hopper lead 1": hopper(lead=1),
    "hopper lead 3": hopper(lead=3),
    "hopper stages 3 lead 1": hopper(stages=3, lead=1),
    "hopper group 8": hopper(group=8),
    "hopper group 32": hopper(group=32),
    "hopper 4 producers": hopper(producers=4),
    "plain s4": partial(_plain, 4),
    "plain s3": partial(_plain, 3),
}
# Of the norm: rounding the result gives 1.7e-3, rounding gate and up before silu as well 3.1e-3.
TOLERANCE = {name: 4e-3 if name == REFERENCE else 2.2e-3 for name in CANDIDATES}


@dataclass(frozen=True)
class Shape:
    """M rows of H values, times gate and up of I columns each."""

    rows: int
    hidden: int
    width: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.width}"

    @property
    def flops(self) -> float:
        return 4.0 * self.rows * self.hidden * self.width


TIMED = [
    Shape(8000, 2048, 6144),
    Shape(4096, 2048, 6144),
    Shape(2048, 2048, 6144),
    Shape(8000, 1024, 3072),
    Shape(2048, 1024, 3072),
]
CHECKED = [
    *(Shape(rows, 2048, 6144) for rows in (1, 31, 127, 129, 2048, 4096, 8000)),
    *(Shape(rows, 1024, 3072) for rows in (1, 129, 2048, 8000)),
    Shape(300, 2048, 3072),
    Shape(200, 64, 64),  # a single slice of the inner dimension, half a tile of columns
    Shape(333, 200, 1000),  # multiples of 8 alone: ragged in every direction
]
LAYERS = 28


def random_inputs(shape: Shape, seed: int, weights: int = 1) -> tuple[Tensor, list[Tensor]]:
    """x with unit variance, and weights that give gate and up unit variance too."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape.rows, shape.hidden, generator=generator, device="cuda").bfloat16()
    scale = shape.hidden**-0.5
    layers = [
        (torch.randn(2 * shape.width, shape.hidden, generator=generator, device="cuda") * scale).bfloat16()
        for _ in range(weights)
    ]
    return x, layers


def error_of(call: Candidate, shape: Shape) -> float:
    """Error of a call relative to the norm; infinity if it wrote beside its result, or did not repeat itself."""
    x, (weight,) = random_inputs(shape, shape.rows)
    guard = 1024
    buffer = torch.full((2 * guard + shape.rows * shape.width,), torch.nan, device="cuda", dtype=torch.bfloat16)
    out = buffer[guard:-guard].view(shape.rows, shape.width)
    call(x, weight, out)
    torch.cuda.synchronize()
    first = out.clone()
    for _ in range(5):
        out.fill_(torch.nan)
        call(x, weight, out)
        if not torch.equal(out, first):
            return float("inf")
    if not bool(torch.cat([buffer[:guard], buffer[-guard:]]).isnan().all()):
        return float("inf")
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=1)
    reference = torch.nn.functional.silu(gate) * up
    # a single wrong row or column must not drown in the norm of the rest
    worst = float((out.float() - reference).abs().max() / reference.abs().max())
    return max(relative_error(out, reference), worst / 4)


def examine(name: str) -> list[tuple[str, float]]:
    """Errors of a candidate, shape by shape."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return [(str(shape), error_of(CANDIDATES[name], shape)) for shape in CHECKED]


LINEAR = "linear alone"


def measure(shape: Shape, names: list[str], seconds: float) -> dict[str, float]:
    """Median milliseconds of a layer, by candidate, in turns."""
    x, weights = random_inputs(shape, 1, LAYERS)
    out = torch.empty(shape.rows, shape.width, device="cuda", dtype=torch.bfloat16)
    both = torch.empty(shape.rows, 2 * shape.width, device="cuda", dtype=torch.bfloat16)
    graphs = {name: capture([partial(CANDIDATES[name], x, weight, out) for weight in weights]) for name in names}
    graphs[LINEAR] = capture([partial(torch.mm, x, weight.T, out=both) for weight in weights])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times[LINEAR]) < 3:
        for name in order:
            times[name].append(span_ms(graphs[name].replay, LAYERS, 0.08))
        order.append(order.pop(0))
    return {name: statistics.median(values) for name, values in times.items()}


def report(table: dict[Shape, dict[str, float]], names: list[str]) -> None:
    print(f"\n{'ms a layer (TFLOP/s)':24s}" + "".join(f"{shape!s:>22s}" for shape in table))
    for name in [LINEAR, *names]:
        cells = (f"{ms[name]:12.4f} ({shape.flops / ms[name] / 1e9:5.0f})  " for shape, ms in table.items())
        print(f"{name:24s}" + "".join(f"{cell:>22s}" for cell in cells))
    print(f"\n{'time, of ' + REFERENCE:24s}")
    for name in names:
        print(f"{name:24s}" + "".join(f"{ms[name] / ms[REFERENCE]:22.3f}" for ms in table.values()))


def check(names: list[str], limit: float) -> tuple[dict[str, float], set[str]]:
    """Worst error by candidate, and the candidates that were wrong, crashed or hung."""
    jobs: dict[str, Job] = {name: (examine, (name,)) for name in names}
    results, failures = run_isolated(jobs, timeout_s=limit)
    for name, reason in failures.items():
        print(f"WRONG {name}: {reason}", flush=True)
    wrong, worst = set(failures), {}
    for name, errors in results.items():
        for case, error in errors:
            if not error < TOLERANCE[name]:
                wrong.add(name)
                print(f"WRONG {name} {case}: {error:.2e}", flush=True)
        worst[name] = max(error for _, error in errors)
        print(f"checked {name}: {len(errors)} shapes, worst {worst[name]:.1e}", flush=True)
    return worst, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="time spent on timing, over all shapes")
    parser.add_argument("--limit", type=float, default=60, help="seconds for compiling and checking")
    parser.add_argument("--only", default="", help="candidates whose names hold this text")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    begin = time.perf_counter()
    names = [name for name in CANDIDATES if args.only in name or name == REFERENCE]
    worst, wrong = check(names, args.limit)
    print(f"checks took {time.perf_counter() - begin:.0f} s", flush=True)
    if REFERENCE in wrong:
        return 1
    names = [name for name in names if name not in wrong]
    table: dict[Shape, dict[str, float]] = {}
    for shape in TIMED:
        seconds = args.seconds / len(TIMED)
        # in a process of its own as well: what hangs here costs this shape and not the table
        done, failures = run_isolated({str(shape): (measure, (shape, names, seconds))}, timeout_s=seconds + 40)
        if failures:
            print(f"NOT TIMED {shape}: {failures[str(shape)]}", flush=True)
            continue
        table[shape] = done[str(shape)]
        best = min(names, key=table[shape].__getitem__)
        print(f"timed {shape}: best {best} {table[shape][best]:.4f} ms", flush=True)
    report(table, names)
    print(f"wrong: {sorted(wrong) or 'none'}; {time.perf_counter() - begin:.0f} s in all")
    if args.out:
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "worst_error": worst,
            "wrong": sorted(wrong),
            "ms": {str(shape): times for shape, times in table.items()},
            "tflops": {str(shape): {n: shape.flops / t / 1e9 for n, t in ms.items()} for shape, ms in table.items()},
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 1 if wrong or len(table) < len(TIMED) else 0


if __name__ == "__main__":
    sys.exit(main())

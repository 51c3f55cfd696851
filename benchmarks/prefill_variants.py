"""Kernels for the causal attention of ragged prompts, checked and timed side by side.

    python benchmarks/prefill_variants.py [--seconds 30] [--limit 45] [--only TEXT] [--shapes TEXT] [--out FILE]

Every candidate runs in a process of its own first: awkward shapes against float64 with unit variance, NaN behind the
last key and in results nobody wrote, fifty equal calls for equal bits, capture in a CUDA graph, and the time that the
host needs for a call (cuDNN builds plans). Those that were right are then compared on the timed shapes with the first
of them, and timed in turns, round after round, so that the card's clocks favour none. A candidate that only fails with
NaN behind the keys is timed too and marked "leaks". TFLOP/s count the products of visible pairs of positions alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from isolation import Job, run_isolated  # noqa: E402
from timing import capture, relative_error, span_ms  # noqa: E402
from torch import Tensor  # noqa: E402

from xgr_engine.xattention import prefill, reference  # noqa: E402
from xgr_engine.xattention.prefill import Kernel, triton  # noqa: E402
from xgr_engine.xattention.ragged import Ragged  # noqa: E402

TOLERANCE = 6e-3
DEVICE = torch.device("cuda")


def hopper(keys: int, stages: int, q_stages: int) -> Kernel:
    from xgr_engine.xattention.hopper import prefill as specialized

    tiles = specialized.PrefillTiles(keys, stages, q_stages)
    return partial(specialized.prompt_attention, tiles=tiles)


def portable(rows: int, keys: int, warps: int, stages: int) -> Kernel:
    return partial(triton.prompt_attention, tiles=triton.PrefillTiles(rows, keys, warps, stages))


# made where they run: the Hopper kernel cannot be imported everywhere
CANDIDATES: dict[str, Callable[[], Kernel]] = {
    "flash2": lambda: prefill.KERNELS["flash2"],
    "runs": lambda: prefill.KERNELS["runs"],
    "cudnn": lambda: prefill.KERNELS["cudnn"],
    "flash3": lambda: prefill.KERNELS["flash3"],
    "hopper 128x2": partial(hopper, 128, 2, 2),
    "hopper 128x2 q1": partial(hopper, 128, 2, 1),
    "hopper 64x4": partial(hopper, 64, 4, 2),
    "triton 128x64 w8": partial(portable, 128, 64, 8, 3),
    "triton 128x128 w8": partial(portable, 128, 128, 8, 2),
    "triton 64x64 w4": partial(portable, 64, 64, 4, 3),
}
TOO_LONG_MS = 10.0  # host time of a call that cannot be captured: there is nothing to measure on the device
OUR_OWN = ("hopper", "triton")


@dataclass(frozen=True)
class Shape:
    """Prompts of ``own`` tokens behind ``shared`` ones that are computed once."""

    name: str
    own: tuple[int, ...]
    shared: int = 0
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.name} +{self.shared} {self.heads}/{self.kv_heads}x{self.dim}"

    @property
    def sequences(self) -> Ragged:
        head = [self.shared] if self.shared else []
        return Ragged.of([*head, *self.own], [*head, *(own + self.shared for own in self.own)])

    @property
    def flops(self) -> float:
        pairs = sum(queries * (keys - queries) + queries * (queries + 1) / 2 for queries, keys in self.sequences.shapes)
        return 4.0 * pairs * self.heads * self.dim

    def covered_by(self, name: str) -> bool:
        """cuDNN's causal mask has no prefix, and it builds a plan for every shape that it is given alone."""
        square = self.sequences.square
        return (name != "cudnn" or square) and (name != "runs" or (square and len(self.sequences.runs) <= 8))


def lengths(low: int, high: int, count: int) -> tuple[int, ...]:
    """Ragged lengths from ``low`` to ``high``, both met, in no order."""
    spread = np.linspace(low, high, count).astype(int)
    return tuple(int(length) for length in np.random.default_rng(0).permutation(spread))


PROMPTS = {
    "8 x 1000": (1000,) * 8,
    "8 x 512..1000": lengths(512, 1000, 8),
    "8 x 5000": (5000,) * 8,
    "8 x 3000..5000": lengths(3000, 5000, 8),
    "32 x 512..1000": lengths(512, 1000, 32),
}
TIMED = [
    Shape(name, own, shared, *heads)
    for heads in ((16, 8, 128), (12, 12, 64))
    for shared in (0, 200)
    for name, own in PROMPTS.items()
]
AWKWARD = (31, 1, 127, 33, 1000, 64)
HARD = [
    Shape("awkward", AWKWARD),
    Shape("awkward", AWKWARD, 7),
    Shape("awkward", AWKWARD, 200, 8, 1),
    Shape("awkward", AWKWARD, 128, 12, 12, 64),
    Shape("awkward", (4097, 5, 0, 255), 0, 8, 2, 64),
    Shape("equal", (300,) * 5, 0, 4, 4),
]


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    sequences: Ragged
    scale: float

    @classmethod
    def random(cls, shape: Shape, seed: int, behind: float | None = None) -> Inputs:
        """Unit variance; with ``behind``, 300 more rows of it follow the last key."""
        g = torch.Generator("cuda").manual_seed(seed)
        sequences = shape.sequences
        spare = 0 if behind is None else 300

        def normal(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, shape.dim, generator=g, device="cuda", dtype=torch.bfloat16)

        q = normal(sequences.query_start[-1], shape.heads)
        k, v = (normal(sequences.key_start[-1] + spare, shape.kv_heads) for _ in range(2))
        if behind is not None:
            k[sequences.key_start[-1] :] = behind
            v[sequences.key_start[-1] :] = behind
        return cls(q, k, v, sequences, shape.dim**-0.5)

    def call(self, kernel: Kernel) -> Tensor:
        return kernel(self.q, self.k, self.v, self.sequences, self.scale)

    def expected(self) -> Tensor:
        q, k, v = (t.double() for t in (self.q, self.k, self.v))
        return reference.prompt_attention(q, k, v, self.sequences, self.scale)


def error(kernel: Kernel, shape: Shape, behind: float) -> float:
    inputs = Inputs.random(shape, 1, behind)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN while this is on
    try:
        out = inputs.call(kernel)
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    return relative_error(out, inputs.expected())


def host_ms(kernel: Kernel, shape: Shape) -> float:
    """Median time until a call returns, the device not waited for."""
    inputs = Inputs.random(shape, 2)
    times = []
    for _ in range(8):
        inputs.call(kernel)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        inputs.call(kernel)
        times.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(times)


def examine(name: str, timed: list[Shape]) -> dict[str, Any]:
    """Everything about a candidate but its time on the device; compiles its kernels for the timed shapes too."""
    with prefill.preferred_kernels():
        kernel = CANDIDATES[name]()
        found: dict[str, Any] = {"errors": {}, "clean_errors": {}}
        for shape in HARD:
            if shape.covered_by(name):
                found["errors"][str(shape)] = error(kernel, shape, float("nan"))
                found["clean_errors"][str(shape)] = error(kernel, shape, 0.0)
        ragged = next(shape for shape in TIMED if "8 x 512" in shape.name)
        found["host_ms"] = host_ms(kernel, ragged)
        inputs = Inputs.random(ragged, 3)
        first = inputs.call(kernel).clone()
        found["repeats"] = all(torch.equal(first, inputs.call(kernel)) for _ in range(50))
        for dim in {shape.dim for shape in timed}:  # compiled, for the process that measures
            shape = next(s for s in timed if s.dim == dim)
            if shape.covered_by(name):
                Inputs.random(shape, 0).call(kernel)
        torch.cuda.synchronize()
        try:
            capture([partial(inputs.call, kernel)]).replay()
            torch.cuda.synchronize()
            found["captures"] = True
        except Exception as problem:
            found["captures"] = False
            found["why"] = str(problem)[:300]
    return found


def measure(shape: Shape, checks: dict[str, dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """A row for each candidate: median milliseconds, TFLOP/s and the difference from the first candidate's result."""
    sets = [Inputs.random(shape, seed) for seed in range(2)]
    runs: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, Any]] = {}
    first: Tensor | None = None
    for name, found in checks.items():
        if not shape.covered_by(name) or (not found["captures"] and found["host_ms"] > TOO_LONG_MS):
            continue
        kernel = CANDIDATES[name]()
        out = sets[0].call(kernel)
        first = out.float() if first is None else first
        rows[name] = {"shape": str(shape), "candidate": name, "difference": relative_error(out, first)}
        calls = [partial(inputs.call, kernel) for inputs in sets]
        runs[name] = capture(calls).replay if found["captures"] else lambda c=calls: [call() for call in c]  # type: ignore[misc]
        rows[name]["graph"] = found["captures"]
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = capture([lambda: a @ b] * 8)
    times: dict[str, list[float]] = {name: [] for name in runs}
    products: list[float] = []
    names = list(runs)
    begin = time.perf_counter()
    while len(products) < 3 or time.perf_counter() - begin < seconds:
        products.append(span_ms(product.replay, 8, 0.02))
        for name in names:
            times[name].append(span_ms(runs[name], len(sets), 0.02))
        names.append(names.pop(0))
    rate = 2 * 4096**3 / statistics.median(products) / 1e9
    for name, row in rows.items():
        ms = statistics.median(times[name])
        row.update(ms=ms, tflops=shape.flops / ms / 1e9, product_tflops=rate)
    return list(rows.values())


def judge(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """ "right", "leaks" or "wrong" for each candidate, with a line for whatever is not as it should be."""
    verdicts = {}
    for name, found in results.items():
        bad = {shape: e for shape, e in found["errors"].items() if not e < TOLERANCE}
        worse = {shape: e for shape, e in found["clean_errors"].items() if not e < TOLERANCE}
        verdict = "wrong" if worse or not found["repeats"] else "leaks" if bad else "right"
        verdicts[name] = verdict
        for shape, e in (worse or bad).items():
            print(f"{verdict.upper()} {name} {shape}: {e:.2e}", flush=True)
        if not found["repeats"]:
            print(f"WRONG {name}: two equal calls differ", flush=True)
        if not found["captures"]:
            print(f"{name}: not captured ({found['why']})", flush=True)
        worst = max(found["clean_errors"].values())
        print(f"checked {name}: {verdict}, worst {worst:.1e}, host {found['host_ms']:.3f} ms a call", flush=True)
    return verdicts


def table(shapes: list[Shape], rows: list[dict[str, Any]]) -> None:
    """A line a shape, a column a candidate: milliseconds and TFLOP/s."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    print(f"\n{'ms (TFLOP/s)':30s}" + "".join(f"{name:>18s}" for name in names) + f"{'product':>9s}")
    for shape in shapes:
        found = {row["candidate"]: row for row in rows if row["shape"] == str(shape)}
        cells = (
            f"{found[name]['ms']:10.3f} ({found[name]['tflops']:5.0f})" if name in found else " " * 17 + "-"
            for name in names
        )
        rate = next(iter(found.values()))["product_tflops"] if found else float("nan")
        print(f"{shape!s:30s}" + "".join(cells) + f"{rate:9.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="time spent on timing, over all shapes")
    parser.add_argument("--limit", type=float, default=45, help="seconds for compiling and checking")
    parser.add_argument("--only", default="", help="candidates whose name contains one of these, by comma")
    parser.add_argument("--shapes", default="", help="shapes whose name contains one of these, by comma")
    parser.add_argument("--out", type=Path, help="JSON of everything")
    args = parser.parse_args()
    begin = time.perf_counter()
    wanted = [name for name in CANDIDATES if any(part in name for part in args.only.split(","))]
    shapes = [shape for shape in TIMED if any(part in str(shape) for part in args.shapes.split(","))]
    jobs: dict[str, Job] = {name: (examine, (name, shapes)) for name in wanted}
    results, failures = run_isolated(jobs, timeout_s=args.limit)
    for name, reason in failures.items():
        print(f"FAILED {name}: {reason}", flush=True)
    verdicts = judge({name: results[name] for name in wanted if name in results})
    print(f"checks took {time.perf_counter() - begin:.0f} s", flush=True)
    good = {name: results[name] for name, verdict in verdicts.items() if verdict != "wrong"}
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checks": results,
        "verdicts": verdicts,
        "failures": failures,
        "shapes": [{**asdict(shape), "tflop": shape.flops / 1e12} for shape in shapes],
        "rows": [],
    }
    until = time.perf_counter() + args.seconds
    with prefill.preferred_kernels():
        for index, shape in enumerate(shapes):
            left = (until - time.perf_counter()) / (len(shapes) - index)
            if good and left > 0:
                record["rows"] += measure(shape, good, min(left, args.seconds / len(shapes)) * 0.7)
                if args.out:
                    args.out.write_text(json.dumps(record, indent=1))
    table(shapes, record["rows"])
    wrong = [name for name, verdict in verdicts.items() if verdict == "wrong"]
    wrong += [f"{r['candidate']} {r['shape']}" for r in record["rows"] if not r["difference"] < 2 * TOLERANCE]
    print(
        f"wrong: {wrong or 'none'}; failed: {sorted(failures) or 'none'}; leaks: "
        f"{[name for name, verdict in verdicts.items() if verdict == 'leaks'] or 'none'}"
    )
    return 1 if wrong or any(name.startswith(OUR_OWN) for name in failures) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Decode attention: every variant against float64, then its time a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from isolation import Job, run_isolated
from timing import graph_ms, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xgr_engine.xattention import reference
from xgr_engine.xattention.triton import AttentionTiles, beam_attention

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}

HOPPER = [
    AttentionTiles(128, 64, stages=4, hopper=True),
    AttentionTiles(128, 128, stages=2, hopper=True),
]
PLAIN = [
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(128, 128, 8, 2),
    AttentionTiles(64, 64, 4, 3),
    AttentionTiles(64, 128, 4, 2),
]


@dataclass(frozen=True)
class Shape:
    """One decode step: U users of ``context`` tokens, R beams, A own tokens a beam, heads, head dimension."""

    context: int
    users: int
    beams: int
    own: int = 2
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.context}x{self.users}x{self.beams} A{self.own} {self.heads}/{self.kv_heads}x{self.dim}"

    @property
    def flops(self) -> float:
        return 4.0 * self.users * self.beams * self.heads * self.dim * (self.context + self.own)

    @property
    def bytes(self) -> float:
        """bf16: prompt once, queries, result, own tokens of every beam."""
        rows = self.users * self.beams
        kv = 2 * self.users * self.context * self.kv_heads + 2 * rows * self.own * self.kv_heads
        return 2.0 * self.dim * (kv + 2 * rows * self.heads)


TIMED = [
    Shape(1000, 8, 256),
    Shape(5000, 32, 512),
    Shape(1000, 1, 256),
    Shape(1000, 8, 512),
    Shape(1000, 32, 512),
    Shape(5000, 8, 256),
    Shape(1000, 8, 48, own=1),
    Shape(1000, 8, 256, heads=12, kv_heads=12, dim=64),
    Shape(1000, 8, 256, heads=32),
]
CHECKED = [
    Shape(1000, 3, 333),
    Shape(17, 2, 33, own=1),
    Shape(1, 2, 127, own=3, heads=8, kv_heads=8),
    Shape(4097, 1, 127, own=2, heads=32, kv_heads=8, dim=64),
    Shape(257, 2, 31, own=4, heads=16, kv_heads=2),
    Shape(128, 2, 64, own=0),
    Shape(0, 2, 65, own=2),
]


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    prompt_k: Tensor
    prompt_v: Tensor
    prompt_start: Tensor
    gen_k: Tensor
    gen_v: Tensor
    ancestors: Tensor

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, seed: int, ragged: bool) -> Inputs:
        """Unit variance. ``ragged`` shortens some users and poisons with NaN whatever no table names."""
        g = torch.Generator("cuda").manual_seed(seed)
        users, beams, own = shape.users, shape.beams, shape.own

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=g, device="cuda", dtype=dtype)

        lengths = [max(0, shape.context - (ragged and u * 61)) for u in range(users)]
        start = [sum(lengths[:u]) for u in range(users + 1)]
        spare = 300 if ragged else 0
        slots = max(1, beams * own)
        prompt_k, prompt_v = (normal(start[-1] + spare, shape.kv_heads, shape.dim) for _ in range(2))
        gen_k, gen_v = (normal(users, slots, shape.kv_heads, shape.dim) for _ in range(2))
        # a beam's own token of level a lies in that level's slots; parents are monotone, as selection leaves them
        levels = [
            torch.randint(0, beams, (users, beams), generator=g, device="cuda").sort(-1).values + a * beams
            for a in range(own)
        ]
        table = torch.stack(levels, -1) if own else torch.empty(users, beams, 0, device="cuda")
        if ragged:
            prompt_k[start[-1] :] = torch.nan
            prompt_v[start[-1] :] = torch.nan
            if own > 1:
                table[:, ::7, 1] = -1
            named = torch.zeros(users, slots, dtype=torch.bool, device="cuda")
            for u in range(users):
                named[u, table[u][table[u] >= 0].long()] = True
            gen_k[~named] = torch.nan
            gen_v[~named] = torch.nan
        return cls(
            normal(users, beams, shape.heads, shape.dim),
            prompt_k,
            prompt_v,
            torch.tensor(start, dtype=torch.int32, device="cuda"),
            gen_k,
            gen_v,
            table.to(torch.int32).contiguous(),
        )

    def call(self, tiles: AttentionTiles | None) -> Tensor:
        scale = self.q.shape[-1] ** -0.5
        args = (self.q, self.prompt_k, self.prompt_v, self.prompt_start, self.gen_k, self.gen_v, self.ancestors, scale)
        return beam_attention(*args, tiles=tiles)

    def expected(self) -> Tensor:
        """float64 on the device, NaN of the unnamed slots kept."""
        wide = (self.q, self.prompt_k, self.prompt_v, self.gen_k, self.gen_v)
        q, k, v, gk, gv = (t.double() for t in wide)
        return reference.beam_attention(q, k, v, self.prompt_start, gk, gv, self.ancestors, q.shape[-1] ** -0.5)


def with_splits(tiles: AttentionTiles, splits: int) -> AttentionTiles:
    return AttentionTiles(**{**vars(tiles), "splits": splits})


def label(tiles: AttentionTiles | None) -> str:
    if tiles is None:
        return "automatic"
    kind = "hopper" if tiles.hopper else f"triton w{tiles.warps}"
    return f"{kind} {tiles.rows}x{tiles.keys} s{tiles.stages}" + (f" /{tiles.splits}" if tiles.splits > 1 else "")


def check(shape: Shape, tiles: AttentionTiles | None, dtype: torch.dtype) -> float:
    """Relative error of one call on poisoned inputs and a poisoned result; NaN or inf when anything went wrong."""
    inputs = Inputs.random(shape, dtype, seed=shape.beams, ragged=True)
    expected = inputs.expected()
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN while this is on
    try:
        out = inputs.call(tiles)
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    return relative_error(out, expected)


def folded_cudnn_ms(shape: Shape, sets: int) -> float:
    """cuDNN over the prompt part alone, beams and group folded into query rows: a practical ceiling."""
    group = shape.heads // shape.kv_heads

    def normal(rows: int) -> Tensor:
        return torch.randn(shape.users, shape.kv_heads, rows, shape.dim, device="cuda", dtype=torch.bfloat16)

    data = [(normal(shape.beams * group), normal(shape.context), normal(shape.context)) for _ in range(sets)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return graph_ms([lambda x=x: F.scaled_dot_product_attention(*x) for x in data])  # type: ignore[misc]


def variants(shape: Shape) -> list[AttentionTiles]:
    """Tile variants worth a try for a shape, with and without splitting the prompt."""
    lines = shape.beams * shape.heads // shape.kv_heads
    found = []
    for tiles in HOPPER + PLAIN:
        if tiles.hopper and (torch.cuda.get_device_capability()[0] != 9 or lines <= 64):
            continue
        programs = -(-lines // tiles.rows) * shape.kv_heads * shape.users
        fill = 132 // programs
        found.append(with_splits(tiles, max(1, fill)))
        if fill > 2:
            found.append(with_splits(tiles, fill // 2))
    return found


def examine(tiles: AttentionTiles | None, shapes: list[Shape], warm: list[Shape]) -> list[float]:
    """Errors of a variant on ``shapes``; then one call on each shape of ``warm``, to have it compiled."""
    errors = [check(shape, tiles, torch.bfloat16) for shape in shapes]
    for shape in warm:
        timed = [tiles] if tiles is None else [v for v in variants(shape) if with_splits(v, 1) == tiles]
        if timed:
            inputs = Inputs.random(shape, torch.bfloat16, 0, ragged=False)
            for variant in timed:
                inputs.call(variant)
            torch.cuda.synchronize()
    return errors


def _examine_all(timed: list[Shape]) -> tuple[list[dict[str, object]], set[str]]:
    hopper = HOPPER if torch.cuda.get_device_capability()[0] == 9 else []
    candidates = [None, *hopper, *PLAIN, *(with_splits(t, 3) for t in (*hopper[:1], PLAIN[0]))]
    jobs: dict[str, Job] = {label(tiles): (examine, (tiles, CHECKED, timed)) for tiles in candidates}
    results, failures = run_isolated(jobs, timeout_s=240)
    rows: list[dict[str, object]] = []
    wrong = set(failures)
    for name, reason in failures.items():
        print(f"WRONG attention {name}: {reason}", flush=True)
    for name, errors in results.items():
        for shape, error in zip(CHECKED, errors, strict=True):
            rows.append({"shape": str(shape), "variant": name, "error": error})
            if not error < TOLERANCE[torch.bfloat16]:
                wrong.add(name)
                print(f"WRONG attention {shape} {name}: {error:.2e}", flush=True)
    for dtype in (torch.float16, torch.float32):
        error = check(CHECKED[0], None, dtype)
        rows.append({"shape": str(CHECKED[0]), "variant": f"automatic {dtype}", "error": error})
        if not error < TOLERANCE[dtype]:
            wrong.add(f"automatic {dtype}")
            print(f"WRONG attention {CHECKED[0]} {dtype}: {error:.2e}", flush=True)
    return rows, wrong


def run(limits: dict[str, float], quick: bool) -> tuple[list[dict[str, object]], int]:
    """Check all variants on awkward shapes, then time the right ones. Returns the rows and how many were wrong."""
    timed = TIMED[:2] if quick else TIMED
    rows, wrong = _examine_all(timed)
    print(f"attention: {len(rows)} checks, {len(wrong)} variants wrong", flush=True)
    for shape in timed:
        kv_bytes = 4 * shape.users * shape.context * shape.kv_heads * shape.dim
        sets = max(2, min(28, int(2.5e8 // kv_bytes)))
        inputs = [Inputs.random(shape, torch.bfloat16, seed, ragged=False) for seed in range(sets)]
        floor = max(shape.flops / limits["matmul_tflops"] / 1e9, shape.bytes / limits["copy_tbs"] / 1e9)
        best: tuple[float, str] = (float("inf"), "none")
        for tiles in [None, *variants(shape)]:
            name = label(tiles)
            if label(tiles and with_splits(tiles, 1)) in wrong:
                continue
            ms = graph_ms([lambda i=i, t=tiles: i.call(t) for i in inputs])  # type: ignore[misc]
            rows.append({"shape": str(shape), "variant": name, "ms": ms, "floor_ms": floor})
            best = min(best, (ms, name))
            print(f"  {shape} {name}: {ms:.4f} ms, {shape.flops / ms / 1e9:.0f} TFLOP/s", flush=True)
        ceiling = folded_cudnn_ms(shape, sets)
        rows.append({"shape": str(shape), "variant": "cudnn folded, prompt only", "ms": ceiling, "floor_ms": floor})
        print(
            f"attention {shape}: {best[0]:.4f} ms ({best[1]}), floor {floor:.4f}, cuDNN folded {ceiling:.4f}",
            flush=True,
        )
    return rows, len(wrong)

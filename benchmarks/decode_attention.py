"""Decode attention a layer: paged and the paper's stages beside the engine's, at several shapes, on this GPU.

    python benchmarks/decode_attention.py [--quick] [--out FILE.json]

A time stands only beside an error: each contender is first compared with the definition in float64. Of these shapes
FlashInfer's paged decode is known on an H200: what paged is held against.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from xgr_engine.bench.attention import FLASHINFER_H200  # noqa: E402
from xgr_engine.bench.kernels.decode_layer import DecodeShape, Layer, cold_layers, fastest_tiles  # noqa: E402
from xgr_engine.bench.kernels.paged_triton import VARIANTS, paged_attention  # noqa: E402
from xgr_engine.bench.timing import call_ms  # noqa: E402
from xgr_engine.xattention.triton import beam_attention  # noqa: E402


def compare(shape: DecodeShape, device: torch.device, *, variants: bool = False) -> dict[str, Any]:
    """One row of the table: milliseconds a layer and relative errors of paged, engine and the paper's stages.

    Args:
        variants: also the time of each of paged's variants.
    """
    layers = cold_layers(shape, device)
    tiles = fastest_tiles(shape, device)
    forms: dict[str, Callable[[Layer], Tensor]] = {
        "paged": partial(Layer.paged, kernel=partial(paged_attention, tiles=tiles)),
        "xgr": partial(Layer.engine, kernel=beam_attention),
        "paper": Layer.staged,
    }
    row: dict[str, Any] = {"shape": str(shape), "paged_tiles": asdict(tiles)}
    for name, form in forms.items():
        row[f"{name}_error"] = layers[0].error(form(layers[0]))
        row[f"{name}_ms"] = call_ms([partial(form, layer) for layer in layers], device)
    row["paged_over_xgr"] = row["paged_ms"] / row["xgr_ms"]
    known = FLASHINFER_H200.get(shape)
    if known is not None:
        row |= {"flashinfer_paged_ms": known, "paged_over_flashinfer": row["paged_ms"] / known}
    if variants:
        row["variants_ms"] = {
            f"{t.keys} keys, {t.warps} warps, {t.stages} stages": call_ms(
                [partial(layer.paged, partial(paged_attention, tiles=t)) for layer in layers],
                device,
                seconds=0.1,
                repeats=3,
            )
            for t in VARIANTS
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first three shapes, without the variants' times")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: the kernels are checked on the CPU by tests/bench_baselines, and timed only on a GPU")
    shapes = [*FLASHINFER_H200, DecodeShape(1000, 8, 256, heads=12, kv_heads=12, dim=64)]
    device, rows, wrong = torch.device("cuda", torch.cuda.current_device()), [], 0
    for shape in shapes[:3] if args.quick else shapes:
        row = compare(shape, device, variants=not args.quick)
        rows.append(row)
        wrong += sum(not row[f"{name}_error"] < 1e-2 for name in ("paged", "xgr", "paper"))
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

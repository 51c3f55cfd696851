"""The engine on a GPU against golden lists made by transformers on a CPU: float32 and bfloat16, every implementation.

    python benchmarks/gpu_parity.py --model M --vocab V --golden golden_qwen3.json [--out F.json]

``golden`` holds users with ``prompt_ids`` and ``beams`` ([SID text, score], best first). Exit code 1 if float32 differs
by more than 1e-4 in a score or in an order that is not a tie, or if bfloat16 misses the limits stated below.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.models.loading import load_model
from xgr_engine.models.ops import choose_ops
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender

FLOAT32_TOLERANCE = 1e-4  # golden scores are rounded to 1e-5
TIE = 1e-5 + 2e-5  # a tie by the design, plus twice the rounding of the golden
BF16_OVERLAP, BF16_CLEAR_GAP = 0.97, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--vocab", "--golden"):
        parser.add_argument(name, required=True, type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    users = json.loads(args.golden.read_text("utf-8"))["users"]
    variants = [("reference", False), ("triton", False), ("triton", True)]
    if args.device == "cpu":
        variants = [("reference", False)]
    rows, failed = [], False
    for dtype in (torch.float32, torch.bfloat16):
        for kernels, graphs in variants:
            for batch in (7, 64):
                row = compare(args, users, dtype, kernels, graphs, batch)
                failed |= not row["passed"]
                rows.append(row)
                print({name: value for name, value in row.items() if name != "worst"}, flush=True)
    record = {"command": sys.argv, "machine": machine(args.device), "users": len(users), "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return int(failed)


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def compare(
    args: argparse.Namespace, users: list[dict[str, Any]], dtype: torch.dtype, kernels: str, graphs: bool, batch: int
) -> dict[str, Any]:
    """One implementation against the golden lists."""
    model_dir, vocabulary = load_model_dir(args.model), load_vocabulary(args.vocab)
    device = torch.device(args.device)
    model, head = load_model(model_dir.spec, model_dir.weights_path, device, dtype, choose_ops(device, kernels))
    options = SearchOptions(beam=50, top_k=50)
    recommender = Recommender(model, head, vocabulary.trie, model_dir.table, options, graphs=graphs)
    prompts = [np.array(user["prompt_ids"], np.int32) for user in users]
    codes, _ = vocabulary.sids()
    texts = ["".join(f"<{'abcdefgh'[level]}_{code}>" for level, code in enumerate(sid) if code >= 0) for sid in codes]
    start, answers = time.perf_counter(), []
    for at in range(0, len(prompts), batch):
        part = prompts[at : at + batch]
        result = recommender.run(part, [np.empty(0, np.int32)] * len(part))
        ends = np.cumsum(result.counts)
        for first, end in zip(ends - result.counts, ends, strict=True):
            answers.append(
                {
                    texts[leaf]: float(s)
                    for leaf, s in zip(result.leaves[first:end], result.scores[first:end], strict=True)
                }
            )
    seconds = time.perf_counter() - start
    statistics = judge(answers, [dict(user["beams"]) for user in users])
    exact = dtype == torch.float32
    passed = (
        statistics["score_difference"] <= FLOAT32_TOLERANCE
        and statistics["order_faults"] == 0
        and statistics["missing"] == 0
        if exact
        else statistics["overlap"] >= BF16_OVERLAP and statistics["top1_faults_beyond_gap"] == 0
    )
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": recommender.implementation,
        "batch": batch,
        "seconds_first_pass": round(seconds, 2),
        **statistics,
        "passed": bool(passed),
    }


def judge(answers: list[dict[str, float]], golden: list[dict[str, float]]) -> dict[str, Any]:
    """Differences between the SIDs of each list. Items that share a SID shorten ours, so the tail may be missing."""
    overlap, difference, order_faults, missing, clear_faults = [], 0.0, 0, 0, 0
    for mine, theirs in zip(answers, golden, strict=True):
        common = [sid for sid in mine if sid in theirs]
        overlap.append(len(common) / len(mine))
        missing += len(mine) - len(common)
        difference = max([difference, *(abs(mine[sid] - theirs[sid]) for sid in common)])
        expected = list(theirs.items())
        for (sid, _), (wanted, score) in zip(mine.items(), expected, strict=False):
            if sid != wanted and abs(theirs.get(sid, -1e9) - score) > TIE:
                order_faults += 1
        gap = expected[0][1] - expected[1][1]
        clear_faults += next(iter(mine)) != expected[0][0] and gap > BF16_CLEAR_GAP
    return {
        "overlap": round(float(np.mean(overlap)), 5),
        "score_difference": float(f"{difference:.3g}"),
        "order_faults": order_faults,
        "missing": missing,
        "top1_faults_beyond_gap": clear_faults,
    }


if __name__ == "__main__":
    sys.exit(main())

"""Users per second on a CPU: this engine against transformers.generate with its trie callback, same users, same run.

    python benchmarks/cpu_vs_transformers.py --data DIR [--threads 2] [--beams 50,256] [--out F.json]

DIR holds ``catalog.index.json``, ``qwen3/`` and ``golden_qwen3.json`` (index, checkpoint and lists of transformers).
Every measurement is a child process of its own, the two kinds take turns, and transformers runs at each of its batch
sizes; the best one counts. The lists are compared before any number is printed: same SIDs, scores within 1e-4, order
equal but for ties. K = W is the worst case for this engine; K = 50, the default, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from provenance import provenance  # noqa: E402

from xgr_engine.system import keep_few_kernels, let_waiting_threads_sleep  # noqa: E402

ROUNDS = 3
USERS = {"xgr": {50: 192, 256: 96}, "transformers": {50: 8, 256: 4}}
XGR_BATCH = {50: 32, 256: 16}  # what xgr recommend plans on a CPU: about 4096 prompt tokens, 4096 rows
TRANSFORMERS_BATCHES = (1, 2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beams", default="50,256")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.data, json.loads(args.child))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(args.data, Path(folder))
        rows = [compare(args, Path(folder), int(beam)) for beam in args.beams.split(",")]
    record = {
        **provenance(),
        "threads": args.threads,
        "load": os.getloadavg(),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return int(not all(row["equal"] for row in rows))


def prepare(data: Path, folder: Path) -> None:
    """A vocabulary and a model directory from the fixture."""
    command = [sys.executable, "-m", "xgr_cli.main"]
    subprocess.run([*command, "build-vocab", data / "catalog.index.json", "--out", folder / "vocab", "-q"], check=True)
    convert = [*command, "convert", data / "qwen3", "--vocab", folder / "vocab", "--out", folder / "model", "-q"]
    subprocess.run([*convert, "--prompt", "minionerec-eval"], check=True)


def compare(args: argparse.Namespace, folder: Path, beam: int) -> dict[str, Any]:
    """All contenders at one width, taking turns."""
    jobs = {
        f"xgr K={k}": {"kind": "xgr", "k": k, "batch": XGR_BATCH.get(beam, 16)}
        for k in sorted({50, beam}, reverse=True)
    }
    jobs |= {f"transformers batch {b}": {"kind": "transformers", "k": beam, "batch": b} for b in TRANSFORMERS_BATCHES}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for number in range(ROUNDS):
        for name, job in jobs.items():
            runs[name].append(spawn(args, folder, {**job, "beam": beam, "threads": args.threads}))
        if number == 0:  # the quickest batch size goes on, the others have shown that they are slower
            rates = {name: runs[name][0]["rate"] for name in jobs if name.startswith("transformers")}
            best = max(rates, key=lambda name: rates[name])
            jobs = {name: job for name, job in jobs.items() if name == best or name.startswith("xgr")}
    equal, difference = same_lists(runs[f"xgr K={beam}"][0]["lists"], runs["transformers batch 1"][0]["lists"])
    results = {
        name: {
            "users_per_s": round(statistics.median(run["rate"] for run in found), 4),
            "range": [round(pick(run["rate"] for run in found), 4) for pick in (min, max)],
            "users": found[0]["users"],
            "peak_rss_mb": max(run["rss_mb"] for run in found),
        }
        for name, found in runs.items()
    }
    ratios = {
        name: round(result["users_per_s"] / results[best]["users_per_s"], 1)
        for name, result in results.items()
        if name.startswith("xgr")
    }
    row = {
        "beam": beam,
        "equal": equal,
        "score_difference": difference,
        "best": best,
        "ratios": ratios,
        "results": results,
    }
    print(json.dumps(row, indent=1), flush=True)
    return row


def spawn(args: argparse.Namespace, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        __file__,
        "--data",
        str(args.data),
        "--child",
        json.dumps({**job, "folder": str(folder)}),
    ]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same_lists(mine: list[list[Any]], theirs: list[list[Any]]) -> tuple[bool, float]:
    """Whether two lists of (SID, score) a user agree: scores within 1e-4, order equal where they differ by 1e-5."""
    worst, fine = 0.0, True
    for one, other in zip(mine, theirs, strict=False):
        scores = dict(map(tuple, other))
        fine &= set(scores) == {sid for sid, _ in one}
        if not fine:
            return False, worst
        worst = max(worst, *(abs(score - scores[sid]) for sid, score in one))
        fine &= all(
            sid == wanted or abs(scores[sid] - score) < 1e-5
            for (sid, _), (wanted, score) in zip(one, other, strict=True)
        )
    return fine and worst < 1e-4, float(f"{worst:.3g}")


def child(data: Path, job: dict[str, Any]) -> dict[str, Any]:
    if job["kind"] == "xgr":  # as the command line does; transformers runs as its users run it
        let_waiting_threads_sleep()
        keep_few_kernels()
    import torch

    torch.set_num_threads(job["threads"])
    users = json.loads((data / "golden_qwen3.json").read_text("utf-8"))["users"]
    users = users[: USERS[job["kind"]][min(USERS[job["kind"]], key=lambda beam: abs(beam - job["beam"]))]]
    run = xgr_lists(job) if job["kind"] == "xgr" else transformers_lists(data, job)
    prompts = [user["prompt_ids"] for user in users]
    run(prompts[: job["batch"]])
    start = time.perf_counter()
    lists = [answer for at in range(0, len(prompts), job["batch"]) for answer in run(prompts[at : at + job["batch"]])]
    seconds = time.perf_counter() - start
    kept = [[[sid, score] for sid, score in answer] for answer in lists[:8]]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"rate": len(prompts) / seconds, "users": len(prompts), "rss_mb": rss, "lists": kept}


def xgr_lists(job: dict[str, Any]) -> Any:
    import numpy as np

    from xgr_engine.catalog.vocabulary import load_vocabulary
    from xgr_engine.checkpoint.model_dir import load_model_dir
    from xgr_engine.models.loading import load_model
    from xgr_engine.options import SearchOptions
    from xgr_engine.recommender import Recommender

    folder = Path(job["folder"])
    vocabulary, model = load_vocabulary(folder / "vocab"), load_model_dir(folder / "model")
    options = SearchOptions(beam=job["beam"], top_k=job["k"], collisions="first")
    recommender = Recommender(*load_model(model.spec, model.weights_path), vocabulary.trie, model.table, options)
    codes, _ = vocabulary.sids()

    def run(prompts: list[list[int]]) -> list[list[tuple[str, float]]]:
        result = recommender.run([np.array(p, np.int32) for p in prompts], [np.empty(0, np.int32)] * len(prompts))
        ends = np.cumsum(result.counts)
        return [
            [
                (str(codes[leaf].tolist()), float(score))
                for leaf, score in zip(result.leaves[a:b], result.scores[a:b], strict=True)
            ]
            for a, b in zip(ends - result.counts, ends, strict=True)
        ]

    return run


def transformers_lists(data: Path, job: dict[str, Any]) -> Any:
    import re

    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(data / "qwen3", dtype=torch.float32).eval()
    added = json.loads((data / "qwen3" / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    code = {number: int(found[1]) for text, number in ids.items() if (found := re.search(r"_(\d+)>", text))}
    trie: dict[int, Any] = {}
    for sid in json.loads((data / "catalog.index.json").read_text("utf-8")).values():
        node = trie
        for token in sid:
            node = node.setdefault(ids[token], {})

    def run(prompts: list[list[int]]) -> list[list[tuple[str, float]]]:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

        def allowed(_: int, sequence: torch.Tensor) -> list[int]:
            node = trie
            for token in sequence[width:].tolist():
                node = node[token]
            return list(node)

        with torch.inference_mode():
            out = model.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=3,
                min_new_tokens=3,
                num_beams=job["beam"],
                num_return_sequences=job["beam"],
                do_sample=False,
                length_penalty=0.0,
                prefix_allowed_tokens_fn=allowed,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        sids = [str([code[token] for token in row]) for row in out.sequences[:, width:].tolist()]
        pairs = list(zip(sids, out.sequences_scores.tolist(), strict=True))
        return [pairs[at : at + job["beam"]] for at in range(0, len(pairs), job["beam"])]

    return run


if __name__ == "__main__":
    sys.exit(main())

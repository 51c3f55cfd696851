"""What the scripts that time or weigh whole batches share: models, a catalog, prompts, and answers compared."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from xgr_engine.bench.geometries import find_geometry  # noqa: E402
from xgr_engine.bench.workloads import BenchCatalog, BenchModel, random_weights, synthetic_catalog  # noqa: E402
from xgr_engine.models.ops import reference_ops  # noqa: E402
from xgr_engine.options import SearchOptions  # noqa: E402
from xgr_engine.recommender import Recommender  # noqa: E402

Prompts = list[np.ndarray]


@dataclass(frozen=True)
class Shape:
    """A row: prompt tokens, users a batch, beam width."""

    context: int
    users: int
    beam: int

    @classmethod
    def parse(cls, text: str) -> list[Shape]:
        """``1000x8x256,5000x8x256``."""
        return [cls(*(int(part) for part in row.split("x"))) for row in text.split(",")]

    def __str__(self) -> str:
        return f"{self.context}x{self.users}x{self.beam}"


class World:
    """Models by geometry and one catalog, each made once and shared by all scripts of a process.

    Args:
        codes: ``8192x3``, codes a level and levels.
    """

    def __init__(self, device: str, items: float, codes: str) -> None:
        self.device = torch.device(device)
        self.items = int(items)
        self.codes, self.levels = (int(part) for part in codes.split("x"))
        self.catalog: BenchCatalog = synthetic_catalog(self.items, self.codes, self.levels)
        self._models: dict[str, BenchModel] = {}

    def model(self, geometry: str) -> BenchModel:
        """Random weights, bfloat16 on a GPU."""
        if geometry not in self._models:
            self._models[geometry] = random_weights(find_geometry(geometry), self.codes, self.levels, self.device)
        return self._models[geometry]

    def recommender(self, geometry: str, options: SearchOptions, lanes: int = 1) -> Recommender:
        """A fresh one: no buffers, no graphs."""
        model = self.model(geometry)
        return Recommender(model.decoder, model.head, self.catalog.trie, model.table, options, lanes=lanes)

    def prompts(self, geometry: str, context: int, users: int, seed: int) -> Prompts:
        """Random tokens; the same arguments give the same prompts."""
        vocabulary = self.model(geometry).spec.vocab_size
        return list(np.random.default_rng([context, users, seed]).integers(0, vocabulary, (users, context), np.int32))

    def facts(self) -> dict[str, Any]:
        """Machine, versions and catalog, for a record."""
        gpu = self.device.type == "cuda"
        return {
            "command": [Path(word).name for word in sys.argv],
            "commit": _commit(),
            "gpu": torch.cuda.get_device_name(self.device) if gpu else None,
            "gpu_bytes": torch.cuda.get_device_properties(self.device).total_memory if gpu else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "items": self.items,
            "codes": f"{self.codes}x{self.levels}",
        }


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def nothing(users: int) -> Prompts:
    """Nobody has anything excluded."""
    return [np.empty(0, np.int32)] * users


def synchronize(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed(work: Any, device: torch.device) -> float:
    """Seconds of one call on an idle device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def compare(
    world: World,
    geometry: str,
    options: SearchOptions,
    prompts: Prompts,
    found: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> dict[str, Any]:
    """Lists against plain torch kernels and the host's search: same weights, same dtype, same device.

    Args:
        prompts: of the first users of a batch.
        found: items a user, leaves and scores of at least these users, back to back, best first.
    """
    model = world.model(geometry)
    plain = copy(model.decoder)
    plain.ops = reference_ops()
    reference = Recommender(plain, model.head, world.catalog.trie, model.table, options)
    other = reference.run(prompts, nothing(len(prompts)))
    counts, leaves, scores = found
    differences: list[float] = []
    values, top1, at, mine_at = 0, 0, 0, 0
    for user, count in enumerate(other.counts.tolist()):
        theirs = dict(zip(other.leaves[at : at + count].tolist(), other.scores[at : at + count].tolist(), strict=True))
        own = int(counts[user])
        mine = leaves[mine_at : mine_at + own].tolist(), scores[mine_at : mine_at + own].tolist()
        differences += [abs(theirs[leaf] - score) for leaf, score in zip(*mine, strict=True) if leaf in theirs]
        top1 += mine[0][0] == next(iter(theirs))
        values, at, mine_at = values + count, at + count, mine_at + own
    overlap = len(differences) / values
    largest = max(differences, default=float("inf"))
    # random weights give nearly flat scores: lists differ at the cut, so the scores decide. Of the places 94 to 96 %
    # agreed in all earlier runs; few users at a narrow beam scatter around that.
    least = 0.93 - 3 * (0.93 * 0.07 / values) ** 0.5
    return {
        "compared_users": len(prompts),
        "overlap": round(overlap, 4),
        "overlap_at_least": round(least, 4),
        "score_difference": float(f"{largest:.2g}"),
        "mean_score_difference": float(f"{np.mean(differences or [float('inf')]):.2g}"),
        "top1_equal": f"{top1}/{len(prompts)}",
        "matches": overlap > least and largest < 0.25,
    }


def print_table(title: str, lines: list[dict[str, Any]], columns: list[str]) -> None:
    """Some columns of some rows, aligned."""
    cells = [columns, *[[_text(line.get(column)) for column in columns] for line in lines]]
    widths = [max(len(row[number]) for row in cells) for number in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(flush=True)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(_text(part) for part in value)
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else str(value)


def write(path: Path | None, record: dict[str, Any]) -> None:
    """A record as JSON, whole each time, so that a run that is cut short leaves what it has."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

"""What filters cost the search: the same users over the whole catalog, over filtered ones, and in a forest of trees.

    python benchmarks/filters.py
    python benchmarks/filters.py --items 100000 --rounds 5

A random model of the quick geometry, half a million items with random SIDs of 3 codes of 256, random filters. The
searches take turns, round by round, so that a change of the machine's speed meets all of them, and CPU time of one
thread is measured, so that other work on the machine matters little. Every search is checked: exactly K items, all
allowed. Writes benchmarks/results/filters.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance

from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.workloads import BenchModel, Workload, random_weights, synthetic_catalog
from xgr_engine.catalog.trie import ItemTrie, build_forest
from xgr_engine.options import Exclusion, SearchOptions, UserRules
from xgr_engine.recommender import Recommender

RESULTS = Path(__file__).parent / "results" / "filters.json"
SHARES = (0.5, 0.1, 0.01)
VALUES = 20


@dataclass
class Case:
    """One way to search.

    Attributes:
        allowed: bool [users, items], or [1, items] where it is the same for all.
        prepared: seconds that the trie took, once a job.
    """

    name: str
    engine: Recommender
    rules: list[Exclusion]
    allowed: np.ndarray[Any, np.dtype[np.bool_]]
    items: int
    prepared: float


def cases(model: BenchModel, trie: ItemTrie, search: SearchOptions, users: int) -> list[Case]:
    rng = np.random.default_rng(0)
    nothing: list[Exclusion] = [np.empty(0, np.int32)] * users
    everything = np.ones((1, trie.num_items), np.bool_)

    def engine(searched: ItemTrie) -> Recommender:
        return Recommender(model.decoder, model.head, searched, model.table, search)

    found = [Case("no filter", engine(trie), nothing, everything, trie.num_items, 0.0)]
    for share in SHARES:
        mask = rng.random(trie.num_items) < share
        started = time.perf_counter()
        restricted = trie.restrict(mask)
        seconds = time.perf_counter() - started
        name = f"--where leaves {share:.0%}"
        found.append(Case(name, engine(restricted), nothing, mask[None], restricted.num_items, seconds))
    value = rng.integers(0, VALUES, trie.num_items).astype(np.int32)
    started = time.perf_counter()
    codes = trie.leaf_codes()[trie.leaf_of_item]
    forest = build_forest(codes, np.arange(trie.num_items, dtype=np.int32), value, VALUES)
    seconds = time.perf_counter() - started
    rules: list[Exclusion] = [UserRules(np.empty(0, np.int32), user % VALUES) for user in range(users)]
    allowed = value[None] == (np.arange(users) % VALUES)[:, None]
    name = f"--match, {VALUES} values, a different one each user"
    found.append(Case(name, engine(forest), rules, allowed, trie.num_items, seconds))
    return found


def run_once(case: Case, prompts: list[Any], top_k: int) -> float:
    """Milliseconds of CPU time of a batch, after checking its result."""
    started = time.process_time()
    result = case.engine.run(prompts, case.rules)
    elapsed = 1e3 * (time.process_time() - started)
    assert (result.counts == top_k).all(), f"{case.name}: not exactly K items a user"
    owner = np.repeat(np.arange(len(prompts)), result.counts)
    assert case.allowed[owner % len(case.allowed), result.item_rows].all(), f"{case.name}: a forbidden item"
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("items", 500_000), ("beam", 64), ("top-k", 50), ("users", 4), ("context", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    geometry = find_geometry("quick")
    model = random_weights(geometry, geometry.codes, geometry.levels, torch.device("cpu"))
    catalog = synthetic_catalog(given.items, geometry.codes, geometry.levels)
    search = SearchOptions(beam=given.beam, top_k=given.top_k)
    workload = Workload(model, catalog, search, given.context, given.users)
    compared = cases(model, catalog.trie, search, given.users)
    times: dict[str, list[float]] = {case.name: [] for case in compared}
    for number in range(given.rounds + 1):
        prompts = list(workload.batch(number).prompts)
        for case in compared:
            elapsed = run_once(case, prompts, given.top_k)
            if number:  # the first round warms up
                times[case.name].append(elapsed)
    base = times[compared[0].name]
    rows = [
        {
            "search": case.name,
            "items": case.items,
            "batch_cpu_ms_median": round(statistics.median(times[case.name]), 2),
            "over_no_filter": round(
                statistics.median(mine / whole for mine, whole in zip(times[case.name], base, strict=True)), 3
            ),
            "trie_seconds": round(case.prepared, 3),
        }
        for case in compared
    ]
    record = {
        "setting": {**vars(given), "geometry": geometry.name, "codes": f"{geometry.codes}x{geometry.levels}"},
        **provenance(),
        "searches": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        print(
            f"{row['search']:<50} {row['batch_cpu_ms_median']:>9.1f} ms  x{row['over_no_filter']:.3f}  {row['items']:,}"
        )


if __name__ == "__main__":
    main()

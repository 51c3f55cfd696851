"""What the constraint alone costs, from ten thousand to ten million items, against a masked full-vocabulary top-k.

The model has no layers: hidden states are normed embeddings of the last token, so what is left of a search is the
head, the constraint and the selection. Each side's head (to the log-probabilities) is timed on its own and taken off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgr_engine.bench.baselines.base import RankedSids, decoder_only
from xgr_engine.bench.baselines.hf import CsrConstraint
from xgr_engine.bench.geometries import Geometry
from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.parity import judge, leaves_of
from xgr_engine.bench.timing import call_ms
from xgr_engine.bench.workloads import Batch, BenchModel, Workload, random_model, synthetic_catalog
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.search.graphed import GraphedSearch, places_for
from xgr_engine.search.host import HostSearch
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xschedule.engines import is_out_of_memory

Note = Callable[[str], None]
_HEADS = {"xgr": "head_ms", "masked": "masked_head_ms"}
_HIDDEN = 128  # small, so that the head does not hide what is measured


@dataclass(frozen=True)
class ConstraintShape:
    """Users and beam of the search, and the code space."""

    users: int
    beam: int
    codes: int
    levels: int


def constraint_costs(
    geometry: Geometry,
    shape: ConstraintShape,
    items: tuple[int, ...],
    device: torch.device,
    seed: int,
    note: Note,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
    over: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """One entry a catalog size; ``flatness`` is the largest over the smallest time of the engine's search.

    Args:
        keep: gets the record after every size: the largest takes long, and a run may be stopped there.
        over: whether the time limit is over: then no other size than the first is begun.
    """
    model = headless_model(geometry, shape, device, seed)
    entries: list[dict[str, Any]] = []
    record = {
        "geometry": geometry.name,
        "vocabulary": model.spec.vocab_size,
        "users": shape.users,
        "beam": shape.beam,
        "codes": f"{shape.codes}x{shape.levels}",
        "sizes": entries,
        "flatness": None,
        "masked": "CSR mask and top-k over the whole vocabulary of every beam in plain torch, log-softmax in its head",
    }
    for count in items:
        if count > shape.codes**shape.levels // 2:
            entries.append({"items": count, "status": "not run", "reason": "the code space is too small"})
        elif entries and over():
            entries.append({"items": count, "status": "not run", "reason": "the time limit had passed"})
        else:
            note(f"  constraint over {count:,} items")
            entries.append(_one_size(model, shape, count, seed))
            free_memory(device)
        own = [entry["xgr_ms"] for entry in entries if entry["status"] == "ok"]
        record["flatness"] = max(own) / min(own) if own else None
        keep(record)
    return record


def headless_model(geometry: Geometry, shape: ConstraintShape, device: torch.device, seed: int) -> BenchModel:
    """A decoder-only model of no layers with the geometry's vocabulary, whatever the geometry's own kind."""
    narrow = replace(geometry, layers=0, encoder_layers=0, hidden=_HIDDEN)
    spec = narrow.spec(shape.codes, shape.levels, "bfloat16")
    decoder, head = random_model(spec, device, seed)
    codes = torch.arange(shape.codes, dtype=torch.int32).numpy()
    first = [geometry.text_tokens + level * shape.codes for level in range(shape.levels)]
    table = SidTokenTable.from_levels([codes] * shape.levels, [codes + start for start in first])
    return BenchModel(f"{geometry.name}, head only", decoder, head, table)


@torch.inference_mode()
def _one_size(model: BenchModel, shape: ConstraintShape, items: int, seed: int) -> dict[str, Any]:
    catalog = synthetic_catalog(items, shape.codes, shape.levels, seed)
    search = SearchOptions(beam=shape.beam, top_k=min(shape.beam, items), collisions="first")
    workload = Workload(model, catalog, search, context=1, users=shape.users)
    decoder = decoder_only(model)
    embedded = decoder.embed[_last_tokens(model, shape.users)]
    hidden = decoder.ops.add_rms_norm(embedded, None, decoder.norm, decoder.spec.rms_eps)
    ours, setup = engine_search(workload, hidden)
    masked = MaskedSearch(workload, setup)
    record: dict[str, Any] = {"items": items}
    found = answers(ours(), workload)
    record["xgr_ms"] = call_ms([ours], model.device) if model.device.type == "cpu" else _graph_ms(ours, model.device)
    record["head_ms"] = call_ms([lambda: head_only(setup, hidden)], model.device)
    try:
        expected = answers(masked.run(hidden), workload)
        record["masked_ms"] = call_ms([lambda: masked.run(hidden)], model.device)
        record["masked_head_ms"] = call_ms([lambda: masked.head_only(hidden)], model.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {**record, "status": "ok", **without_heads(record), "masked_ms": None, "masked": "out of memory"}
    # the hidden states above are those of prompts of one token
    prompts = Batch(tuple(np.array([token], np.int32) for token in _last_tokens(model, shape.users).tolist()))
    parity = judge(workload, prompts, {"xgr": found, "masked": expected}).parity
    same = [
        np.isin(leaves_of(catalog.trie, theirs), leaves_of(catalog.trie, ours)).mean()
        for theirs, ours in zip(expected.codes, found.codes, strict=True)
    ]
    return {
        **record,
        "status": "ok",
        **without_heads(record),
        "overlap": float(np.mean(same)),
        "marks": parity["xgr"].marks,
        "masked_marks": parity["masked"].marks,
    }


def _last_tokens(model: BenchModel, users: int) -> Tensor:
    """int64 [U]: a token a user; more users than tokens share theirs."""
    return torch.arange(users, device=model.device) % model.spec.vocab_size


def without_heads(record: dict[str, Any]) -> dict[str, Any]:
    """What is left of the two searches' times without their heads.

    None for a side that was not measured to the end; None, and a note, where it is lost in the noise.
    """
    left = {side: record[f"{side}_ms"] - record[head] for side, head in _HEADS.items() if head in record}
    own, theirs = (left[side] if left.get(side, 0) > 0 else None for side in _HEADS)
    lost = [side for side, ms in left.items() if ms <= 0]
    return {
        "constraint_ms": own,
        "masked_constraint_ms": theirs,
        "masked_over_xgr": theirs / own if own and theirs else None,
        "notes": [f"{side}: the head alone took as long as the whole search, nothing is left to show" for side in lost],
    }


def _graph_ms(run: Callable[[], Outcome], device: torch.device) -> float:
    """The engine's search is one graph already: replays between two events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(30):
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(stop))
    return statistics.median(times[5:])  # after five to warm up


def engine_search(workload: Workload, hidden: Tensor) -> tuple[Callable[[], Outcome], SearchSetup]:
    """The engine's search from given hidden states: graphs on a GPU, the host search on a CPU."""
    model, users = workload.model, workload.users
    recommender = Recommender(model.decoder, model.head, workload.catalog.trie, model.table, workload.search)
    setup = recommender.setup
    dead = DeadNodes.none(len(setup.levels), users, model.device)
    cache = model.decoder.new_cache(users, places_for(users), setup.slots)
    cache.begin([1] * users, 0)
    if model.decoder.ops.name == "triton":
        graphed = GraphedSearch(setup, cache)
        return lambda: graphed.run(hidden, dead), setup
    host = HostSearch(setup, 0)
    return lambda: host.run(hidden, cache, dead), setup


def head_only(setup: SearchSetup, hidden: Tensor) -> Tensor:
    """The head's work of a whole search and nothing else."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for depth in range(len(setup.levels)):
        rows = 1 if depth == 0 else min(setup.options.beam, setup.levels[depth - 1].inner_count)
        logits, _ = setup.head.level_scores(hidden.repeat_interleave(rows, 0), depth, "vocab")
        total = total + logits[0, 0]
    return total


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """float32 [N, V]."""
    return torch.mm(hidden, head.T, out_dtype=torch.float32) if hidden.is_cuda else hidden.float() @ head.float().T


class MaskedSearch:
    """Beam search as it is usually written: whole vocabulary, mask, top-k over everything."""

    def __init__(self, workload: Workload, setup: SearchSetup) -> None:
        self._workload = workload
        self._setup = setup
        self._mask = CsrConstraint(workload)

    def head_only(self, hidden: Tensor) -> Tensor:
        """Logits and log-softmax of every level, and nothing else."""
        total, head = hidden.new_zeros((), dtype=torch.float32), self._workload.model.head
        rows = 1
        for _ in range(self._workload.catalog.trie.levels):
            total = total + torch.log_softmax(_logits(hidden.repeat_interleave(rows, 0), head), -1)[0, 0]
            rows = min(self._workload.search.beam, rows * len(head))  # as many as the search goes on with
        return total

    def run(self, hidden: Tensor) -> Tensor:
        """Tokens and scores of the best sequences: [U, W, L + 1] float64, the score last."""
        model, users = self._workload.model, len(hidden)
        decoder = decoder_only(model)
        width, vocabulary = self._workload.search.beam, model.spec.vocab_size
        tokens = torch.zeros((users, 0), dtype=torch.int64, device=model.device)
        score = torch.zeros(users, device=model.device)
        for depth in range(self._workload.catalog.trie.levels):
            if depth:
                embedded = decoder.embed[tokens[:, -1]]
                hidden = decoder.ops.add_rms_norm(embedded, None, decoder.norm, decoder.spec.rms_eps)
            log_p = torch.log_softmax(_logits(hidden, model.head), -1)
            total = (self._mask(tokens, log_p) + score[:, None]).view(users, -1)
            best, place = total.topk(min(width, total.shape[1]), 1)
            rows = len(tokens) // users
            parent = place // vocabulary + torch.arange(users, device=model.device)[:, None] * rows
            tokens = torch.cat([tokens[parent.flatten()], (place % vocabulary).flatten()[:, None]], 1)
            score = best.flatten()
        return torch.cat([tokens.double(), score.double()[:, None]], 1).view(users, -1, tokens.shape[1] + 1)


def answers(outcome: Outcome | Tensor, workload: Workload) -> RankedSids:
    """Either search's result as ranked SIDs."""
    top_k, sids = workload.top_k, workload.catalog.sids
    codes, scores = [], []
    if isinstance(outcome, Tensor):
        for user in outcome.cpu().numpy():
            live = user[user[:, -1] > float("-inf")][:top_k]
            firsts = [int(ids[0]) for ids in workload.model.table.token_ids]
            codes.append((live[:, :-1].astype("int64") - firsts).astype("int32"))
            scores.append(live[:, -1].astype("float32"))
        return RankedSids(codes, scores)
    leaf, score = (tensor[: workload.users].cpu() for tensor in (outcome.leaf, outcome.score))
    for user in range(workload.users):
        order = score[user].argsort(descending=True, stable=True)[:top_k]
        order = order[score[user][order] > float("-inf")]
        codes.append(sids[leaf[user][order].numpy()])
        scores.append(score[user][order].numpy())
    return RankedSids(codes, scores)

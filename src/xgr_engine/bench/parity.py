"""Answers of a contender against the definition: a figure counts only where the answers are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.bench.baselines.base import RankedSids
from xgr_engine.bench.definition import Leaves, Truth, find_truths
from xgr_engine.bench.workloads import Batch, Workload
from xgr_engine.catalog.trie import ItemTrie

# Counts that make an answer wrong, and how a table calls them.
_FAULTS = {
    "invalid": "invalid",
    "duplicate": "repeated",
    "short": "short",
    "missing": "missing",
    "impossible": "that do not belong",
    "wrong_scores": "wrong scores",
    "out_of_order": "out of order",
    "wrong_top1": "wrong top-1",
}


@dataclass(frozen=True)
class Parity:
    """One contender's answers to one batch beside the definition's.

    Attributes:
        users: how many were compared; sids: entries of the definition's lists together.
        top1: share of users with the same best SID; overlap: mean share of the definition's SIDs that are there. Both
            count what rounding may change as well.
        score_difference: largest difference of a returned SID's score and the definition's for that SID; None where
            no valid SID was returned.
        certain: entries of the definition's lists that rounding cannot lose; missing: those of them that are absent.
        impossible: SIDs that rounding cannot bring into a list; wrong_scores: SIDs whose score is off by more than
            rounding; out_of_order: SIDs behind one that is clearly worse; wrong_top1: users whose best SID is another
            although rounding cannot have changed that.
        invalid: rows that are no SID of the catalog; duplicate: repeated rows; short: users with too few valid rows.
        least_overlap: what ``overlap`` must reach, in half precision.
    """

    users: int
    sids: int
    top1: float
    overlap: float
    score_difference: float | None
    certain: int
    missing: int
    impossible: int
    wrong_scores: int
    out_of_order: int
    wrong_top1: int
    invalid: int
    duplicate: int
    short: int
    least_overlap: float | None = None

    @property
    def marks(self) -> list[str]:
        """What is wrong, in words; empty where nothing is."""
        found = [f"{count} {words}" for name, words in _FAULTS.items() if (count := getattr(self, name))]
        if self.least_overlap is not None and self.overlap < self.least_overlap:
            found.append(f"overlap under {self.least_overlap:.0%}")
        return found

    def to_json(self) -> dict[str, Any]:
        """With the marks."""
        return {**asdict(self), "marks": self.marks}


@dataclass(frozen=True)
class Judged:
    """All contenders of a row; ``facts`` say what the definition allowed for."""

    parity: dict[str, Parity]
    facts: dict[str, Any]


def judge(workload: Workload, batch: Batch, answers: Mapping[str, RankedSids]) -> Judged:
    """Compare the answers to ``batch`` with the definition, which is computed here, once for all of them."""
    trie = workload.catalog.trie
    returned = {
        name: [leaves_of(trie, codes) for codes in answer.codes[: len(batch.prompts)]]
        for name, answer in answers.items()
    }
    asked = [
        np.unique(np.concatenate([np.empty(0, np.int64), *(users[at] for users in returned.values())]))
        for at in range(len(batch.prompts))
    ]
    truths = find_truths(workload, batch.prompts, [leaves[leaves >= 0] for leaves in asked])
    tolerance = truths[0].tolerance
    facts = {
        "users": len(truths),
        "sids": sum(len(truth.leaves) for truth in truths),
        "certain": sum(int(truth.certain.sum()) for truth in truths),
        "score_tolerance": tolerance.score,
        "measured_noise": tolerance.measured,
        "plain_overlap": tolerance.overlap,
        "least_overlap": tolerance.least_overlap,
        "dtype": workload.model.dtype,
    }
    return Judged({name: compare(answer, truths, trie, workload.top_k) for name, answer in answers.items()}, facts)


def compare(answer: RankedSids, truths: Sequence[Truth], trie: ItemTrie, top_k: int) -> Parity:
    """Compare one contender's lists with what they may be. ``top_k`` SIDs must be there for every user."""
    counts = dict.fromkeys(("certain", *_FAULTS), 0)
    same_top, overlaps, differences = 0, [], []
    for truth, codes, scores in zip(truths, answer.codes, answer.scores, strict=False):
        leaves = leaves_of(trie, codes)
        valid = leaves >= 0
        present = np.unique(leaves[valid])
        counts["invalid"] += int((~valid).sum())
        counts["duplicate"] += int(valid.sum()) - len(present)
        counts["short"] += int(len(present) < top_k)
        found, certain = np.isin(truth.leaves, present), truth.certain
        overlaps.append(found.mean())
        counts["certain"] += int(certain.sum())
        counts["missing"] += int((certain & ~found).sum())
        if truth.possible is not None:
            counts["impossible"] += int((~np.isin(present, truth.possible)).sum())
        expected = np.array([truth.known.get(leaf, np.nan) for leaf in leaves[valid].tolist()])
        off = np.abs(scores[valid].astype(np.float64) - expected)
        counts["wrong_scores"] += int((~(off <= truth.tolerance.score)).sum())  # one that is no number is wrong
        differences += off[~np.isnan(off)].tolist()
        worst_before = np.fmin.accumulate(expected)[:-1]
        counts["out_of_order"] += int((expected[1:] - worst_before > truth.tolerance.difference).sum())
        if len(leaves):
            same_top += int(leaves[0] == truth.leaves[0])
            counts["wrong_top1"] += _wrong_top1(truth, int(leaves[0]))
    return Parity(
        users=len(overlaps),
        sids=sum(len(truth.leaves) for truth in truths[: len(overlaps)]),
        top1=same_top / len(overlaps),
        overlap=float(np.mean(overlaps)),
        score_difference=max(differences) if differences else None,
        least_overlap=truths[0].tolerance.least_overlap,
        **counts,
    )


def _wrong_top1(truth: Truth, first: int) -> bool:
    """Whether another SID stands first though the definition's best must be in the list and is clearly ahead of it."""
    if first == truth.leaves[0] or not truth.certain[0]:
        return False
    return not truth.scores[0] - truth.known.get(first, -np.inf) <= truth.tolerance.difference


def leaves_of(trie: ItemTrie, codes: NDArray[np.int32]) -> Leaves:
    """Leaf of each row; -1 where it is none. A code that the contender could not name (-2) is never one."""
    leaves = trie.leaves_of_codes(np.where(codes == -2, np.int32(2**31 - 1), codes))
    return leaves.astype(np.int64)

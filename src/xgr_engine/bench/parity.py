"""Outputs of a contender against the reference: a figure counts only where the results match."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xgr_engine.bench.baselines.base import RankedSids
from xgr_engine.catalog.trie import ItemTrie

# By the dtype the contenders compute in: a SID of the reference that scores this much above its last one must be
# there, and a top SID that leads by this much must be the same.
CLEAR_GAP = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
# Share of such clear SIDs that may be missing before the answers are marked as different: a prefix pruned at the edge
# of the beam takes its SIDs along, however clear these are.
_MISSING_ALLOWED = 0.02


@dataclass(frozen=True)
class Parity:
    """One contender's answers to one batch beside the reference's.

    Attributes:
        top1: share of users with the same best SID; overlap: mean share of the reference's SIDs that are there.
        score_difference: largest difference of a SID's two scores, None without a common SID.
        clear_missing: share of SIDs clearly above the reference's last that are absent.
        invalid: rows that are no SID of the catalog; duplicate: repeated rows; short: users with too few valid rows.
        users: how many were compared.
    """

    top1: float
    overlap: float
    score_difference: float | None
    clear_missing: float
    invalid: int
    duplicate: int
    short: int
    users: int

    @property
    def marks(self) -> list[str]:
        """What is wrong, in words; empty where nothing is."""
        found = [f"{count} {word}" for word in ("invalid", "duplicate", "short") if (count := getattr(self, word))]
        if self.clear_missing > _MISSING_ALLOWED:
            found.append("other items")
        return found


def compare(answer: RankedSids, reference: RankedSids, trie: ItemTrie, top_k: int, dtype: str) -> Parity:
    """Compare the users that both have.

    Args:
        top_k: SIDs that every user must get.
    """
    users = min(len(answer.codes), len(reference.codes))
    invalid = duplicate = short = top1 = clear = clear_missing = 0
    overlaps, differences = [], []
    gap = CLEAR_GAP[dtype]
    for user in range(users):
        leaves = _leaves(trie, answer.codes[user])
        valid = leaves[leaves >= 0]
        invalid += len(leaves) - len(valid)
        duplicate += len(valid) - len(np.unique(valid))
        short += int(len(np.unique(valid)) < top_k)
        expected = _leaves(trie, reference.codes[user])
        theirs = reference.scores[user].astype(np.float64)
        mine = dict(zip(leaves.tolist(), answer.scores[user].tolist(), strict=True))
        present = np.array([leaf in mine for leaf in expected.tolist()], bool)
        overlaps.append(present.mean())
        top1 += int(len(leaves) > 0 and leaves[0] == expected[0])
        above = theirs > theirs[-1] + gap
        clear += int(above.sum())
        clear_missing += int((above & ~present).sum())
        both = [
            abs(mine[leaf] - score)
            for leaf, score in zip(expected.tolist(), theirs.tolist(), strict=True)
            if leaf in mine
        ]
        differences += both
    return Parity(
        top1=top1 / users,
        overlap=float(np.mean(overlaps)),
        score_difference=max(differences) if differences else None,
        clear_missing=clear_missing / clear if clear else 0.0,
        invalid=invalid,
        duplicate=duplicate,
        short=short,
        users=users,
    )


def _leaves(trie: ItemTrie, codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Leaf of each row; -1 where it is none. A code that the contender could not name (-2) is never one."""
    leaves = trie.leaves_of_codes(np.where(codes == -2, np.int32(2**31 - 1), codes))
    return leaves

"""How far rounding may move a contender's scores: constants in float32, a measurement in half precision."""

from __future__ import annotations

from dataclasses import dataclass

# How far a float32 contender's score may lie from the definition's: sums in another order.
_FLOAT32_SCORE = 5e-4
# Half precision: this many times what plain torch in that precision (logits rounded to it, as usual) deviates on the
# same SIDs, in this run, and at least the second number. Plain torch computes each step in float32 and rounds its
# result, where kernels round in between as well: on an H200 the engine deviated 1.55 times as much as plain torch
# (Qwen3-1.7B, 1000 tokens, W 256: 0.198 and 0.127). The rest is for what a sample of some hundred SIDs does not show.
_HALF_FACTOR, _HALF_LEAST = 2.5, 0.05
# Where scores are blurred that much few SIDs are certain. So a list must also have about as many of the definition's
# SIDs as that of plain torch: it may lack this many times what that lacks, and this share more.
_LOSS_FACTOR, _LOSS_MORE = 2.0, 0.1


@dataclass(frozen=True)
class Tolerance:
    """How far rounding may move scores, in nats.

    Attributes:
        score: of one SID or prefix, against the definition's.
        measured: what it comes from: the largest deviation of plain torch in the model's dtype. None in float32.
        overlap: share of the definition's SIDs that plain torch in that dtype finds. None in float32.
    """

    score: float
    measured: float | None = None
    overlap: float | None = None

    @property
    def difference(self) -> float:
        """Of the distance between two scores. Both are blurred, and in opposite directions at worst, so it takes twice
        the tolerance of one before their order is certain."""
        return 2 * self.score

    @property
    def least_overlap(self) -> float | None:
        """Share of the definition's SIDs that every list must have; None in float32, where they are certain."""
        return None if self.overlap is None else 1 - _LOSS_FACTOR * (1 - self.overlap) - _LOSS_MORE

    @classmethod
    def half_precision(cls, measured: float, overlap: float) -> Tolerance:
        """From what plain torch in the model's dtype deviates, and the share of SIDs that it finds."""
        return cls(max(_HALF_LEAST, _HALF_FACTOR * measured), measured, overlap)


NO_ROUNDING = Tolerance(0.0)
FLOAT32 = Tolerance(_FLOAT32_SCORE)

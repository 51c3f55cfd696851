"""How long a batch will take: a cost model fitted, batch by batch, to what was measured.

``seconds = a + b * prompt tokens + c * beam rows``, with a, b, c >= 0. Beam rows are summed over the levels: all users
have the same number of them, so that the attention of rows over prompts grows with the prompt tokens and needs no term
of its own. Residuals are relative to the measured time, and older batches fade, so that the model follows the machine.
"""

from __future__ import annotations

import threading
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FADE = 0.98  # weight of a batch relative to the one after it: about the last fifty count
_ENOUGH = 3  # batches to observe before anything is predicted: one per coefficient
_RIDGE = 1e-6  # relative to the trace of the normal equations: see _solve_non_negative
_KEPT = 10_000  # errors kept for the report


class LatencyModel:
    """Learns from :meth:`observe`, answers :meth:`predict`. Safe to use from several threads.

    Args:
        rows_per_user: beam rows of one user, summed over the levels.
    """

    def __init__(self, rows_per_user: int = 1) -> None:
        self._rows = rows_per_user
        self._lock = threading.Lock()
        self._normal = np.zeros((3, 3))
        self._right = np.zeros(3)
        self._scale = np.ones(3)
        self._weights = np.zeros(3)
        self._errors: list[float] = []
        self.observed = 0

    def predict(self, tokens: NDArray[np.int64], users: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Seconds [n] for batches of ``tokens`` [n] prompt tokens and ``users`` [n]; None until enough was measured."""
        with self._lock:
            if self.observed < _ENOUGH:
                return None
            weights = self._weights
        ones = np.ones(len(tokens))
        seconds: NDArray[np.float64] = np.stack([ones, tokens, users * float(self._rows)], axis=1) @ weights
        return seconds

    def predict_one(self, tokens: int, users: int) -> float | None:
        """:meth:`predict` for one batch."""
        found = self.predict(np.array([tokens]), np.array([users]))
        return None if found is None else float(found[0])

    def observe(self, tokens: int, users: int, seconds: float) -> None:
        """Learn that a batch took ``seconds``, after noting how far off its prediction would have been."""
        predicted = self.predict_one(tokens, users)
        features = np.array([1.0, tokens, users * float(self._rows)])
        seconds = max(seconds, 1e-9)
        with self._lock:
            if predicted is not None and len(self._errors) < _KEPT:
                self._errors.append(predicted / seconds - 1.0)
            self._scale = np.maximum(self._scale, features)
            row = features / seconds
            self._normal = _FADE * self._normal + np.outer(row, row)
            self._right = _FADE * self._right + row
            self.observed += 1
            self._weights = _solve_non_negative(self._normal, self._right, self._scale)

    def report(self) -> dict[str, Any]:
        """For manifests: the coefficients, and how far predictions were off, (predicted - measured) / measured."""
        with self._lock:
            errors = np.array(self._errors)
            fixed, token, row = (float(weight) for weight in self._weights)
        shares = None
        if len(errors):
            middle, high = np.percentile(np.abs(errors), [50, 90])
            shares = {
                "p50_abs": round(float(middle), 4),
                "p90_abs": round(float(high), 4),
                "bias": round(float(errors.mean()), 4),
            }
        return {
            "observed_batches": self.observed,
            "predicted_batches": len(errors),
            "seconds_a_batch": fixed,
            "seconds_a_token": token,
            "seconds_a_row": row,
            "relative_error": shares,
        }


# Which coefficients may be above 0: every non-empty choice of them.
_CHOICES = [list(chosen) for size in (1, 2, 3) for chosen in combinations(range(3), size)]


def _solve_non_negative(
    normal: NDArray[np.float64], right: NDArray[np.float64], scale: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares with weights >= 0, from the normal equations: the best of the solutions that set some to 0.

    The small ridge settles what the data leaves open, such as users and tokens that always grow together.
    """
    matrix, vector = normal / np.outer(scale, scale), right / scale
    matrix = matrix + np.eye(len(vector)) * (_RIDGE * float(np.trace(matrix)))
    best, lowest = np.zeros(len(vector)), 0.0
    for chosen in _CHOICES:
        found = np.linalg.solve(matrix[np.ix_(chosen, chosen)], vector[chosen])
        residual = -float(vector[chosen] @ found)  # at the solution, up to a constant
        if (found >= 0).all() and residual < lowest:
            lowest = residual
            best = np.zeros(len(vector))
            best[chosen] = found
    return best / scale

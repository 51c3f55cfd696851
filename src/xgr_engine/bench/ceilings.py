"""Figures above the machine's measured ceilings: they show that a ceiling is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
# The figure, its unit, and what may have made its ceiling too low.
_FIGURES = (
    ("tflops", "TFLOP/s", "its measurement was disturbed"),
    ("tbs", "TB/s", "its measurement was disturbed, or a row's data stay in caches"),
)


def exceeded(ceilings: Record, rows: Sequence[Record]) -> list[str]:
    """A sentence for each ceiling (TFLOP/s, TB/s) that a contender of these rows lies above."""
    ran = [one for row in rows for one in row["contenders"] if one["status"] == "ok"]
    found = []
    for name, unit, cause in _FIGURES:
        ceiling = ceilings[name]
        above = [one for one in ran if one[name] > ceiling]
        if above:
            who = ", ".join(dict.fromkeys(one["name"] for one in above))
            most = max(one[name] for one in above)
            found.append(
                f"the measured ceiling of {ceiling:.3g} {unit} is none, {who} reached up to {most:.3g}: {cause}; "
                "shares of it mean nothing"
            )
    return found

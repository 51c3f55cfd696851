"""Single values of a foreign ``config.json``, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xgr_engine.errors import CheckpointError


def positive_integer(values: Mapping[str, Any], key: str, path: Path) -> int:
    """A size.

    Raises:
        CheckpointError: missing, not an integer, below 1 or beyond an int32; names ``path`` and ``key``.
    """
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: {key} must be a positive integer, not {value!r}")
    if value >= 1 << 31:
        raise CheckpointError(f"{path}: {key} is {value}, but no model is that large")
    return value


def positive_number(values: Mapping[str, Any], key: str, path: Path) -> float:
    """A factor or an epsilon. KeyError if it is missing.

    Raises:
        CheckpointError: no number, infinite, or not above 0.
    """
    value = values[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"{path}: {key} must be a positive number, not {value!r}")
    return float(value)

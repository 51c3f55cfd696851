"""The benchmark's tests share small workloads (bench_support)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from run_support import Record, small_run

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def record() -> Record:
    """A record as it comes from a run, as JSON."""
    return dict(json.loads(small_run()))

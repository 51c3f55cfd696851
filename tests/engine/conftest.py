"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import TinyWorld


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return TinyWorld(folder)

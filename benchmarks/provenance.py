"""What every record says of itself: when, by which command, of which commit, on which machine, with which versions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from xgr_engine.system import gpus, machine  # noqa: E402


def provenance() -> dict[str, Any]:
    """``date``, ``command`` (paths by their last part), ``commit`` and ``machine`` (versions among its facts)."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(word).name for word in sys.argv],
        "commit": commit(),
        "machine": asdict(machine(gpus(with_torch=False))),
    }


def commit() -> str | None:
    """The commit of these sources, marked if they differ from it; None outside a clone, or without git."""
    try:
        head, changed = (_git(*words) for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "src"]))
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + (" (changed)" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

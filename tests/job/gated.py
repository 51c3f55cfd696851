"""A real ``xgr`` process that writes part files only as far as a test allows.

A test that stops a run in the middle must not race with its end: on a loaded machine the run may be over before the
signal is sent, on a quick one before the first part is seen. So the run waits at a gate::

    gate = Gate(tmp_path / "gate", parts=3)
    process = subprocess.Popen([*gate.command, "recommend", ...])

Nothing else differs from ``python -m xgr_cli.main``: the run has no timers of its own here and is stopped or killed
wherever it is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

_EVERY = 10**9


class Gate:
    """How many part files there may be at most. ``open`` may be called again at any time.

    Args:
        path: of a file that this writes and the run reads.
    """

    def __init__(self, path: Path, parts: int) -> None:
        self._path = path
        self.open(parts)

    @property
    def command(self) -> list[str]:
        """The beginning of the run's command line, in the place of ``xgr``."""
        return [sys.executable, __file__, str(self._path)]

    def open(self, parts: int = _EVERY) -> None:
        """Lets the run write until so many parts are there; all of them by default."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(str(parts))
        fresh.replace(self._path)


def _hold_at(gate: Path) -> None:
    from xgr_engine.job.shard_work import ShardWork

    write = ShardWork.write

    def gated(self: ShardWork, *given: Any) -> None:
        while len(list(self._out.root.glob("part-*"))) >= int(gate.read_text()):
            time.sleep(0.005)
        write(self, *given)

    ShardWork.write = gated  # type: ignore[method-assign]


if __name__ == "__main__":
    _hold_at(Path(sys.argv.pop(1)))
    from xgr_cli.main import main

    main()

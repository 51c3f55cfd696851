"""The tokenizers that the tokens tests use serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tokens"))

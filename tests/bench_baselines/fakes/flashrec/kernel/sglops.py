"""None where sgl-kernel cannot be imported: the package goes on without it."""

from __future__ import annotations

import os

SGL = None if os.environ.get("FAKE_FAULT") == "plain" else object()

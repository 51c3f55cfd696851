"""Whether the compiled search is there."""

from __future__ import annotations

import os


def try_load_beam_trie():
    return os.environ.get("FAKE_FAULT") != "plain"

"""A request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BeamRequest:
    input_ids: list[int]
    beam_width: int
    max_new_tokens: int

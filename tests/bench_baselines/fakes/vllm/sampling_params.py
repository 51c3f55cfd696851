"""What beam search is asked with: a msgspec structure there, whose fields are these."""

from dataclasses import dataclass


@dataclass
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: object = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self):
        if not 1 <= self.beam_width <= 16384:
            raise ValueError(f"beam_width must be at least 1 and at most 16384, got {self.beam_width}.")

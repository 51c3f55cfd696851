"""The fields of the configuration that matter here, under their names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BeamRecConfig:
    model_path: str
    mem_fraction_static: float = 0.8
    quantization: str | None = "fp8"
    kv_cache_dtype: str = "fp8_e4m3"
    compute_dtype: str = "bfloat16"
    cuda_graph_max_bs: int = 800
    max_running_requests: int = 64
    max_seq_len: int = 4096
    sid_token_range: str | list[int] | None = None
    sid_vocab_file: str | None = None
    sid_codebook_sizes: list[int] | None = None
    sid_boundary_tokens: str | None = None
    beam_width: int = 50
    max_tokens: int = 5
    batch_slots: int | None = None
    target_batch_requests: int = 8
    max_batch_requests: int = 16
    enable_radix: bool = True
    enable_warmup: bool = True
    cuda_graph_capture_sizes: list[int] = field(default_factory=lambda: [50, 100])

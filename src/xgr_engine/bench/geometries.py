"""Named model sizes for random weights."""

from __future__ import annotations

from dataclasses import dataclass

from xgr_engine.errors import UsageError
from xgr_engine.models.spec import ModelSpec, RopeSpec


@dataclass(frozen=True)
class Geometry:
    """A decoder's sizes. The vocabulary is ``text_tokens`` followed by the SID tokens, level by level.

    Attributes:
        intermediate: inner width of the feed-forward part; max_context: positions.
        codes, levels: default catalog, codes a level and codes a SID.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    text_tokens: int
    tied: bool = True
    codes: int = 8192
    levels: int = 3
    max_context: int = 40_960
    note: str = ""

    def spec(self, codes: int, levels: int, dtype: str) -> ModelSpec:
        """The model for a catalog of ``levels`` levels of ``codes`` codes."""
        return ModelSpec(
            family="qwen3",
            vocab_size=self.text_tokens + codes * levels,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            rms_eps=1e-6,
            rope=RopeSpec(theta=1e6),
            max_context=self.max_context,
            tied=self.tied,
            qk_norm=True,
            dtype=dtype,
        )


_OURS = "decoder shape of ours, size as in the paper"
GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        Geometry("quick", 4, 128, 4, 2, 32, 384, 512, codes=256, max_context=4096, note="small, for a laptop's CPU"),
        Geometry("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936),
        Geometry("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151_936),
        Geometry("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151_936),
        Geometry("onerec-0.1b", 12, 768, 12, 12, 64, 3072, 64, note=_OURS),
        Geometry("onerec-1b", 20, 2048, 16, 16, 128, 5632, 64, note=_OURS),
        Geometry("onerec-3b", 32, 2560, 20, 20, 128, 8192, 64, note=_OURS),
    )
}


def find_geometry(name: str) -> Geometry:
    """The geometry of that name.

    Raises:
        UsageError: unknown, or one this version cannot run.
    """
    if name == "t5-tiger":
        raise UsageError(
            "--geometry t5-tiger: not available", why="this version has no encoder-decoder models", hint="use quick"
        )
    if name not in GEOMETRIES:
        raise UsageError(f"--geometry {name}: must be one of {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]

"""Named model sizes for random weights."""

from __future__ import annotations

from dataclasses import dataclass

from xgr_engine.errors import UsageError
from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec, ModelSpec, RopeSpec


@dataclass(frozen=True)
class Geometry:
    """A model's sizes. The vocabulary is ``text_tokens`` followed by the SID tokens, level by level.

    Attributes:
        layers: of the decoder; encoder_layers: of a T5's encoder, 0 for a decoder-only model.
        intermediate: inner width of the feed-forward part; max_context: positions.
        codes, levels: of the default catalog: codes per level, and codes per SID.
        context: prompt tokens if neither an option nor a preset says otherwise; None: what suits the machine.
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
    encoder_layers: int = 0
    context: int | None = None

    def spec(self, codes: int, levels: int, dtype: str) -> AnySpec:
        """The model for a catalog of ``levels`` levels of ``codes`` codes."""
        vocab_size = self.text_tokens + codes * levels
        return self._t5(vocab_size, dtype) if self.encoder_layers else self._qwen3(vocab_size, dtype)

    def _qwen3(self, vocab_size: int, dtype: str) -> ModelSpec:
        return ModelSpec(
            family="qwen3",
            vocab_size=vocab_size,
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

    def _t5(self, vocab_size: int, dtype: str) -> EncoderDecoderSpec:
        return EncoderDecoderSpec(
            family="t5",
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_encoder_layers=self.encoder_layers,
            num_heads=self.heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            rms_eps=1e-6,
            num_buckets=32,
            max_distance=128,
            gated=False,
            start_token=0,
            max_context=self.max_context,
            tied=self.tied,
            scaled_output=self.tied,
            dtype=dtype,
        )


_TIGER = Geometry(
    name="t5-tiger",
    layers=4,
    encoder_layers=4,
    hidden=128,
    heads=6,
    kv_heads=6,
    head_dim=64,
    intermediate=1024,
    text_tokens=2,
    codes=256,
    levels=4,
    max_context=4096,
    context=80,  # histories of 20 items
)
GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        # small, for the CPU of a laptop
        Geometry("quick", 4, 128, 4, 2, 32, 384, 512, codes=256, max_context=4096),
        Geometry("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936),
        Geometry("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151_936),
        Geometry("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151_936),
        # sizes as in the paper; the shape of the decoders is our choice
        Geometry("onerec-0.1b", 12, 768, 12, 12, 64, 3072, 64),
        Geometry("onerec-1b", 20, 2048, 16, 16, 128, 5632, 64),
        Geometry("onerec-3b", 32, 2560, 20, 20, 128, 8192, 64),
        _TIGER,
    )
}


def find_geometry(name: str) -> Geometry:
    """The geometry of that name.

    Raises:
        UsageError: unknown.
    """
    if name not in GEOMETRIES:
        raise UsageError(f"--geometry {name}: must be one of {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]

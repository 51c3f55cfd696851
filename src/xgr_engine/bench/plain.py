"""A model in plain torch, in float32 or in its own dtype, over the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.models.encoder_decoder import EncoderDecoder
from xgr_engine.models.loading import AnyModel
from xgr_engine.models.ops import reference_ops

Part = TypeVar("Part")


def float32_model(model: AnyModel) -> AnyModel:
    """The model in float32. The embedding is a copy; a layer is copied while it computes."""
    if isinstance(model, EncoderDecoder):
        encoder, decoder = _float32(model.encoder), _float32(model.decoder)
        return EncoderDecoder(model.spec, model.embed.float(), encoder, decoder, reference_ops())
    embed, norm, layers = model.embed.float(), model.norm.float(), _float32(model.layers)
    return DecoderOnly(model.spec, embed, norm, layers, reference_ops())


def same_dtype_model(model: AnyModel) -> AnyModel:
    """The model in its own dtype, without the engine's kernels."""
    if isinstance(model, EncoderDecoder):
        return EncoderDecoder(model.spec, model.embed, model.encoder, model.decoder, reference_ops())
    return DecoderOnly(model.spec, model.embed, model.norm, model.layers, reference_ops())


class _Float32Layers(list[Part]):
    """Layers in float32, made one at a time: a whole model at four bytes a weight need not fit beside itself."""

    def __iter__(self) -> Iterator[Part]:
        return map(_float32, super().__iter__())


def _float32(part: Part) -> Part:
    """A tensor, or a dataclass or list of such parts, in float32."""
    converted: Any = part
    if isinstance(part, Tensor):
        converted = part.float()
    elif isinstance(part, list):
        converted = _Float32Layers(part)
    elif is_dataclass(part) and not isinstance(part, type):
        converted = replace(part, **{field.name: _float32(getattr(part, field.name)) for field in fields(part)})
    return converted  # type: ignore[no-any-return]

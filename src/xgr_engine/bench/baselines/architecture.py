"""For contenders that compute one kind of model: is the workload's of that kind?"""

from __future__ import annotations

from xgr_engine.bench.baselines.base import NotAvailableError
from xgr_engine.bench.workloads import BenchModel, Workload
from xgr_engine.models.decoder_only import DecoderOnly


def decoder_only(model: BenchModel) -> DecoderOnly:
    """The model, for a contender that computes no other kind.

    Raises:
        NotAvailableError: it is an encoder-decoder.
    """
    if isinstance(model.decoder, DecoderOnly):
        return model.decoder
    raise NotAvailableError(_reason(model))


def other_architecture(workload: Workload) -> str | None:
    """Why such a contender cannot run the workload, for its ``available``; None where it can."""
    return None if isinstance(workload.model.decoder, DecoderOnly) else _reason(workload.model)


def _reason(model: BenchModel) -> str:
    return f"not available: this computes decoder-only models, and {model.name} is an encoder-decoder"

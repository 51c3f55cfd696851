"""Engines of others. They are listed with what they are; where an adapter is missing the report says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xgr_engine.bench.baselines.base import REGISTRY, NotAvailableError, RankedSids
from xgr_engine.bench.workloads import Batch, Workload
from xgr_engine.system import version


class _External:
    """A package that is not part of xgr. Never simulated: without an adapter it does not run."""

    name = ""
    what = ""
    package = ""

    def available(self, workload: Workload) -> str | None:
        """Why it does not run."""
        if version(self.package) is None:
            return f"{self.package} is not installed: {REGISTRY[self.name].how_to_get}"
        if workload.model.device.type != "cuda":
            return f"{self.package} needs a CUDA device"
        return f"{self.package} {version(self.package)} is installed, but no adapter for it is written yet"

    def prepare(self, workload: Workload) -> None:
        """Raises NotAvailableError always."""
        raise NotAvailableError(self.available(workload) or self.name)

    def run(self, batch: Batch) -> RankedSids:
        """Raises NotAvailableError always."""
        raise NotAvailableError(f"{self.name} was not prepared")

    def run_many(self, batches: Sequence[Batch]) -> Iterator[RankedSids]:
        """Raises NotAvailableError always."""
        raise NotAvailableError(f"{self.name} was not prepared")

    def release(self) -> None:
        """Nothing to give back."""


class Cascade(_External):
    """FlashInfer's cascade attention: prompt shared, generated tokens paged, two kernels and a merge."""

    name = "cascade"
    what = "FlashInfer cascade attention: shared prompt, paged suffix, merge"
    package = "flashinfer-python"


class FlashRec(_External):
    """FlashRec, a serving engine for generative recommenders."""

    name = "flashrec"
    what = "FlashRec: each beam reads the prompt, trie after the best 2 W tokens"
    package = "flashrec"


class Vllm(_External):
    """vLLM's beam search."""

    name = "vllm"
    what = "vLLM beam search: Python objects a beam, submitted again each step"
    package = "vllm"

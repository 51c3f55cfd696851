"""Engines of others. They are listed with what they are; no adapter is written yet, and the report says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xgr_engine.bench.baselines.base import NotAvailableError, RankedSids
from xgr_engine.bench.workloads import Batch, Workload


class _External:
    """A package that is not part of xgr. Never simulated: without an adapter it does not run."""

    name = ""
    what = ""
    package = ""

    def available(self, workload: Workload) -> str:
        """Why it does not run."""
        return f"no adapter for {self.package} is written yet, so installing it changes nothing"

    def prepare(self, workload: Workload) -> None:
        """Raises NotAvailableError always."""
        raise NotAvailableError(self.available(workload))

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

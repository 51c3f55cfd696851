"""What a contender is, and the table of all of them.

A contender gets a workload, prepares itself, and turns batches of prompts into ranked lists of SIDs. It is timed from
prompts on the host to lists on the host, so ``run`` must not return before its answer is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from xgr_engine.errors import UsageError, XgrError
from xgr_engine.models.decoder_only import DecoderOnly

if TYPE_CHECKING:
    from xgr_engine.bench.workloads import Batch, BenchModel, Workload


class NotAvailableError(XgrError):
    """A contender cannot run this workload here; ``what`` is the reason, ``hint`` how to get it."""


@dataclass(frozen=True, eq=False)
class RankedSids:
    """The answer to a batch of U users, best first.

    Attributes:
        codes: per user int32 [n, L]: codes as the catalog numbers them, padded with -1 at the end. A row that is no
            SID of the catalog is reported as it is (codes that the contender cannot name are -2), never dropped.
        scores: per user float32 [n] summed log-probabilities.
    """

    codes: Sequence[NDArray[np.int32]]
    scores: Sequence[NDArray[np.float32]]

    def __post_init__(self) -> None:
        if [len(codes) for codes in self.codes] != [len(scores) for scores in self.scores]:
            raise ValueError("a user has more or fewer SIDs than scores")


class Contender(Protocol):
    """One way to compute a workload. Instances are made by the registry, without arguments.

    One whose engine runs in another process may have ``own_seconds`` (of the last batch, by that process's clock) and
    ``own_peak`` (a :class:`~xgr_engine.bench.memory.Peak` of that process, weights included); these count then. One
    that :meth:`prepare` has run already may say so (``ran_while_prepared``), and is not warmed up by a long batch.

    Attributes:
        name: as ``--baselines`` spells it.
        what: one sentence: what runs, and at which settings.
    """

    name: str
    what: str

    def available(self, workload: Workload) -> str | None:
        """None, or why this workload cannot run here (a package, the device, a shape) and how to get what is missing.

        Called before :meth:`prepare`; cheap; loads no weights.
        """
        ...

    def prepare(self, workload: Workload) -> None:
        """Build everything that outlives a batch: buffers for batches of up to ``workload.users`` prompts of up to
        ``workload.context`` tokens, graphs, wrapped weights (``workload.model``'s tensors are shared, not copied).

        Raises:
            NotAvailableError: it cannot run after all.
            torch.OutOfMemoryError: stands in the report as such.
        """
        ...

    def run(self, batch: Batch) -> RankedSids:
        """Compute one batch of at most ``workload.users`` prompts: ``min(K, reachable)`` SIDs each.

        Returns when the answer is on the host.
        """
        ...

    def run_many(self, batches: Sequence[Batch]) -> Iterator[RankedSids]:
        """Answers in order, for sustained throughput: one batch may be prepared while another computes.

        A contender without overlap yields :meth:`run` of each.
        """
        ...

    def release(self) -> None:
        """Give back everything :meth:`prepare` made; the workload itself stays. May be prepared again."""
        ...


class OneAtATime:
    """``run_many`` of a contender that overlaps nothing.

    Attributes:
        deadline: of ``time.monotonic``; one that takes minutes to start gives up then, with NotAvailableError.
    """

    deadline: float = float("inf")

    def run(self, batch: Batch) -> RankedSids:
        """Of the contender."""
        raise NotImplementedError

    def run_many(self, batches: Sequence[Batch]) -> Iterator[RankedSids]:
        """:meth:`run`, one after the other."""
        for batch in batches:
            yield self.run(batch)


@dataclass(frozen=True)
class Entry:
    """Where a contender lives: ``<module>.<factory>()`` makes it.

    Attributes:
        how_to_get: what the user does when it is not available.
    """

    module: str
    factory: str
    how_to_get: str = ""


_HERE = "xgr_engine.bench.baselines"
# The last part of the table holds engine variants that only the ablations run.
REGISTRY: dict[str, Entry] = {
    "xgr": Entry(f"{_HERE}.engine", "Xgr"),
    "hf": Entry(f"{_HERE}.hf", "HuggingFace", "pip install transformers"),
    "hf-fast": Entry(f"{_HERE}.hf", "HuggingFaceFast", "pip install transformers"),
    "paged": Entry(f"{_HERE}.paged", "Paged"),
    "paper": Entry(f"{_HERE}.paper", "Paper"),
    "cascade": Entry(f"{_HERE}.cascade", "Cascade", "pip install flashinfer-python"),
    "flashrec": Entry(f"{_HERE}.external", "FlashRec", "pip install flashrec"),
    "vllm": Entry(f"{_HERE}.external", "Vllm", "pip install vllm"),
    "xgr-eager": Entry(f"{_HERE}.variants", "Eager"),
    "xgr-full-rows": Entry(f"{_HERE}.variants", "FullRows"),
    "xgr-full-sort": Entry(f"{_HERE}.variants", "FullSort"),
    "xgr-no-shared-prefix": Entry(f"{_HERE}.variants", "NoSharedPrefix"),
    "xgr-no-overlap": Entry(f"{_HERE}.variants", "NoOverlap"),
    "xgr-two-streams": Entry(f"{_HERE}.variants", "TwoStreams"),
    "paper-masks": Entry(f"{_HERE}.paper", "PaperMasks"),
    "all-off": Entry(f"{_HERE}.paged", "AllOff"),
}
BASELINES = ("hf", "hf-fast", "paged", "paper", "cascade", "flashrec", "vllm")


def make_contender(name: str, deadline: float = float("inf")) -> Contender:
    """The contender of that name, and its deadline where it has one (:class:`OneAtATime`).

    Raises:
        UsageError: no such name.
        NotAvailableError: its module cannot be loaded, with the reason.
    """
    if name not in REGISTRY:
        raise UsageError(f"--baselines {name}: must be one of {', '.join(BASELINES)}")
    entry = REGISTRY[name]
    try:
        factory = getattr(importlib.import_module(entry.module), entry.factory)
    except (ImportError, AttributeError) as error:
        raise NotAvailableError(f"{name} cannot be loaded: {error}", hint=entry.how_to_get) from error
    contender: Contender = factory()
    if isinstance(contender, OneAtATime):
        contender.deadline = deadline
    return contender


def decoder_only(model: BenchModel) -> DecoderOnly:
    """The model, for a contender that computes no other kind.

    Raises:
        NotAvailableError: it is an encoder-decoder.
    """
    if isinstance(model.decoder, DecoderOnly):
        return model.decoder
    raise NotAvailableError(_wrong_architecture(model))


def other_architecture(workload: Workload) -> str | None:
    """Why such a contender cannot run the workload, for its ``available``; None where it can."""
    return None if isinstance(workload.model.decoder, DecoderOnly) else _wrong_architecture(workload.model)


def _wrong_architecture(model: BenchModel) -> str:
    return f"not available: this computes decoder-only models, and {model.name} is an encoder-decoder"

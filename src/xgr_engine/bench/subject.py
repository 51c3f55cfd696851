"""What all rows of a model share, and the workloads that the options make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.options import BenchOptions
from xgr_engine.bench.prompts import prompts_of
from xgr_engine.bench.workloads import (
    BenchCatalog,
    BenchModel,
    Prompt,
    Workload,
    catalog_of,
    converted_model,
    random_weights,
    synthetic_catalog,
)
from xgr_engine.errors import UsageError
from xgr_engine.options import SearchOptions


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and its catalog; without prompts they are synthetic."""

    options: BenchOptions
    model: BenchModel
    catalog: BenchCatalog
    prompts: tuple[Prompt, ...] = ()

    def contents(self) -> dict[str, str | None] | None:
        """What tells a converted model and its vocabulary from others; None for random weights."""
        if self.model.fingerprint is None:
            return None
        return {"model_fingerprint": self.model.fingerprint, "catalog_hash": self.catalog.content_hash}

    def with_prompts(self) -> Subject:
        """With the real prompts that the options ask for, if any."""
        options = self.options
        if not options.inputs:
            return self
        longest = self._room() if options.whole_prompts else max(options.contexts)
        return replace(self, prompts=prompts_of(options, longest))

    def rows(self) -> Iterator[Workload]:
        """Every context with every batch size and every width."""
        for context in self.options.contexts[:1] if self.prompts else self.options.contexts:
            for users in self.options.users:
                for beam in self.options.beams:
                    yield self.workload(context, users, beam)

    def chosen_row(self) -> Workload:
        """The row that ablations and the timeline look at: shortest context, largest batch, widest beam."""
        return self.workload(self.options.contexts[0], self.options.users[-1], self.options.beams[-1])

    def attention_shapes(self) -> Iterator[Workload]:
        """The longest context and the largest batch with every width."""
        context = max((len(prompt) for prompt in self.prompts), default=self.options.contexts[-1])
        for beam in self.options.beams:
            yield replace(self, prompts=()).workload(context, self.options.users[-1], beam)

    def online_shape(self, beam: int) -> Workload:
        """The middle context, one user at a time."""
        return self.workload(self.options.contexts[len(self.options.contexts) // 2], 1, beam)

    def workload(self, context: int, users: int, beam: int) -> Workload:
        """Prompts of ``context`` tokens, or as long as the longest real one.

        Raises:
            UsageError: the model reads no such prompt.
        """
        options = self.options
        top_k = min(options.top_k or beam, beam)
        search = SearchOptions(beam=beam, top_k=top_k, score_over=options.score_over, collisions="first")
        if self.prompts:
            context = max(len(prompt) for prompt in self.prompts)
        if context > (room := self._room()):
            raise UsageError(f"--context {context}: {self.model.name} reads at most {room} prompt tokens")
        return Workload(
            self.model, self.catalog, search, context, users, options.shared_prefix, self.prompts, options.seed
        )

    def _room(self) -> int:
        """Most prompt tokens that the model reads before a semantic ID."""
        return self.model.spec.max_context - self.catalog.trie.levels - len(self.model.score_suffix)


def load_subject(options: BenchOptions, geometry_name: str, device: torch.device) -> Subject:
    """The converted model and its vocabulary where the options name them, else a geometry with random weights."""
    if options.model is not None and options.vocab is not None:
        return Subject(options, converted_model(Path(options.model), device), catalog_of(Path(options.vocab)))
    geometry = find_geometry(geometry_name)
    codes, levels = options.codes or geometry.codes, options.levels or geometry.levels
    catalog = synthetic_catalog(options.items, codes, levels, options.seed)
    return Subject(options, random_weights(geometry, codes, levels, device, options.dtype, options.seed), catalog)

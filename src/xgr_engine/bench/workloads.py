"""Workloads: a model on its device, a catalog, prompts, and the search that every contender has to do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.bench.geometries import Geometry
from xgr_engine.catalog.distinct import distinct
from xgr_engine.catalog.trie import ItemTrie, build_trie
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.errors import UsageError
from xgr_engine.models.loading import AnyModel, build_model, compute_dtype, load_model
from xgr_engine.models.ops import choose_ops
from xgr_engine.models.spec import AnySpec
from xgr_engine.options import SearchOptions
from xgr_engine.tokens.table import SidTokenTable

Prompt = NDArray[np.int32]
_WEIGHT_DEVIATION = 0.02


@dataclass(frozen=True, eq=False)
class BenchModel:
    """A model on its device, shared by all contenders of a run.

    Attributes:
        decoder: the model without its head (of a T5 with its encoder), layers as the engine stores them: what it
            stacks it stacks by rows, so slices are views.
        head: [V, H], the embedding itself where tied.
        table: SID tokens; score_suffix: tokens scored after every SID (empty for random weights).
        fingerprint: of the model directory; None for random weights.
    """

    name: str
    decoder: AnyModel
    head: Tensor
    table: SidTokenTable
    score_suffix: tuple[int, ...] = ()
    fingerprint: str | None = None

    @property
    def spec(self) -> AnySpec:
        return self.decoder.spec

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> str:
        return str(self.decoder.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        """Of all weights; a tied head counts once."""
        return sum(map(math.prod, self.spec.tensor_shapes().values())) * self.decoder.dtype.itemsize


@dataclass(frozen=True, eq=False)
class BenchCatalog:
    """A catalog. ``sids`` int32 [leaves, L] padded with -1, in the order of the trie's leaves; ``content_hash`` of the
    vocabulary, None where it is synthetic."""

    name: str
    trie: ItemTrie
    sids: NDArray[np.int32]
    content_hash: str | None = None

    @property
    def uniform(self) -> bool:
        """Whether all SIDs have the same number of codes."""
        return bool((self.trie.leaf_depth == self.trie.levels).all())


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts that are computed together. Nobody has anything excluded."""

    prompts: tuple[Prompt, ...]

    @property
    def tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, eq=False)
class Workload:
    """One row of a benchmark.

    Attributes:
        search: W, K and the score mode.
        context: longest prompt; users: largest batch.
        shared_prefix: tokens that all prompts begin with.
        prompts: real prompts to draw from; empty: synthetic ones of exactly ``context`` tokens.
        seed: of the synthetic prompts.
    """

    model: BenchModel
    catalog: BenchCatalog
    search: SearchOptions
    context: int
    users: int
    shared_prefix: int = 0
    prompts: tuple[Prompt, ...] = field(default=(), repr=False)
    seed: int = 0

    def batch(self, number: int, users: int | None = None) -> Batch:
        """Batch ``number`` (0, 1, ...) of ``users`` prompts; the same number gives the same prompts."""
        users = users or self.users
        if self.prompts:
            at = (np.arange(users) + number * users) % len(self.prompts)
            return Batch(tuple(self.prompts[place] for place in at))
        generator = np.random.default_rng([self.seed, number])
        vocabulary = self.model.spec.vocab_size
        tokens = generator.integers(0, vocabulary, (users, self.context), dtype=np.int32)
        shared = np.random.default_rng(self.seed).integers(0, vocabulary, self.shared_prefix, dtype=np.int32)
        tokens[:, : self.shared_prefix] = shared
        return Batch(tuple(tokens))

    @property
    def top_k(self) -> int:
        """SIDs a contender has to return a user: ``min(K, SIDs of the catalog)``."""
        return min(self.search.top_k, self.catalog.trie.num_leaves)


def synthetic_catalog(items: int, codes: int, levels: int, seed: int = 0) -> BenchCatalog:
    """About ``items`` random SIDs of ``levels`` codes below ``codes``, each once; no text, ids are row numbers.

    Raises:
        UsageError: there are fewer SIDs than items.
    """
    if items < 1 or codes < 1 or levels < 1:
        raise UsageError(f"--items {items} --codes {codes}x{levels}: all must be at least 1")
    if codes**levels < items:
        raise UsageError(f"--items {items}: {codes}x{levels} codes allow only {codes**levels:,} SIDs")
    generator = np.random.default_rng(seed)
    numbers = np.empty(0, np.int64)
    while len(numbers) < items:  # duplicates are few unless the code space is nearly full
        missing = items - len(numbers)
        if codes**levels < 4 * items:
            numbers = generator.permutation(codes**levels)[:items]
        else:
            more = generator.integers(0, codes**levels, missing + missing // 16 + 16)
            numbers = distinct(np.concatenate([numbers, more]))
    if len(numbers) > items:
        numbers = generator.choice(numbers, items, replace=False)
    sids = np.empty((items, levels), np.int32)
    for level in reversed(range(levels)):
        numbers, sids[:, level] = np.divmod(numbers, codes)
    trie, order = build_trie(sids)
    return BenchCatalog(f"{items:,} items, {codes}x{levels} codes, random", trie, sids[order])


def random_weights(
    geometry: Geometry, codes: int, levels: int, device: torch.device, dtype: str = "bfloat16", seed: int = 0
) -> BenchModel:
    """A model of a named geometry with random weights and a token for every code."""
    spec = geometry.spec(codes, levels, dtype)
    decoder, head = random_model(spec, device, seed)
    table = SidTokenTable.from_levels(
        [np.arange(codes, dtype=np.int32)] * levels,
        [np.arange(codes, dtype=np.int32) + geometry.text_tokens + level * codes for level in range(levels)],
    )
    return BenchModel(geometry.name, decoder, head, table)


def converted_model(path: Path, device: torch.device) -> BenchModel:
    """The model of a directory that ``xgr convert`` wrote."""
    directory = load_model_dir(path)
    decoder, head = load_model(directory.spec, directory.weights_path, device)
    suffix = directory.contract.suffix_ids
    return BenchModel(str(path), decoder, head, directory.table, suffix, directory.fingerprint)


def catalog_of(path: Path) -> BenchCatalog:
    """The catalog of a directory that ``xgr build-vocab`` wrote."""
    vocabulary = load_vocabulary(path)
    name, trie = f"{path}: {vocabulary.num_items:,} items", vocabulary.trie
    return BenchCatalog(name, trie, trie.leaf_codes(), vocabulary.content_hash)


def random_model(spec: AnySpec, device: torch.device, seed: int) -> tuple[AnyModel, Tensor]:
    """A model with weights N(0, 0.02), norms of one, and its output projection [V, H].

    The same seed gives the same weights on the same kind of device.
    """
    shapes, dtype = spec.tensor_shapes(), compute_dtype(spec.dtype, device)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*names: str) -> Tensor:
        rows = sum(shapes[name][0] for name in names)
        tensor = torch.empty((rows, *shapes[names[0]][1:]), dtype=dtype, device=device)
        if names[0].endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, _WEIGHT_DEVIATION, generator=generator)

    return build_model(spec, draw, choose_ops(device))

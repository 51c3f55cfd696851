"""``transformers.generate`` with beam search over the trie: the script that most teams run today, at its best.

``hf`` constrains with the trie callback (``prefix_allowed_tokens_fn``), ``hf-fast`` with one vectorised logits
processor over the trie's arrays. Both share the workload's weights, use SDPA attention, and run the sub-batch size
that turned out fastest among those that fit in memory.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.bench.baselines.base import NotAvailableError, OneAtATime, RankedSids
from xgr_engine.bench.baselines.hf_weights import transformers_model
from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.workloads import Batch, BenchCatalog, Workload
from xgr_engine.system import version
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xschedule.engines import is_out_of_memory

# transformers marks beams that do not exist with -1e9; forbidden continuations have -inf.
_NO_BEAM = -1e8
_LONG_S = 3.0


class HuggingFace(OneAtATime):
    """``generate`` with the trie callback."""

    name = "hf"
    what = "transformers.generate, trie callback, SDPA, the fastest of its batch sizes"
    ran_while_prepared = True  # to find the batch size

    def __init__(self) -> None:
        self._model: Any = None
        self._workload: Workload | None = None
        self._sub_batch = 1
        self.notes: list[str] = []

    def available(self, workload: Workload) -> str | None:
        """transformers is installed, and beam search without an end token can express the catalog."""
        if version("transformers") is None:
            return "transformers is not installed: pip install transformers"
        if workload.search.score_over != "vocab":
            return "generate scores over the whole vocabulary only: use --score-over vocab"
        if not workload.catalog.uniform:
            return "the catalog has SIDs of several lengths, but generate runs with a fixed number of tokens"
        return None

    def prepare(self, workload: Workload) -> None:
        """Wrap the weights and find the best sub-batch."""
        self._workload = workload
        self._model = transformers_model(workload.model)
        self._constraint = self._make_constraint(workload)
        self._sub_batch = self._best_sub_batch(workload)
        self.notes = [f"{self._sub_batch} prompt{'s' if self._sub_batch > 1 else ''} per call"]
        if self._model.config._attn_implementation != "sdpa":
            self.notes.append("no SDPA: this version of transformers has none for T5")

    def _make_constraint(self, workload: Workload) -> dict[str, Any]:
        return {"prefix_allowed_tokens_fn": TrieCallback(workload)}

    def _best_sub_batch(self, workload: Workload) -> int:
        """Of 1, all, and a middle: the one with the best rate, among those that fit. One run each, after one of 1.

        A size that took long is the last one tried: beyond it, sharing a call saves nothing that could be seen.
        """
        sizes = sorted({1, max(1, workload.users // 2), workload.users})
        best, best_rate = 1, 0.0
        start = time.perf_counter()
        self._generate(workload.batch(0, 1).prompts)
        if time.perf_counter() - start > 2 * _LONG_S:
            return best
        for size in sizes:
            start = time.perf_counter()
            try:
                self._generate(workload.batch(0, size).prompts)
            except Exception as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                free_memory(workload.model.device)
                break
            seconds = time.perf_counter() - start
            if size / seconds > best_rate:
                best, best_rate = size, size / seconds
            if seconds > _LONG_S or time.monotonic() > self.deadline:
                break
        return best

    def run(self, batch: Batch) -> RankedSids:
        """The prompts in sub-batches. Scores are NaN: with ``output_scores`` generate would keep every step's."""
        return self._run(batch, scored=False)

    def run_scored(self, batch: Batch) -> RankedSids:
        """The same with scores, one prompt a call since it needs more memory. For comparing answers, not for timing."""
        return self._run(batch, scored=True)

    def _run(self, batch: Batch, *, scored: bool) -> RankedSids:
        codes: list[NDArray[np.int32]] = []
        scores: list[NDArray[np.float32]] = []
        size = 1 if scored else self._sub_batch
        for at in range(0, len(batch.prompts), size):
            found = self._generate(batch.prompts[at : at + size], scored)
            codes += found.codes
            scores += found.scores
        return RankedSids(codes, scores)

    def release(self) -> None:
        """Drop the wrapped model; the weights belong to the workload."""
        self._model = None
        self._workload = None
        self._constraint = {}

    @torch.inference_mode()
    def _generate(self, prompts: tuple[NDArray[np.int32], ...], scored: bool = False) -> RankedSids:
        if self._workload is None:
            raise NotAvailableError(f"{self.name} was not prepared")
        workload, device = self._workload, self._workload.model.device
        longest = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):  # padding goes in front
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        # what stands before the codes: a prompt, or what an encoder-decoder's decoder starts with
        before = 1 if self._model.config.is_encoder_decoder else longest
        for part in self._constraint.values():
            _start(part, before)
        steps = workload.catalog.trie.levels + len(workload.model.score_suffix)
        beams = {"num_beams": workload.search.beam, "length_penalty": 0.0, "early_stopping": True}
        found = self._model.generate(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            num_return_sequences=workload.search.top_k,
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=scored,
            **(beams if workload.search.beam > 1 else {"output_logits": scored}),
            **self._constraint,
        )
        levels = workload.catalog.trie.levels
        tokens = found.sequences[:, before : before + levels].cpu().numpy()
        scores = np.full(len(tokens), np.nan, np.float32)
        if scored:
            scores = self._scores(found)
        return _ranked(tokens, scores, len(prompts), workload)

    def _scores(self, found: Any) -> NDArray[np.float32]:
        """Scores [rows] of the sequences. With one beam generate searches greedily, and leaves them to be summed up."""
        if "sequences_scores" in found:
            scores = found.sequences_scores
        else:
            scores = self._model.compute_transition_scores(found.sequences, found.logits, normalize_logits=True).sum(1)
        return np.asarray(scores.float().cpu(), np.float32)


class HuggingFaceFast(HuggingFace):
    """``generate`` with a vectorised constraint."""

    name = "hf-fast"
    what = "transformers.generate, one vectorised CSR logits processor, SDPA, the fastest of its batch sizes"

    def _make_constraint(self, workload: Workload) -> dict[str, Any]:
        return {"logits_processor": [CsrConstraint(workload)]}


class TrieCallback:
    """``prefix_allowed_tokens_fn``: walks the trie for one beam, as evaluation scripts do."""

    def __init__(self, workload: Workload) -> None:
        self._children = node_children(workload)
        self._suffix = workload.model.score_suffix
        self.before = 0  # tokens of a row in front of the codes

    def __call__(self, batch_id: int, sequence: Tensor) -> list[int]:
        """Tokens that may follow. A beam that left the trie (there were too few candidates) may only pad."""
        path = tuple(sequence[self.before :].tolist())
        levels = len(self._children)
        if len(path) >= levels:
            return [self._suffix[len(path) - levels]]
        return self._children[len(path)].get(path, [0])


class CsrConstraint:
    """A logits processor that masks all beams of a step at once from the trie's arrays on the device."""

    def __init__(self, workload: Workload) -> None:
        trie, device = workload.catalog.trie, workload.model.device
        self._suffix = workload.model.score_suffix
        self._vocabulary = workload.model.spec.vocab_size
        bound = workload.model.table.bind(trie)
        self._start: list[Tensor] = []
        self._token: list[Tensor] = []
        self._key: list[tuple[Tensor, Tensor]] = []
        self._widest: list[int] = []
        for depth in range(trie.levels):
            start = torch.from_numpy(trie.child_start[depth].astype(np.int64))
            token = torch.from_numpy(workload.model.table.token_ids[depth][bound[depth]].astype(np.int64))
            parent = torch.repeat_interleave(torch.arange(len(start) - 1), start.diff())
            # children are ascending by code; where token ids are too, (parent, token) is sorted
            key, order = (parent * self._vocabulary + token).sort()
            self._start.append(start.to(device))
            self._token.append(token.to(device))
            self._key.append((key.to(device), order.to(device)))
            self._widest.append(int(start.diff().max()))
        self.before = 0  # tokens of a row in front of the codes

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, V] with everything but the children of each row's node at -inf."""
        path = input_ids[:, self.before :]
        masked = torch.full_like(scores, -torch.inf)
        depth = path.shape[1]
        if depth >= len(self._start):
            wanted_token = self._suffix[depth - len(self._start)]
            masked[:, wanted_token] = scores[:, wanted_token]
            return masked
        node = torch.zeros(len(path), dtype=torch.int64, device=scores.device)
        alive = torch.ones_like(node, dtype=torch.bool)
        for level in range(depth):
            key, order = self._key[level]
            wanted = node * self._vocabulary + path[:, level]
            at = torch.searchsorted(key, wanted).clamp_max_(len(key) - 1)
            alive &= key[at] == wanted
            node = torch.where(alive, order[at], 0)
        first, last = self._start[depth][node], self._start[depth][node + 1]
        place = first[:, None] + torch.arange(self._widest[depth], device=scores.device)
        inside = (place < last[:, None]) & alive[:, None]
        token = self._token[depth][place.clamp_max_(len(self._token[depth]) - 1)]
        # places beyond a row's children repeat its first child, whose score they may write again
        token = torch.where(inside, token, token[:, :1])
        masked.scatter_(1, token, scores.gather(1, token))
        return masked.masked_fill_(~alive[:, None], -torch.inf)


Children = list[dict[tuple[int, ...], list[int]]]
_CHILDREN: WeakKeyDictionary[BenchCatalog, tuple[SidTokenTable, Children]] = WeakKeyDictionary()


def node_children(workload: Workload) -> Children:
    """Per level: the tokens of a prefix -> the tokens that may follow. Made once a catalog and its model's tokens."""
    table, children = _CHILDREN.get(workload.catalog, (None, []))
    if table is not workload.model.table:
        children = _make_children(workload)
        _CHILDREN[workload.catalog] = (workload.model.table, children)
    return children


def _make_children(workload: Workload) -> Children:
    sids = workload.catalog.sids
    tokens = np.stack(
        [
            workload.model.table.token_ids[level][workload.model.table.columns(level, sids[:, level])]
            for level in range(sids.shape[1])
        ],
        axis=1,
    )
    tables: Children = []
    for level in range(sids.shape[1]):
        rows = tokens[:, : level + 1]
        new = np.concatenate([[True], (rows[1:] != rows[:-1]).any(1)])
        table: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in rows[new].tolist():
            table.setdefault(tuple(prefix), []).append(last)
        tables.append(table)
    return tables


def _start(part: Any, before: int) -> None:
    for constraint in part if isinstance(part, list) else [part]:
        constraint.before = before


def _ranked(tokens: NDArray[np.int64], scores: NDArray[np.float32], users: int, workload: Workload) -> RankedSids:
    codes = codes_of_tokens(tokens, workload)
    kept = ~(scores <= _NO_BEAM)  # unknown scores are kept
    rows = [slice(user * len(scores) // users, (user + 1) * len(scores) // users) for user in range(users)]
    return RankedSids([codes[row][kept[row]] for row in rows], [scores[row][kept[row]] for row in rows])


def codes_of_tokens(tokens: NDArray[np.int64], workload: Workload) -> NDArray[np.int32]:
    """Codes of generated tokens [n, L]; -2 where a token stands for no code of its level."""
    codes = np.full(tokens.shape, -2, np.int32)
    for level in range(tokens.shape[1]):
        ids, known = workload.model.table.token_ids[level], workload.model.table.codes[level]
        order = np.argsort(ids)
        at = np.searchsorted(ids, tokens[:, level], sorter=order).clip(max=len(ids) - 1)
        match = ids[order[at]] == tokens[:, level]
        codes[match, level] = known[order[at]][match]
    return codes

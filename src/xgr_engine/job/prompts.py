"""A shard's rows -> prompts and exclusion sets for the search, and the rejected rows, each with its reason.

Reason codes are stable: scripts may look for them in ``_xgr/rejects.parquet``.

=====================  ================================================================================================
``empty-history``      no known item in the history (``--on-empty reject``), or no ready prompt
``unknown-item``       an id outside the catalog (``--on-unknown reject``)
``null-in-list``       a null or NaN inside a list
``not-integral``       a number that is not whole inside a list
``bad-list-text``      ``--list-text`` could not parse the cell
``bad-token``          a token id outside the model's vocabulary, or a text where token ids are expected
``bad-prompt``         a ready prompt that the model's tokenizer cannot turn into tokens
``prompt-too-long``    a ready prompt longer than the model's context
``too-much-memory``    one user alone needs more than ``--max-memory``
``engine-error``       the computation of the row's batch raised an error (``--on-error reject``)
=====================  ================================================================================================
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xgr_engine.checkpoint.model_dir import ModelDir
from xgr_engine.errors import HistoryError
from xgr_engine.job.filters import Matcher
from xgr_engine.job.histories import HistoryResolver, Ragged, Resolved, no_items, sorted_union
from xgr_engine.job.input_formats import Rows
from xgr_engine.job.lists import offsets_of, read_prompts
from xgr_engine.job.options import HistoryOptions
from xgr_engine.options import Exclusion, UserRules
from xgr_engine.tokens.prompt import PromptRenderer

IntArray = NDArray[np.int32]
_NO_BOUND = 2**31 - 1


@dataclass(frozen=True)
class Reject:
    """A row that gets no recommendations. ``row`` counts from 0 within the shard."""

    row: int
    reason: str
    detail: str


@dataclass
class Prepared:
    """A shard, ready for the search.

    Attributes:
        length: rows of the shard.
        live: the rows that have a prompt, ascending.
        prompts: token ids of each live row; excluded: item rows that it must not get, ascending, without repeats
            (with ``--match`` also the tree of its items).
    """

    length: int
    live: list[int] = field(default_factory=list)
    prompts: list[IntArray] = field(default_factory=list)
    excluded: list[Exclusion] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class PromptMaker:
    """Turns rows into prompts.

    Args:
        resolver: looks the histories up.
        renderer: writes and tokenises the prompt. The length of ready prompts is checked here instead.
        options: policies for unknown ids and empty histories.
        vocab_size: rows of the model's embedding: a ready token id must lie below it.
        max_context: tokens that the model can read, less those that it will generate.
        matcher: ``--match``, if it is in force.
    """

    def __init__(
        self,
        resolver: HistoryResolver,
        renderer: PromptRenderer,
        options: HistoryOptions,
        vocab_size: int,
        max_context: int,
        matcher: Matcher | None = None,
    ) -> None:
        self._resolver = resolver
        self._renderer = renderer
        self._options = options
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._matcher = matcher

    def prepare(self, rows: Rows, file: str = "", start: int = 0) -> Prepared:
        """Prompts and exclusions of consecutive rows.

        Args:
            file, start: for messages, the file they come from (if any) and the number of the first row.

        Raises:
            HistoryError: a column of the wrong type, or an unknown id with ``--on-unknown fail``.
        """
        try:
            return self._prepare(rows, start)
        except HistoryError as error:
            if not file:
                raise
            raise HistoryError(f"{file}: {error.what}", why=error.why, hint=error.hint) from error

    def _prepare(self, rows: Rows, start: int) -> Prepared:
        denied, faults, unknown = self._resolver.denied(rows)
        prepared = Prepared(rows.length, counts=Counter(rows=rows.length, unknown_exclusions=unknown))
        prepared.rejects += [Reject(row, *fault) for row, fault in faults.items()]
        if self._options.history_format == "prompt":
            self._ready_prompts(rows, denied, prepared)
        else:
            self._histories(rows, denied, prepared, start)
        prepared.rejects = _first_of_each_row(prepared.rejects)
        rejected = {reject.row for reject in prepared.rejects}
        kept = [place for place, row in enumerate(prepared.live) if row not in rejected]
        prepared.live = [prepared.live[place] for place in kept]
        prepared.prompts = [prepared.prompts[place] for place in kept]
        prepared.excluded = [prepared.excluded[place] for place in kept]
        if self._matcher is not None:
            self._give_trees(self._matcher, rows, prepared)
        prepared.counts["prompt_tokens"] = sum(len(prompt) for prompt in prepared.prompts)
        return prepared

    @staticmethod
    def _give_trees(matcher: Matcher, rows: Rows, prepared: Prepared) -> None:
        trees = matcher.trees_of(rows)[prepared.live].tolist()
        prepared.counts["without_match"] = trees.count(matcher.no_tree)
        prepared.excluded = [
            UserRules(rule.excluded if isinstance(rule, UserRules) else rule, tree)
            for rule, tree in zip(prepared.excluded, trees, strict=True)
        ]

    def _histories(self, rows: Rows, denied: Ragged, prepared: Prepared, start: int) -> None:
        resolved = self._resolver.resolve(rows)
        prepared.rejects += [Reject(row, *fault) for row, fault in resolved.faults.items()]
        seen = self._resolver.seen(resolved) if self._options.exclude_seen else no_items(rows.length)
        self._apply_unknown_policy(resolved, prepared, start)
        rejected = {reject.row for reject in prepared.rejects}
        codes, offsets = resolved.newest(self._options.max_history)
        lengths = np.diff(offsets)
        for row in range(rows.length):
            if row not in rejected and (lengths[row] or self._keep_empty(resolved, row, prepared)):
                prepared.live.append(row)
        live = np.array(prepared.live, np.int64)
        prepared.counts["cut_items"] += int((resolved.known_in_each_row() - lengths)[live].sum())
        excluded = sorted_union(seen, denied)
        wanted = np.isin(np.repeat(np.arange(rows.length), lengths), live)
        starts = offsets_of(lengths[live])
        rendered_prompts = self._renderer.render_codes(codes[wanted], starts)
        for row, rendered in zip(prepared.live, rendered_prompts, strict=True):
            prepared.counts["dropped_items"] += rendered.dropped
            self._add_prompt(row, rendered.token_ids, excluded[row], prepared)

    def _apply_unknown_policy(self, resolved: Resolved, prepared: Prepared, start: int) -> None:
        unknown = np.flatnonzero(~resolved.known)
        prepared.counts["unknown_items"] += len(unknown)
        if self._options.on_unknown == "drop" or not len(unknown):
            return
        owner = np.searchsorted(resolved.offsets, unknown, side="right") - 1
        for row, at in dict(zip(owner[::-1].tolist(), unknown[::-1].tolist(), strict=True)).items():
            name = str(resolved.names[at].as_py())
            if self._options.on_unknown == "fail":
                row, name = int(owner[0]), str(resolved.names[int(unknown[0])].as_py())
                raise HistoryError(
                    f"row {start + row}: {name!r} is not in the catalog",
                    why="--on-unknown fail",
                    hint="build the vocabulary from the catalog of these histories, or use --on-unknown drop or reject",
                )
            prepared.rejects.append(Reject(row, "unknown-item", f"{name} is not in the catalog"))

    def _keep_empty(self, resolved: Resolved, row: int, prepared: Prepared) -> bool:
        prepared.counts["empty_histories"] += 1
        if self._options.on_empty == "template":
            return True
        given = int(resolved.offsets[row + 1] - resolved.offsets[row])
        detail = f"none of its {given} ids is in the catalog" if given else "no history"
        prepared.rejects.append(Reject(row, "empty-history", detail))
        return False

    def _ready_prompts(self, rows: Rows, denied: Ragged, prepared: Prepared) -> None:
        name = self._options.history_col
        excluded = sorted_union(denied, no_items(rows.length))
        ready = read_prompts(rows.lists[name], name, self._options.list_text)
        prepared.rejects += [Reject(row, *fault) for row, fault in ready.faults.items()]
        for row, prompt in enumerate(ready.prompts):
            if row in ready.faults:
                continue
            if prompt is None:
                prepared.counts["empty_histories"] += 1
                prepared.rejects.append(Reject(row, "empty-history", "no prompt"))
                continue
            if not isinstance(prompt, str):
                outside = prompt[(prompt < 0) | (prompt >= self._vocab_size)]
                if len(outside):
                    detail = f"token id {outside[0]} is outside the model's 0..{self._vocab_size - 1}"
                    prepared.rejects.append(Reject(row, "bad-token", detail))
                    continue
            try:
                tokens = self._renderer.encode_ready(prompt if isinstance(prompt, str) else prompt.tolist())
            except HistoryError as error:
                prepared.rejects.append(Reject(row, "bad-prompt", error.what))
                continue
            prepared.live.append(row)
            self._add_prompt(row, tokens, excluded[row], prepared)

    def _add_prompt(self, row: int, tokens: IntArray, excluded: IntArray, prepared: Prepared) -> None:
        if len(tokens) == 0:
            prepared.rejects.append(Reject(row, "empty-history", "the prompt has no token"))
        elif len(tokens) > self._max_context:
            detail = f"{len(tokens)} tokens, but the model reads {self._max_context}"
            prepared.rejects.append(Reject(row, "prompt-too-long", detail))
        prepared.prompts.append(np.asarray(tokens, np.int32))
        prepared.excluded.append(excluded)


def make_prompt_maker(
    model: ModelDir, resolver: HistoryResolver, options: HistoryOptions, matcher: Matcher | None = None
) -> PromptMaker:
    """A PromptMaker for a model directory."""
    renderer = model.renderer()
    longest = renderer.max_tokens
    if options.history_format == "prompt":
        # Without a limit of its own, so that prompts that are too long get their reason code from PromptMaker.
        renderer = PromptRenderer(model.prompt, model.tokenizer_path, model.table, _NO_BOUND, reserve=0)
    return PromptMaker(resolver, renderer, options, model.spec.vocab_size, longest, matcher)


def _first_of_each_row(rejects: list[Reject]) -> list[Reject]:
    """One reason per row, rows ascending: the first that was found."""
    first: dict[int, Reject] = {}
    for reject in rejects:
        first.setdefault(reject.row, reject)
    return [first[row] for row in sorted(first)]

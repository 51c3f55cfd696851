"""The Python interface: load once, recommend for lists of histories in memory.

For files use ``xgr recommend``, or ``xgr_engine.job.run.run_job``, which never hold a whole input in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from xgr_engine.catalog.vocabulary import Vocabulary, load_vocabulary
from xgr_engine.checkpoint.model_dir import ModelDir, load_model_dir
from xgr_engine.errors import naming_arguments, with_arguments
from xgr_engine.job.diversify import capped_engine, search_for
from xgr_engine.job.engine import (
    Device,
    LoadedEngine,
    LoadedWeights,
    build_engine,
    load_weights,
    plan_memory,
    resolve_device,
)
from xgr_engine.job.filters import ItemFilters
from xgr_engine.job.histories import HistoryResolver
from xgr_engine.job.in_memory import EXCLUDE, HISTORY, FiltersInMemory, matches, user_rows
from xgr_engine.job.options import HistoryOptions, parse_memory
from xgr_engine.job.output import ItemColumns, all_rejects, nested_table
from xgr_engine.job.prompts import Prepared, Reject, make_prompt_maker
from xgr_engine.options import (
    Collisions,
    HistoryFormat,
    OnEmpty,
    OnError,
    OnUnknown,
    ScoreOver,
    SearchOptions,
    check_threads,
    check_type,
)
from xgr_engine.system import keep_few_kernels, let_waiting_threads_sleep
from xgr_engine.xschedule.results import Ranked
from xgr_engine.xschedule.worker import compute_batches


class Recommendation(NamedTuple):
    """One item: its id as the catalog has it, its log-probability, its codes."""

    item_id: Any
    score: float
    sid: tuple[int, ...]


class Recommendations(list["list[Recommendation] | None"]):
    """A list with one entry a history: its recommendations, best first, or None where the history was rejected.

    Attributes:
        short: per history, whether fewer than ``top_k`` items were reachable.
        rejects: number, reason code and detail of each rejected history.
        table: the same as a pyarrow table with the columns ``items`` and ``short``, as ``xgr recommend`` writes them.
    """

    def __init__(self, table: pa.Table, rejects: list[Reject]) -> None:
        super().__init__(_as_records(cell) for cell in table.column("items").to_pylist())
        self.table = table
        self.short: list[bool] = [bool(flag) for flag in table.column("short").to_pylist()]
        self.rejects = rejects


def _as_records(items: list[dict[str, Any]] | None) -> list[Recommendation] | None:
    if items is None:
        return None
    return [Recommendation(item["item_id"], item["score"], tuple(item["sid"])) for item in items]


def load(
    model: str | Path = "model",
    vocab: str | Path = "vocab",
    device: str = "auto",
    *,
    threads: int | None = None,
    max_memory: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Recommender:
    """Opens a model directory and a vocabulary; the weights are loaded by the first ``recommend``.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads; None leaves torch's choice.
        max_memory: bytes for a batch, such as ``"2GB"``; None: from the device.
        note: told what was chosen automatically.

    Raises:
        XgrError: either directory is unusable, they do not fit together, or the device is missing.
    """
    let_waiting_threads_sleep()
    keep_few_kernels()
    with naming_arguments():
        check_threads(threads)
        check_type("--device", device, str)
        check_type("--max-memory", max_memory, str | None)
        vocabulary = load_vocabulary(Path(vocab))
        model_dir = load_model_dir(Path(model))
        model_dir.table.bind_catalog(vocabulary)
        memory = None if max_memory is None else parse_memory(max_memory)
        return Recommender(model_dir, vocabulary, resolve_device(device, note), threads, memory, note)


class Recommender:
    """A loaded model and catalog. Make one with :func:`load`."""

    def __init__(
        self,
        model: ModelDir,
        vocabulary: Vocabulary,
        device: Device,
        threads: int | None,
        max_memory: int | None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.device = device
        self._threads = threads
        self._max_memory = max_memory
        self._note = note
        self._weights: LoadedWeights | None = None
        self._filters = FiltersInMemory(vocabulary)
        self._told: tuple[str, ...] = ()
        self._engine_for: tuple[SearchOptions, LoadedEngine] | None = None

    def recommend(
        self,
        histories: Sequence[Sequence[Any] | str | None],
        *,
        top_k: int = 50,
        beam: int = 512,
        exclude_seen: bool = False,
        exclude: Sequence[Sequence[Any] | None] | None = None,
        where: str | None = None,
        allow_items: Sequence[Any] | None = None,
        deny_items: Sequence[Any] | None = None,
        match: Mapping[str, Sequence[Any]] | None = None,
        diversify: str | None = None,
        history_format: HistoryFormat = "items",
        max_history: int | None = None,
        on_unknown: OnUnknown = "drop",
        on_empty: OnEmpty = "reject",
        on_error: OnError = "fail",
        score_over: ScoreOver = "vocab",
        collisions: Collisions = "all",
        item_cols: Sequence[str] = (),
    ) -> Recommendations:
        """The ``top_k`` best items for each history.

        Args:
            histories: per user item ids, oldest first (SID texts, token ids or a ready prompt with another
                ``history_format``).
            exclude: per user item ids that must not be returned.
            where: SQL over the catalog's attributes; allow_items, deny_items: ids of the only items, and of items
                that nobody gets.
            match: attribute -> one value a user: only items that have it.
            diversify: ``"brand=2"``: at most two items of one brand in a list.
            item_cols: catalog columns added to the items of ``Recommendations.table``.

        The other options are those of ``xgr recommend``.

        Raises:
            XgrError: bad options, an unknown id with ``on_unknown="fail"``, or an error of the computation with
                ``on_error="fail"``.
        """
        with naming_arguments():
            check_type("--on-error", on_error, OnError)
            search = SearchOptions(beam=beam, top_k=top_k, score_over=score_over, collisions=collisions)
            options = HistoryOptions(
                paths=("(memory)",),
                history_col=HISTORY,
                history_format=history_format,
                max_history=max_history,
                on_unknown=on_unknown,
                on_empty=on_empty,
                exclude_seen=exclude_seen,
                exclude_col=None if exclude is None else EXCLUDE,
            )
            columns = ItemColumns.of(self.vocabulary, item_cols)
            rows = user_rows(histories, exclude, match, texts=history_format == "prompt")
            filters, new = self._filters.open(where, allow_items, deny_items, matches(match), diversify)
            if new:
                self._engine_for = None  # it was for the filters before
            self._tell(filters.notes)
            resolver = HistoryResolver(self.vocabulary, self.model.table, options)
            prepared = make_prompt_maker(self.model, resolver, options, filters.matcher).prepare(rows)
            ranked = self._compute(search, filters, prepared, on_error)
        table = nested_table(rows.table, prepared, ranked, columns).drop_columns("user")
        return Recommendations(table, all_rejects(prepared, ranked))

    def _tell(self, notes: tuple[str, ...]) -> None:
        """Notes about filters, once where one call after the other has the same."""
        if notes != self._told:
            self._told = notes
            for text in notes:
                self._note(with_arguments(text))

    def _compute(self, search: SearchOptions, filters: ItemFilters, prepared: Prepared, on_error: OnError) -> Ranked:
        loaded = capped_engine(self._engine(search_for(filters, search), filters), filters, search, {})
        return compute_batches(
            loaded.engine,
            prepared.prompts,
            prepared.excluded,
            loaded.limits,
            reject_errors=on_error == "reject",
        )

    def _engine(self, search: SearchOptions, filters: ItemFilters) -> LoadedEngine:
        """The engine for these options and the filters that were opened last. Weights are loaded once."""
        if self._weights is None:
            self._weights = load_weights(self.model, self.device, self._threads)
        if self._engine_for is None or self._engine_for[0] != search:
            self._engine_for = None  # its buffers make room for those of the next
            plan = plan_memory(self.model, filters.searched, search, self.device, self._max_memory)
            self._engine_for = (search, build_engine(self._weights, self.model, filters.searched, search, plan))
        return self._engine_for[1]

"""``xgr eval``: an output of ``recommend`` against what the users really took next.

Item level: the recommended id is a target's id. SID level: the recommended item has a target's SID, each SID counting
once at its best place; where several items share a SID (and ``--collisions first`` returns one of them) the two differ.
Both are means over rows, with percentile-bootstrap intervals over rows. A row without a list (rejected) scores 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xgr_engine.catalog.vocabulary import Vocabulary, load_vocabulary
from xgr_engine.errors import InputError, UsageError
from xgr_engine.metrics import bootstrap, report
from xgr_engine.metrics.matching import (
    Aligner,
    ByPosition,
    ByUser,
    gather,
    shared_keys,
    target_in_history,
    target_sid_in_history,
    without_repeated_targets,
)
from xgr_engine.metrics.ranking import UNKNOWN, IntArray, Lists, metric_names, row_metrics
from xgr_engine.metrics.recs import RecChunk, Recommendations, open_recommendations
from xgr_engine.metrics.report import Tally
from xgr_engine.metrics.truth import Truth, read_truth, truth_files
from xgr_engine.options import HistoryFormat, ListText, check_types

NO_VOCABULARY = "none"


# Far beyond any beam; tables of this length are still small.
_LONGEST = 1_000_000


@dataclass(frozen=True)
class EvalOptions:
    """What ``evaluate`` is told.

    Attributes:
        recs: the output to evaluate.
        truth: files, globs or directories with the truth.
        truth_col: one id, or a list of ids, a row.
        ks: list lengths at which metrics are taken, ascending.
        vocab: vocabulary directory; None takes the one the run used; ``none`` goes without: no SID level, no coverage.
        user_col, history_col, history_format, list_text: as in ``recommend``; None takes what the run used.
        align: ``position`` (row i of the output is row i of the truth), ``user`` (by the user column), or ``auto``:
            by position if the truth is the run's own input, or has the same users row by row, else by user.
        resamples, seed: of the bootstrap.
    """

    recs: str
    truth: tuple[str, ...]
    truth_col: str = "target"
    ks: tuple[int, ...] = (1, 5, 10, 50)
    vocab: str | None = None
    user_col: str | None = None
    history_col: str | None = None
    history_format: HistoryFormat | None = None
    list_text: ListText | None = None
    align: Literal["auto", "position", "user"] = "auto"
    resamples: int = bootstrap.DEFAULT_RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if not self.ks or min(self.ks) < 1:
            raise UsageError("--k needs list lengths of at least 1, such as --k 1,5,10,50")
        if list(self.ks) != sorted(set(self.ks)):
            raise UsageError(f"--k {','.join(map(str, self.ks))}: lengths must be ascending and distinct")
        if max(self.ks) > _LONGEST:
            raise UsageError(f"--k {max(self.ks)}: no list is longer than {_LONGEST}")
        if self.resamples < 1:
            raise UsageError(f"--resamples {self.resamples}: must be at least 1")


@dataclass(frozen=True)
class EvalReport:
    """The result: ``record`` as in ``--json``, and what the user should look at."""

    record: Mapping[str, Any]
    warnings: tuple[str, ...] = field(default=())


def evaluate(options: EvalOptions) -> EvalReport:
    """Evaluates an output.

    Raises:
        InputError: unreadable input, or rows of output and truth that do not belong together.
        UsageError: options that contradict each other.
    """
    recs = open_recommendations(Path(options.recs), options.user_col)
    run = recs.run
    vocabulary = _vocabulary(options, recs)
    history_format = options.history_format or run.history_format
    truth = read_truth(
        options.truth,
        options.truth_col,
        options.user_col or run.user_col,
        (options.history_col or run.history_col) if history_format in ("items", "sids") else None,
        options.list_text or run.list_text,
    )
    is_input = recs.is_input(truth_files(options.truth))
    if is_input and run.rows is not None:
        truth = truth.head(run.rows)  # recommend --limit takes the first rows
    if options.history_col is not None and truth.history is None:
        raise InputError(f"the truth has no column {options.history_col!r}", hint="check --history-col")
    truth = without_repeated_targets(truth)
    aligner = _aligner(options, recs, truth, is_input)
    targets = _Targets(truth, vocabulary)
    tally = _tally(recs, truth, targets, vocabulary, aligner, options.ks)
    with_target = truth.targets.lengths > 0
    population = _population(recs, truth, tally, aligner)
    counted = with_target & population
    if not counted.any():
        raise _nothing_counts(truth)
    unseen = None
    if truth.history is not None:
        seen = _seen(truth, targets, vocabulary, history_format)
        unseen = None if seen is None else counted & ~seen
    record: dict[str, Any] = {
        "recs": options.recs,
        "truth": list(options.truth),
        "vocab": str(vocabulary.path) if vocabulary else None,
        "aligned_by": aligner.align,
        "rows": {
            "evaluated": int(counted.sum()),
            "rejected": tally.rejected if recs.layout == "nested" else len(recs.rejected_users()),
            "target_not_in_history": None if unseen is None else int(unseen.sum()),
            "without_target": int((~with_target).sum()) - truth.faults,
            "unreadable_target": truth.faults,
            "unreadable_history": truth.history_faults,
            "output_rows_without_truth": tally.without_truth_row,
            "truth_rows_without_output": int((~population).sum()),
        },
        "targets": {
            "total": int(truth.targets.lengths[counted].sum()),
            "not_in_catalog": None if vocabulary is None else targets.not_in_catalog(counted),
        },
        **report.figures(tally, vocabulary is not None, counted, unseen, options.ks, options.resamples, options.seed),
        "coverage": None if vocabulary is None else report.coverage(tally, vocabulary, options.ks),
    }
    warnings = report.warnings(record)
    if vocabulary is not None and run.vocab_hash not in (None, vocabulary.content_hash):
        warnings.append(f"{vocabulary.path} is not the vocabulary of this run: SIDs and coverage are another catalog's")
    return EvalReport(record, tuple(warnings))


def _nothing_counts(truth: Truth) -> InputError:
    why = ""
    if truth.faults:
        row, (_, detail) = min(truth.targets.faults.items())
        why = f"the targets of {truth.faults:,} of its {truth.rows:,} rows cannot be read; row {row + 1}: {detail}"
    return InputError(
        "no row of the output has a target in the truth",
        why=why,
        hint="check --truth-col, and that --truth holds the users of this output",
    )


class _Targets:
    """The truth's items by vocabulary row and by leaf; UNKNOWN where the catalog lacks them."""

    def __init__(self, truth: Truth, vocabulary: Vocabulary | None) -> None:
        self._truth = truth
        self.item_row: IntArray | None = None
        self.leaf: IntArray | None = None
        if vocabulary is not None:
            self.item_row = vocabulary.rows_of(truth.targets.values).astype(np.int64)
            self.leaf = leaf_keys(vocabulary, self.item_row)

    def not_in_catalog(self, rows: NDArray[np.bool_]) -> int:
        """Targets of these rows that are no item of the vocabulary."""
        assert self.item_row is not None
        return int((self.item_row[np.repeat(rows, self._truth.targets.lengths)] < 0).sum())


def leaf_keys(vocabulary: Vocabulary, item_rows: IntArray) -> IntArray:
    """Leaf of each item row, UNKNOWN for -1."""
    leaf_of_row = np.append(vocabulary.leaf_of_row, UNKNOWN)  # index -1 reads the appended place
    return leaf_of_row[item_rows].astype(np.int64)


def _vocabulary(options: EvalOptions, recs: Recommendations) -> Vocabulary | None:
    if options.vocab == NO_VOCABULARY:
        return None
    path = options.vocab or recs.run.vocab
    if path is None:
        raise UsageError(
            f"{options.recs} does not say which vocabulary it was made with",
            hint="name it with --vocab, or --vocab none for item-level figures alone",
        )
    if options.vocab is None and not Path(path).is_dir():
        raise InputError(
            f"the vocabulary of this run is not at {path} any more",
            hint="say where it is with --vocab, or --vocab none for item-level figures alone",
        )
    return load_vocabulary(path)


def _aligner(options: EvalOptions, recs: Recommendations, truth: Truth, is_input: bool) -> Aligner:
    if options.align == "position" or (options.align == "auto" and (is_input or recs.has_users(truth.users))):
        return ByPosition(truth)
    return ByUser(truth, options.user_col or recs.run.user_col)


def _tally(
    recs: Recommendations,
    truth: Truth,
    targets: _Targets,
    vocabulary: Vocabulary | None,
    aligner: Aligner,
    ks: tuple[int, ...],
) -> Tally:
    columns = len(metric_names(ks))
    tally = Tally(
        item=np.zeros((truth.rows, columns)),
        sid=np.zeros((truth.rows, columns if vocabulary else 0)),
        reached=np.zeros(truth.rows, bool),
        covered=np.zeros((len(ks), vocabulary.num_items if vocabulary else 0), bool),
    )
    for chunk in recs.chunks():
        truth_rows = aligner.rows_of(chunk)
        tally.output_rows += len(chunk)
        tally.rejected += int(chunk.rejected.sum())
        tally.without_truth_row += int((truth_rows < 0).sum())
        tally.recommended += len(chunk.item_id)
        _tally_chunk(tally, chunk, truth_rows, truth, targets, vocabulary, ks)
    # In the long layout rejected rows are missing; there only the manifest knows how many rows the run was for.
    run_rows = recs.run.rows if recs.layout == "long" and recs.run.rows is not None else tally.output_rows
    aligner.finish(run_rows)
    return tally


def _tally_chunk(
    tally: Tally,
    chunk: RecChunk,
    truth_rows: IntArray,
    truth: Truth,
    targets: _Targets,
    vocabulary: Vocabulary | None,
    ks: tuple[int, ...],
) -> None:
    rows = len(chunk)
    found = np.flatnonzero(truth_rows >= 0)
    owner, at = gather(truth.targets, truth_rows[found])
    target_row = found[owner]
    wanted = truth.targets.values.take(pa.array(at))
    item_rows, nulls = None, chunk.item_id.null_count
    tally.null_ids += nulls
    if vocabulary is not None:
        item_rows = vocabulary.rows_of(chunk.item_id).astype(np.int64)
        tally.outside_vocabulary += int((item_rows < 0).sum()) - nulls
    if item_rows is not None and targets.item_row is not None and not (item_rows < 0).any():
        keys, target_keys = item_rows, targets.item_row[at]  # a target outside the catalog cannot be among them
    else:
        keys, target_keys = shared_keys(chunk.item_id, wanted)
    kept = ~Lists(chunk.row, keys).repeats()
    predicted = Lists(chunk.row[kept], keys[kept])
    tally.repeated += int(len(kept) - kept.sum())
    tally.longest = max(tally.longest, int(predicted.counts(rows).max(initial=0)))
    tally.item[truth_rows[found]] = row_metrics(rows, predicted, Lists(target_row, target_keys), ks)[found]
    if vocabulary is not None and item_rows is not None and targets.leaf is not None:
        _mark_covered(tally.covered, predicted.row, item_rows[kept], ks)
        sids = Lists(predicted.row, leaf_keys(vocabulary, item_rows[kept])).distinct()[0]
        wanted_sids = Lists(target_row, targets.leaf[at]).distinct()[0]
        tally.sid[truth_rows[found]] = row_metrics(rows, sids, wanted_sids, ks)[found]
    tally.reached[truth_rows[found]] = True


def _mark_covered(covered: NDArray[np.bool_], row: IntArray, item_rows: IntArray, ks: tuple[int, ...]) -> None:
    starts = np.searchsorted(row, row)  # rows ascend: where each one's list begins
    place = np.arange(len(row)) - starts
    for at, k in enumerate(ks):
        covered[at, item_rows[(place < k) & (item_rows >= 0)]] = True


def _population(recs: Recommendations, truth: Truth, tally: Tally, aligner: Aligner) -> NDArray[np.bool_]:
    """Rows of the truth that count: those the run had, with a list or rejected."""
    if recs.layout == "nested":
        return tally.reached
    if isinstance(aligner, ByPosition):
        return np.ones(truth.rows, bool)
    counted = tally.reached.copy()
    counted[aligner.rows_of_rejected(recs.rejected_users())] = True
    return counted


def _seen(
    truth: Truth, targets: _Targets, vocabulary: Vocabulary | None, history_format: str
) -> NDArray[np.bool_] | None:
    if history_format == "items":
        return target_in_history(truth)
    if vocabulary is None or targets.leaf is None:
        return None
    return target_sid_in_history(truth, targets.leaf, vocabulary)

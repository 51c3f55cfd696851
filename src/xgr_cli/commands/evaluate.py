"""Measure recommendations against what users took next: recall, NDCG, hit rate, MRR, catalog coverage.

Figures are given at item level and at SID level (several items may share a semantic ID), over all rows and over the
rows whose target is not in the history, with 95 % bootstrap intervals over rows. Rejected rows count as misses. If the
truth is the run's own input, or has the same users row by row, rows are matched by position; otherwise by user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from xgr_cli.options import INPUT_PANEL, OF_THE_RUN, HistoryFormatOfRun, ListTextOfRun, option
from xgr_cli.output import Output
from xgr_engine.errors import UsageError

EXAMPLES = (
    "xgr eval --truth users.parquet",
    "xgr eval --recs recs --truth users.parquet --truth-col target --vocab vocab",
    "xgr eval --recs recs --truth tomorrow.parquet --user-col customer --k 10,50 --json",
)

_INPUT, _FIGURES = INPUT_PANEL, "Figures"


def evaluate(
    output: Output,
    truth: Annotated[
        list[str], option("--truth", help="file, glob or directory with what users took next; repeatable", panel=_INPUT)
    ],
    recs: Annotated[
        str, option("--recs", help="output of xgr recommend, or a Parquet file in its layout", panel=_INPUT)
    ] = "recs",
    truth_col: Annotated[
        str, option("--truth-col", help="column with an item id, or a list of them", panel=_INPUT)
    ] = "target",
    vocab: Annotated[
        str | None,
        option(
            "--vocab",
            help="vocabulary for SIDs and coverage, or 'none' for neither",
            panel=_INPUT,
            show_default=OF_THE_RUN,
            metavar="PATH|none",
        ),
    ] = None,
    user_col: Annotated[
        str | None, option("--user-col", help="column with the user ids", panel=_INPUT, show_default=OF_THE_RUN)
    ] = None,
    history_col: Annotated[
        str | None,
        option("--history-col", help="history in the truth file, if any", panel=_INPUT, show_default=OF_THE_RUN),
    ] = None,
    history_format: HistoryFormatOfRun = None,
    list_text: ListTextOfRun = None,
    align: Annotated[
        Literal["auto", "position", "user"],
        option("--align", help="match output rows to truth rows by position or by user", panel=_INPUT),
    ] = "auto",
    k: Annotated[str, option("--k", help="list lengths, ascending", panel=_FIGURES, metavar="N,N,...")] = "1,5,10,50",
    resamples: Annotated[int, option("--resamples", help="bootstrap resamples", panel=_FIGURES, min=1)] = 1000,
    seed: Annotated[int, option("--seed", help="seed of the bootstrap", panel=_FIGURES, min=0)] = 0,
) -> None:
    """The module's docstring is the help text."""
    from xgr_engine.metrics.evaluate import EvalOptions
    from xgr_engine.metrics.evaluate import evaluate as run_evaluation

    options = EvalOptions(
        recs=recs,
        truth=tuple(truth),
        truth_col=truth_col,
        ks=_lengths(k),
        vocab=vocab,
        user_col=user_col,
        history_col=history_col,
        history_format=history_format,
        list_text=list_text,
        align=align,
        resamples=resamples,
        seed=seed,
    )
    report = run_evaluation(options)
    for text in report.warnings:
        output.warn(text)
    output.result(report.record, lambda out: _show(out, report.record))


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--k {text}: must be list lengths such as 1,5,10,50") from None


def _show(output: Output, record: Mapping[str, Any]) -> None:
    rows, targets = record["rows"], record["targets"]
    output.fields(
        {
            "recommendations": record["recs"],
            "truth": record["truth"],
            "vocabulary": record["vocab"],
            "rows": rows["evaluated"],
            "matched by": record["aligned_by"],
            "rejected": rows["rejected"],
            "targets": targets["total"],
            "not in the catalog": targets["not_in_catalog"],
        }
    )
    output.print("")
    _show_metrics(output, f"All {rows['evaluated']:,} rows", record["metrics"], "all")
    unseen = rows["target_not_in_history"]
    if unseen == rows["evaluated"]:
        output.print("No target is in its row's history, so leaving out such rows would change nothing.", "")
    elif unseen:
        title = f"The {unseen:,} rows whose target is not in the history"
        _show_metrics(output, title, record["metrics"], "target_not_in_history")
    if record["coverage"] is not None:
        _show_coverage(output, record["coverage"])
    boot = record["bootstrap"]
    output.print(f"Intervals: bootstrap over rows, 95 %, {boot['resamples']} resamples, seed {boot['seed']}.")


def _show_metrics(output: Output, title: str, metrics: Mapping[str, Any], subset: str) -> None:
    columns, levels = ["metric"], []
    for level, name in (("item", "item level"), ("sid", "SID level")):
        if metrics[level] is not None:
            columns += [name, "95 % interval"]
            levels.append(metrics[level][subset])
    table = [[name, *(cell for level in levels for cell in _cells(level[name]))] for name in levels[0]]
    output.table(columns, table, title=title)


def _cells(figure: Mapping[str, float]) -> list[str]:
    return [f"{figure['mean']:.4f}", f"{figure['low']:.4f} to {figure['high']:.4f}"]


def _show_coverage(output: Output, coverage: Mapping[str, Any]) -> None:
    items, sids = coverage["catalog_items"], coverage["catalog_sids"]
    output.table(
        ["coverage", f"of {items:,} items", "share", f"of {sids:,} SIDs", "share"],
        [
            [f"first {k}", at["items"], f"{at['item_share']:.1%}", at["sids"], f"{at['sid_share']:.1%}"]
            for k, at in coverage["at"].items()
        ],
        title="How much of the catalog was recommended to anyone",
    )

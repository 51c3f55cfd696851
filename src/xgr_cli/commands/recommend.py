"""Recommend items for every user: histories in, Parquet out.

Reads users from Parquet, CSV or JSON Lines, searches the catalog's semantic IDs with the model, and writes one row
per user in input order. The output directory is complete when it holds _SUCCESS; rows without recommendations are in
_xgr/rejects.parquet with the reason, and _xgr/manifest.json says what ran.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from xgr_cli.options import (
    INPUT_PANEL,
    MACHINE_PANEL,
    SEARCH_PANEL,
    Device,
    HistoryColumn,
    HistoryFormatOption,
    ListTextOption,
    LogEvery,
    ScoreOverOption,
    Threads,
    option,
)
from xgr_cli.output import Output
from xgr_cli.progress import make_progress
from xgr_cli.signals import stop_on_signals
from xgr_engine.errors import UsageError
from xgr_engine.options import Collisions, Layout, OnEmpty, OnError, OnUnknown

if TYPE_CHECKING:
    from xgr_engine.job.options import OperationOptions, RecommendOptions
    from xgr_engine.job.record import JobReport
    from xgr_engine.job.stop import Stop
    from xgr_engine.progress import ProgressSink

EXAMPLES = (
    "xgr recommend --in users.parquet --model model --vocab vocab --out recs --beam 512 --top-k 50",
    "xgr recommend --in 'users/*.parquet' --exclude-seen --item-cols title --out recs",
    "xgr recommend --in users.csv --history-format sids --list-text python --dry-run",
)

_INPUT, _SEARCH, _MACHINE = INPUT_PANEL, SEARCH_PANEL, MACHINE_PANEL
_FILTER, _OUTPUT, _OPERATION = "Filters", "Output", "Operation"


def recommend(
    output: Output,
    inputs: Annotated[
        list[str],
        option(
            "--in",
            help="users: file, glob or directory, s3:// too (Parquet, CSV, JSON Lines); repeatable",
            panel=_INPUT,
        ),
    ],
    model: Annotated[Path, option("--model", help="model directory of xgr convert", panel=_INPUT)] = Path("model"),
    vocab: Annotated[Path, option("--vocab", help="vocabulary of xgr build-vocab", panel=_INPUT)] = Path("vocab"),
    out: Annotated[
        str, option("--out", help="output directory, or s3://bucket/folder", panel=_OUTPUT, env="XGR_RECS")
    ] = "recs",
    user_col: Annotated[str, option("--user-col", help="user column, copied to the output", panel=_INPUT)] = "user_id",
    history_col: HistoryColumn = "history",
    history_format: HistoryFormatOption = "items",
    list_text: ListTextOption = None,
    max_history: Annotated[
        int | None,
        option(
            "--max-history",
            help="most items in the prompt, the newest ones",
            panel=_INPUT,
            min=1,
            show_default="all that the model's context holds",
        ),
    ] = None,
    on_unknown: Annotated[
        OnUnknown,
        option("--on-unknown", help="an id that is not in the catalog: drop it, reject the row, or fail", panel=_INPUT),
    ] = "drop",
    on_empty: Annotated[
        OnEmpty,
        option(
            "--on-empty", help="a history without known items: prompt without items, or reject the row", panel=_INPUT
        ),
    ] = "reject",
    limit: Annotated[int | None, option("--limit", help="only the first rows", panel=_INPUT, min=1)] = None,
    beam: Annotated[int, option("--beam", help="prefixes kept per level (W)", panel=_SEARCH, min=1)] = 512,
    top_k: Annotated[int, option("--top-k", help="items per user (K <= W)", panel=_SEARCH, min=1)] = 50,
    exclude_seen: Annotated[
        bool,
        option("--exclude-seen/--no-exclude-seen", help="never return an item of the history", panel=_SEARCH),
    ] = False,
    exclude_col: Annotated[
        str | None,
        option("--exclude-col", help="list column of item ids that must not be recommended to the user", panel=_SEARCH),
    ] = None,
    match: Annotated[
        list[str] | None,
        option(
            "--match",
            help="only items whose attribute equals the user's column: country, or country=user_country; repeatable",
            panel=_FILTER,
        ),
    ] = None,
    where: Annotated[
        str | None,
        option(
            "--where", help="SQL condition on catalog attributes: \"category = 'books' and in_stock\"", panel=_FILTER
        ),
    ] = None,
    allow_items: Annotated[
        list[Path] | None,
        option(
            "--allow-items", help="only these items: text (one id per line), Parquet, CSV; repeatable", panel=_FILTER
        ),
    ] = None,
    deny_items: Annotated[
        list[Path] | None,
        option("--deny-items", help="never these items; same file formats; repeatable", panel=_FILTER),
    ] = None,
    items_col: Annotated[
        str, option("--items-col", help="id column of these files if they are tables", panel=_FILTER)
    ] = "item_id",
    diversify: Annotated[
        str | None,
        option("--diversify", help="at most this many items with the same value per list: brand=2", panel=_FILTER),
    ] = None,
    score_over: ScoreOverOption = "vocab",
    collisions: Annotated[
        Collisions,
        option(
            "--collisions",
            help="items that share a SID: all of them, or only the first one allowed for the user",
            panel=_SEARCH,
        ),
    ] = "all",
    layout: Annotated[
        Layout,
        option("--layout", help="one row per user, or one row per recommendation", panel=_OUTPUT),
    ] = "nested",
    keep: Annotated[
        str | None, option("--keep", help="input columns copied to the output: a,b or all", panel=_OUTPUT)
    ] = None,
    item_cols: Annotated[
        str | None, option("--item-cols", help="catalog columns written with each item: a,b", panel=_OUTPUT)
    ] = None,
    shard_rows: Annotated[int, option("--shard-rows", help="users per part file", panel=_OUTPUT, min=1)] = 16_384,
    partition_by: Annotated[
        str | None,
        option(
            "--partition-by",
            help="split the output into directories by these partition columns of the input: a,b",
            panel=_OUTPUT,
        ),
    ] = None,
    fresh: Annotated[
        bool, option("--fresh", help="replace what xgr wrote to --out before, and nothing else", panel=_OUTPUT)
    ] = False,
    max_rejects: Annotated[
        str,
        option(
            "--max-rejects",
            help="how many rejected rows are acceptable: 100 or 1%; exit code 3 above that",
            panel=_OUTPUT,
        ),
    ] = "1%",
    on_error: Annotated[
        OnError,
        option("--on-error", help="a row on which the engine raises an error: reject it, or fail", panel=_OUTPUT),
    ] = "reject",
    dry_run: Annotated[
        bool, option("--dry-run", help="check everything and plan shards and memory, but write nothing", panel=_OUTPUT)
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
    max_memory: Annotated[
        str | None,
        option(
            "--max-memory",
            help="memory for a batch, not counting weights: 2GB",
            panel=_MACHINE,
            show_default="most of a GPU's free memory, 2 GiB on a CPU",
        ),
    ] = None,
    slo_ms: Annotated[
        float | None,
        option(
            "--slo-ms", help="close a batch before it is expected to take more milliseconds than this", panel=_MACHINE
        ),
    ] = None,
    grace: Annotated[
        str,
        option(
            "--grace", help="how long a signal leaves for a clean stop: 20s; finished shards are kept", panel=_OPERATION
        ),
    ] = "20s",
    wait: Annotated[
        str, option("--wait", help="how long to wait if another run holds the output: 10m", panel=_OPERATION)
    ] = "0s",
    metrics_file: Annotated[
        Path | None,
        option("--metrics-file", help="Prometheus textfile, written however the run ends", panel=_OPERATION),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        option(
            "--cache-dir",
            help="where to keep compiled kernels, and an output for s3:// until it is whole",
            panel=_OPERATION,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        option("--trace", help="write a timeline of threads and GPU in Chrome trace format", panel=_OPERATION),
    ] = None,
    log_every: LogEvery = 60.0,
) -> int | None:
    """The module's docstring is the help text."""
    from xgr_engine.job.filter_options import FilterOptions
    from xgr_engine.job.metrics_file import report_failure
    from xgr_engine.job.options import HistoryOptions, RecommendOptions, parse_memory
    from xgr_engine.job.side_files import check_side_file
    from xgr_engine.options import SearchOptions

    lists = {"--in": inputs, "--allow-items": allow_items or (), "--deny-items": deny_items or ()}
    others = _named({**lists, "--model": [model], "--vocab": [vocab], "--out": [out]})
    check_side_file("--metrics-file", metrics_file, others)  # before a failure is reported there
    try:
        check_side_file("--trace", trace, others + _named({"--metrics-file": [metrics_file or ""]}))
        operation = _operation(grace, wait, metrics_file=metrics_file, cache_dir=cache_dir, trace=trace)
        options = RecommendOptions(
            histories=HistoryOptions(
                paths=tuple(inputs),
                user_col=user_col,
                history_col=history_col,
                history_format=history_format,
                list_text=list_text,
                max_history=max_history,
                on_unknown=on_unknown,
                on_empty=on_empty,
                exclude_seen=exclude_seen,
                exclude_col=exclude_col,
                match=tuple(match or ()),
                keep=("*",) if keep == "all" else _names(keep),
                limit=limit,
            ),
            search=SearchOptions(beam=beam, top_k=top_k, score_over=score_over, collisions=collisions),
            filters=FilterOptions(
                where=where,
                allow_items=tuple(map(str, allow_items or ())),
                deny_items=tuple(map(str, deny_items or ())),
                items_col=items_col,
                diversify=diversify,
            ),
            model=str(model),
            vocab=str(vocab),
            out=out,
            item_cols=_names(item_cols),
            layout=layout,
            shard_rows=shard_rows,
            partition_by=_names(partition_by),
            device=device,
            threads=threads,
            max_memory=parse_memory(max_memory) if max_memory else None,
            slo_ms=slo_ms,
            max_rejects=max_rejects,
            on_error=on_error,
            fresh=fresh,
            operation=operation,
        )
    except UsageError as error:
        if not dry_run:
            report_failure(metrics_file, error)
        raise
    with stop_on_signals(output, operation.grace) as stop:
        _run(output, options, make_progress(output, log_every), stop, dry_run)
    return None


def _operation(grace: str, wait: str, **paths: Path | None) -> OperationOptions:
    from xgr_engine.job.options import OperationOptions, parse_duration

    given = {name: None if path is None else str(path) for name, path in paths.items()}
    return OperationOptions(parse_duration("--grace", grace), parse_duration("--wait", wait), **given)


def _run(output: Output, options: RecommendOptions, progress: ProgressSink, stop: Stop, dry_run: bool) -> None:
    from xgr_engine.job.run import Caller, plan_job, run_job

    caller = Caller(
        argv=sys.argv[1:],
        origins=_origins(output, options),
        progress=progress,
        note=output.note,
        begin=lambda run_id: output.bind(run_id=run_id),
        stop=stop,
    )
    if dry_run:
        plan = plan_job(options, caller)
        output.result(plan.record, lambda out: _show_plan(out, plan))
        return
    report = run_job(options, caller)
    output.result(report.record, lambda out: _show_run(out, report))
    if report.failure is not None:
        raise report.failure


def _named(paths: Mapping[str, Iterable[str | Path]]) -> list[tuple[str, str]]:
    """Option and path of each."""
    return [(option, str(path)) for option, several in paths.items() for path in several]


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _origins(output: Output, options: RecommendOptions) -> dict[str, str]:
    """Origin of each engine option, by its dotted name: the last part is the command line's name."""
    from xgr_engine.job.options import flatten

    settings = {setting.key.replace("-", "_"): setting.origin for setting in output.settings}
    settings["paths"] = settings.get("in", "default")
    return {name: settings.get(name.rsplit(".", 1)[-1], "default") for name, _ in flatten(options)}


def _show_plan(out: Output, report: JobReport) -> None:
    record = report.record
    plan = record["memory_plan"]
    out.fields(
        {
            "output": f"{record['output']['path']} ({record['output']['state']})",
            "files": len(record["inputs"]),
            "users": record["rows"],
            "shards": record["shards"],
            "catalog items": record["items"],
            "device": record["device"],
            "weights": f"{record['weight_bytes'] / 1e6:,.1f} MB",
            "memory per batch": f"{plan['budget_bytes'] / 1e6:,.0f} MB ({plan['budget_from']})",
            "largest batch": f"{plan['limits']['users']} users, {plan['limits']['tokens']} prompt tokens, "
            f"{plan['largest_batch_bytes'] / 1e6:,.0f} MB",
        },
        title="Nothing was written (--dry-run)",
    )


def _show_run(out: Output, report: JobReport) -> None:
    record = report.record
    if record["state"] == "nothing-to-do":
        out.print(f"{record['out']}: already complete, nothing to do")
        return
    if "engine" not in record:  # finished before; the error names the rejects that this command's limit does not allow
        out.print(f"{record['out']}: already complete")
        return
    if "counts" not in record:  # some shards could not be read; the error names them
        out.fields({"state": record["state"], "shards": f"{record['shards_finished']} of {record['shards']} finished"})
        return
    counts, engine = record["counts"], record["engine"]
    seconds = record["durations"].get("compute", 0.0)
    shown: dict[str, object] = {
        "state": record["state"],
        "users": record["rows"],
        "attempts": len(record["attempts"]),
        "rejected": counts["rejects"],
        "unknown ids": counts.get("unknown_items", 0),
        "seen items": "excluded" if record["options"]["histories.exclude_seen"]["value"] else "allowed",
        "device": engine
        and f"{engine['device']} ({engine['device_name']}), {engine['dtype']}, {engine['implementation']}",
        "seconds": f"{record['durations']['total']:,.1f} in all, {seconds:,.1f} computing",
    }
    out.fields(shown)
    for reason, count in counts["rejects_by_reason"].items():
        out.print(f"  rejected, {reason}: {count}")
    out.print(f"audit: {record['audit']['line']}")

"""Measure speed and memory on this machine: the engine against others, answers compared first.

Runs a named geometry with random weights, or a converted model with its vocabulary and real histories, against
transformers and other ways to do the same search, all in one run. Every figure comes with how far the answers agree
with the definition; what is missing or runs out of memory is listed as such. docs/benchmarking.md explains every
figure. xgr bench compare A.json B.json compares two results of --json or --out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from xgr_cli.bench_run import BenchRun
from xgr_cli.bench_views import show_comparison
from xgr_cli.options import (
    INPUT_PANEL,
    SEARCH_PANEL,
    SHARED_OPTIONS,
    Device,
    HistoryColumn,
    HistoryFormatOption,
    LogEvery,
    ScoreOverOption,
    Threads,
    argument,
    option,
)
from xgr_cli.output import Output
from xgr_cli.progress import make_progress
from xgr_cli.signals import stop_on_signals
from xgr_engine.bench.options import BenchWishes
from xgr_engine.errors import UsageError
from xgr_engine.job.stop import Stopped

EXAMPLES = (
    "xgr bench --beam 512",
    "xgr bench --preset quick --html report.html",
    "xgr bench --model model --vocab vocab --in users.parquet --beam 128,256,512",
    "xgr bench --geometry qwen3-1.7b --items 1e6 --codes 8192x3 --context 1000 --users 8 --baselines hf,paged",
    "xgr bench compare before.json after.json --fail-over 5%",
)

_GRACE_S = 20.0  # from a signal to the end by force
_PATIENCE_S = 3.0  # a run that ends sooner after a signal says one line
_INPUT, _SEARCH = INPUT_PANEL, SEARCH_PANEL
# Options of the command line that mean something to a comparison. Others would be ignored: they are refused.
_COMPARE_TAKES = {"action", "fail-over", *(name.replace("_", "-") for name in SHARED_OPTIONS), "json"}
_WORK, _MEASURE, _REPORT, _COMPARE = "Workload", "Measurement", "Report", "Compare"


def bench(
    output: Output,
    action: Annotated[
        list[str] | None,
        argument(help="nothing, or: compare A.json B.json", metavar="ACTION", show_default=False),
    ] = None,
    preset: Annotated[
        Literal["sid-gr", "xgr-paper", "static", "quick"] | None,
        option("--preset", help="a predefined set of rows; other options override it", panel=_WORK),
    ] = None,
    geometry: Annotated[
        str | None,
        option(
            "--geometry",
            help="named model sizes, run with random weights: a,b",
            panel=_WORK,
            show_default="fits the machine",
        ),
    ] = None,
    model: Annotated[
        Path | None, option("--model", help="model directory of xgr convert", panel=_INPUT, env="XGR_BENCH_MODEL")
    ] = None,
    vocab: Annotated[
        Path | None, option("--vocab", help="vocabulary of that model", panel=_INPUT, env="XGR_BENCH_VOCAB")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        option(
            "--in", help="users whose histories become the prompts; repeatable", panel=_INPUT, show_default="synthetic"
        ),
    ] = None,
    history_col: HistoryColumn = "history",
    history_format: HistoryFormatOption = "items",
    items: Annotated[str | None, option("--items", help="items in the synthetic catalog: 1e6", panel=_WORK)] = None,
    codes: Annotated[
        str | None, option("--codes", help="code space of the synthetic catalog", panel=_WORK, metavar="CODESxLEVELS")
    ] = None,
    context: Annotated[
        str | None, option("--context", help="prompt tokens: N,N,...; with --in, the longest prompt used", panel=_WORK)
    ] = None,
    shared_prefix: Annotated[
        int, option("--shared-prefix", help="tokens shared at the start of all synthetic prompts", panel=_WORK, min=0)
    ] = 0,
    users: Annotated[str | None, option("--users", help="prompts per batch: N,N,...", panel=_WORK)] = None,
    beam: Annotated[str | None, option("--beam", help="prefixes kept per level: N,N,...", panel=_SEARCH)] = None,
    top_k: Annotated[
        int | None,
        option(
            "--top-k",
            help="SIDs per user (K <= W)",
            panel=_SEARCH,
            min=1,
            show_default="50, or W if that is less; W in presets",
        ),
    ] = None,
    score_over: ScoreOverOption = "vocab",
    baselines: Annotated[
        str | None,
        option(
            "--baselines",
            help="hf, hf-fast, paged, paper; on a GPU with their packages: cascade, flashrec, vllm; or none",
            panel=_MEASURE,
        ),
    ] = None,
    ablations: Annotated[
        bool | None,
        option(
            "--ablations/--no-ablations", help="also measure with one part of the engine off at a time", panel=_MEASURE
        ),
    ] = None,
    online: Annotated[
        bool | None,
        option("--online/--no-online", help="find the highest Poisson rate that keeps the P99 limit", panel=_MEASURE),
    ] = None,
    slo_ms: Annotated[float, option("--slo-ms", help="the P99 limit, in milliseconds", panel=_MEASURE)] = 200.0,
    budget: Annotated[
        float | None, option("--budget", help="seconds of sampling per contender and row", panel=_MEASURE)
    ] = None,
    time_limit: Annotated[
        float | None, option("--time-limit", help="start no further part after this many seconds", panel=_MEASURE)
    ] = None,
    seed: Annotated[int, option("--seed", help="seed for weights, catalog and prompts", panel=_MEASURE, min=0)] = 0,
    device: Device = "auto",
    threads: Threads = None,
    html: Annotated[Path | None, option("--html", help="write a report to open in a browser", panel=_REPORT)] = None,
    out: Annotated[
        Path | None,
        option("--out", help="write the result as JSON, row by row", panel=_REPORT, env="XGR_BENCH_OUT"),
    ] = None,
    fail_over: Annotated[
        str | None,
        option(
            "--fail-over",
            help="with compare: exit 1 if a figure got worse by more than this: 5% or 0.05",
            panel=_COMPARE,
        ),
    ] = None,
    log_every: LogEvery = 60.0,
) -> int | None:
    """The module's docstring is the help text."""
    if action:
        return _compare(output, action, fail_over)
    configured = {setting.key for setting in output.settings if setting.configured}
    if fail_over is not None and "fail-over" not in configured:
        raise UsageError("--fail-over belongs to xgr bench compare A.json B.json")

    wishes = BenchWishes(
        preset=preset,
        geometry=geometry,
        model=None if model is None else str(model),
        vocab=None if vocab is None else str(vocab),
        inputs=tuple(inputs or ()),
        history_col=history_col,
        history_format=history_format,
        items=items,
        codes=codes,
        context=context,
        shared_prefix=shared_prefix,
        users=users,
        beam=beam,
        top_k=top_k,
        score_over=score_over,
        baselines=baselines,
        ablations=ablations,
        online=online,
        slo_ms=slo_ms,
        budget_s=budget,
        time_limit_s=time_limit,
        seed=seed,
    )
    run = BenchRun(output, html, out, make_progress(output, log_every, with_rate=False))
    with stop_on_signals(output, _GRACE_S, "what was measured is kept", _PATIENCE_S) as stop:
        try:
            return run.measure(wishes, configured, device, threads, stop)
        except Stopped as stopped:
            return run.stopped(stopped)


def _compare(output: Output, action: list[str], fail_over: str | None) -> int | None:
    from xgr_engine.bench.compare import compare_files, parse_share

    if len(action) != 3 or action[0] != "compare":
        raise UsageError(
            f"xgr bench {' '.join(action)}: not understood", hint="xgr bench compare A.json B.json [--fail-over 5%]"
        )
    foreign = [
        setting.key
        for setting in output.settings
        if setting.origin == "command line" and setting.key not in _COMPARE_TAKES
    ]
    if foreign:
        raise UsageError(
            f"--{foreign[0]} does not belong to xgr bench compare",
            why="it compares two results and measures nothing; only --fail-over changes what it says",
            hint="for a file: xgr bench compare A.json B.json --json > comparison.json",
        )
    limit = None if fail_over is None else parse_share(fail_over)
    comparison = compare_files(Path(action[1]), Path(action[2]), limit)
    for text in comparison["warnings"]:
        output.warn(text)
    output.result(comparison, lambda out: show_comparison(out, comparison))
    return 1 if limit is not None and comparison["regressions"] else None

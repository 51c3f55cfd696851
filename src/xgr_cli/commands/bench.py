"""Measure speed and memory on this machine: the engine against others, answers compared first.

Runs a named geometry with random weights, or a converted model with its vocabulary and real histories, against
transformers and other ways to do the same search, all in one run. Every figure stands beside how far the answers
agree with the definition; what is missing or runs out of memory is listed as such. docs/benchmarking.md explains
every figure. xgr bench compare A.json B.json compares two results of --json or --out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from xgr_cli.bench_views import show_bench, show_comparison
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
from xgr_cli.output import Output, jsonable
from xgr_cli.progress import make_progress
from xgr_cli.signals import stop_on_signals
from xgr_engine.bench.record import has_figures
from xgr_engine.errors import OutputWriteError, UsageError
from xgr_engine.job.stop import Stop, Stopped
from xgr_engine.progress import ProgressSink

if TYPE_CHECKING:
    from xgr_engine.bench.choices import BenchWishes

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
        option("--preset", help="a known set of rows; other options change it", panel=_WORK),
    ] = None,
    geometry: Annotated[
        str | None,
        option("--geometry", help="model sizes for random weights: a,b", panel=_WORK, show_default="fits the machine"),
    ] = None,
    model: Annotated[
        Path | None, option("--model", help="model directory of xgr convert", panel=_INPUT, env="XGR_BENCH_MODEL")
    ] = None,
    vocab: Annotated[Path | None, option("--vocab", help="its vocabulary", panel=_INPUT, env="XGR_BENCH_VOCAB")] = None,
    inputs: Annotated[
        list[str] | None,
        option("--in", help="users whose histories become the prompts", panel=_INPUT, show_default="synthetic"),
    ] = None,
    history_col: HistoryColumn = "history",
    history_format: HistoryFormatOption = "items",
    items: Annotated[str | None, option("--items", help="items of the synthetic catalog: 1e6", panel=_WORK)] = None,
    codes: Annotated[str | None, option("--codes", help="its code space", panel=_WORK, metavar="CODESxLEVELS")] = None,
    context: Annotated[
        str | None, option("--context", help="prompt tokens: N,N,...; with --in: longest prompt taken", panel=_WORK)
    ] = None,
    shared_prefix: Annotated[
        int, option("--shared-prefix", help="tokens that all synthetic prompts begin with", panel=_WORK, min=0)
    ] = 0,
    users: Annotated[str | None, option("--users", help="prompts a batch: N,N,...", panel=_WORK)] = None,
    beam: Annotated[str | None, option("--beam", help="prefixes kept a level: N,N,...", panel=_SEARCH)] = None,
    top_k: Annotated[
        int | None,
        option(
            "--top-k",
            help="SIDs a user (K <= W)",
            panel=_SEARCH,
            min=1,
            show_default="50, or W where that is less; in presets W",
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
        option("--ablations/--no-ablations", help="parts switched off one at a time", panel=_MEASURE),
    ] = None,
    online: Annotated[
        bool | None,
        option("--online/--no-online", help="highest Poisson rate whose P99 holds", panel=_MEASURE),
    ] = None,
    slo_ms: Annotated[float, option("--slo-ms", help="what that P99 must keep", panel=_MEASURE)] = 200.0,
    budget: Annotated[
        float | None, option("--budget", help="seconds of samples a contender and row", panel=_MEASURE)
    ] = None,
    time_limit: Annotated[
        float | None, option("--time-limit", help="begin no further part after so many seconds", panel=_MEASURE)
    ] = None,
    seed: Annotated[int, option("--seed", help="of weights, catalog and prompts", panel=_MEASURE, min=0)] = 0,
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
            help="with compare: exit 1 where something got worse by more than this: 5% or 0.05",
            panel=_COMPARE,
        ),
    ] = None,
    log_every: LogEvery = 60.0,
) -> int | None:
    """See the module."""
    if action:
        return _compare(output, action, fail_over)
    configured = {setting.key for setting in output.settings if setting.configured}
    if fail_over is not None and "fail-over" not in configured:
        raise UsageError("--fail-over belongs to xgr bench compare A.json B.json")

    def wishes() -> BenchWishes:
        from xgr_engine.bench.choices import BenchWishes

        return BenchWishes(
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

    run = _Run(output, html, out, make_progress(output, log_every, with_rate=False))
    with stop_on_signals(output, _GRACE_S, "what was measured is kept", _PATIENCE_S) as stop:
        try:
            return run.measure(wishes, configured, device, threads, stop)
        except Stopped as stopped:
            return run.stopped(stopped)


@dataclass
class _Run:
    """A run, and what becomes of its record: also of one that is stopped."""

    output: Output
    html: Path | None
    out: Path | None
    progress: ProgressSink
    record: dict[str, Any] | None = None
    older: set[str] = field(default_factory=set)  # options whose files were there before the run
    unwritten: set[str] = field(default_factory=set)  # options whose files were not written when last tried
    _ours: tuple[int, int] | None = None  # tells the file of --out, as the run found or last wrote it, from others

    def measure(
        self, wishes: Callable[[], BenchWishes], configured: set[str], device: str, threads: int | None, stop: Stop
    ) -> int | None:
        """All that was asked for, and the exit code."""
        # the profiler of torch reports its start and end on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        from xgr_engine.bench.choices import choose_options, open_device
        from xgr_engine.bench.places import check_places
        from xgr_engine.bench.run import BenchCaller, run_bench

        def note(text: str) -> None:
            stop.check()  # where a signal's exception was lost, in a destructor say
            self.output.note(text)

        stop.on_forced = self._last_words
        place = open_device(device, threads, self.output.note)
        options = choose_options(place, wishes(), configured)
        files = {flag: path for flag, path in (("--html", self.html), ("--out", self.out)) if path is not None}
        check_places(files, options)
        self.older = {flag for flag, path in files.items() if path.exists()}
        self._ours = _identity(self.out) if self.out else None
        caller = BenchCaller(tuple(sys.argv[1:]), self.progress, note, self._keep)
        try:
            record = run_bench(options, place, caller)
        except Exception:
            if self.record is not None and self.record["rows"]:
                self._show(self.record)
            raise
        self._show(record)
        if record["state"] == "failed":
            self.output.error("nothing that was asked for could be measured", why=_first_reason(record))
        return 1 if self.unwritten or record["state"] == "failed" else None

    def stopped(self, stopped: Stopped) -> int:
        """Show what there is, and say how far it came."""
        record = self.record
        if record is None:
            self.output.error(f"{stopped}: nothing was measured yet")
            return stopped.exit_code
        if self.output.json_mode or ("ceilings" in record and record["rows"]):
            self._show(record)
        at, seconds, rows = record["stopped"], record["seconds"], len(record["rows"])
        kept = (
            f"; the record so far, state interrupted: {self.out}" if self.out and "--out" not in self.unwritten else ""
        )
        planned = f": {rows} of {at['rows_planned']} rows measured" if at["rows_planned"] else ""
        self.output.error(f"{stopped} after {seconds:,.0f} s, at {at['part']}{planned}{kept}")
        return stopped.exit_code

    def _keep(self, record: dict[str, Any]) -> None:
        from xgr_engine.bench.record import write_record

        first, self.record = self.record is None, record
        if (out := self.out) is None:
            return
        found = _identity(out)
        if self._ours and found and self._ours != found:
            self._not_written("--out", f"{out} cannot be written: another run writes it too")
            return
        if self._write("--out", out, record, lambda: write_record(out, jsonable(record))):
            self._ours = _identity(out)
        elif first and self.unwritten:
            raise OutputWriteError(f"--out {out}: cannot be written", hint="name a file somewhere else")

    def _write(self, flag: str, path: Path, record: dict[str, Any], write: Callable[[], object]) -> bool:
        """Whether it was written. An older file stays until there are figures to replace it with.

        A file that cannot be written takes nothing along: what was measured is shown.
        """
        if flag in self.older and not has_figures(record):
            if record["state"] != "running":
                self._not_written(flag, f"{path} stays as it was before: nothing was measured")
            return False
        try:
            write()
        except (OSError, UsageError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            self._not_written(flag, f"{path} cannot be written: {why}")
            return False
        self.unwritten.discard(flag)
        return True

    def _not_written(self, flag: str, text: str) -> None:
        if flag not in self.unwritten:
            self.output.warn(f"{flag} {text}")
        self.unwritten.add(flag)

    def _last_words(self, stopped: Stopped) -> None:
        """Just before the process is ended by force."""
        from xgr_engine.bench.foreign.process import end_all

        end_all()
        if self.record is not None:
            self._keep({**self.record, "state": "interrupted"})

    def _show(self, record: dict[str, Any]) -> None:
        from xgr_engine.bench.report.page import write_page

        if self.output.json_mode:  # else they stand in the result
            for text in record["warnings"]:
                self.output.warn(text)
        self.output.result(record, lambda out: show_bench(out, record))
        html = self.html if "ceilings" in record else None
        if html is not None and self._write("--html", html, record, lambda: write_page(html, record)):
            self.output.note(f"report: {html}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from one that another run put in its place; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _first_reason(record: dict[str, Any]) -> str:
    """Why a run measured nothing: its first reason."""
    found = [(part["part"], part["reason"]) for part in record["left_out"]]
    for row in record["rows"]:
        found += [(one["name"], one.get("reason") or one["status"]) for one in row["contenders"]]
    if record["constraint"]:
        found += [(f"{one['items']:,} items", one.get("reason", "")) for one in record["constraint"]["sizes"]]
    return ": ".join(found[0]) if found else ""


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

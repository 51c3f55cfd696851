"""A whole benchmark: rows, ablations, online mode and the rest, put together into one record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from xgr_engine.bench.ablations import run_ablations
from xgr_engine.bench.attention import attention_times
from xgr_engine.bench.claims import paper_claims
from xgr_engine.bench.constraint import ConstraintShape, constraint_costs
from xgr_engine.bench.foreign.process import end_all
from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.machine import Watch, describe_machine, measure_ceilings
from xgr_engine.bench.measure import Budget
from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.online import Trials, online_figures
from xgr_engine.bench.options import BenchOptions
from xgr_engine.bench.phases import trace_batch
from xgr_engine.bench.record import KIND, exceeded, has_figures, one_line
from xgr_engine.bench.report.tables import users_text
from xgr_engine.bench.row import Row
from xgr_engine.bench.subject import Subject, load_subject
from xgr_engine.bench.workloads import Workload
from xgr_engine.job.stop import Stopped
from xgr_engine.progress import NoProgress, ProgressSink
from xgr_engine.xschedule.engines import is_out_of_memory

Record = dict[str, Any]


@dataclass(frozen=True)
class BenchCaller:
    """Who asks: the command line as typed, where progress and notes go, and who keeps the record as it grows."""

    argv: tuple[str, ...] = ()
    progress: ProgressSink = field(default_factory=NoProgress)
    note: Callable[[str], None] = lambda text: None
    keep: Callable[[Record], None] = lambda record: None


class Bench:
    """One run. ``record`` grows part by part, and is complete when ``state`` is ``done``.

    ``failed`` is that of a run that an error ended, or that measured nothing of what was asked for.
    """

    def __init__(self, options: BenchOptions, device: torch.device, caller: BenchCaller) -> None:
        self.options = options
        self.device = device
        self.caller = caller
        self._started = time.monotonic()
        self._at = "the machine's ceilings"  # the part being measured
        self._models = options.geometries or ("",)  # a converted one has no name among the geometries
        deadline = self._started + (options.time_limit_s or float("inf"))
        self._budget = Budget(options.budget_s, options.max_repeats, deadline)
        self.record: Record = {
            "kind": KIND,
            "state": "running",
            "preset": options.preset,
            "command": ["xgr", *caller.argv],
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            # on a CPU every model computes in float32; on a GPU the model says, once it is there
            "options": asdict(options) | {"dtype": options.dtype if device.type == "cuda" else "float32"},
            "machine": describe_machine(device),
            "subject": None,
            "warnings": [],
            "left_out": [],
            "rows": [],
            "attention": [],
            "online": [],
            "ablations": None,
            "constraint": None,
            "timeline": None,
            "phases": None,
            "claims": [],
            "noise": {},
            "seconds": None,
        }

    def run(self) -> Record:
        """Everything the options ask for. A run that is stopped keeps what it has as ``interrupted``."""
        self.caller.keep(self.record)
        try:
            self._run()
        except (Stopped, KeyboardInterrupt, SystemExit) as stop:
            self._interrupted(getattr(stop, "reason", "Ctrl-C" if isinstance(stop, KeyboardInterrupt) else "a signal"))
            raise
        except Exception as error:
            self._leave_out(self._at, error)
            self._close("failed")
            raise
        finally:
            end_all()
        return self.record

    def _interrupted(self, by: str) -> None:
        self.record["stopped"] = {"by": by, "part": self._at, "rows_planned": self._rows_planned()}
        self.record["left_out"].append({"part": self._at, "reason": f"stopped by {by}"})
        self._close("interrupted")

    def _close(self, state: str) -> None:
        self.record["claims"] = paper_claims(self.record)
        if "ceilings" in self.record:
            self.record["warnings"] += exceeded(self.record["ceilings"], self.record["rows"])
        self.record["seconds"] = time.monotonic() - self._started
        self.record["state"] = state
        self.caller.keep(self.record)

    def _run(self) -> None:
        watch = Watch(self.device)
        try:
            with watch:
                self._all_parts()
        finally:  # figures of a run that is stopped were disturbed as well
            self.record["warnings"] += watch.warnings
            self.record["noise"] = watch.facts
        self._close("done" if self._measured() else "failed")

    def _all_parts(self) -> None:
        options = self.options
        seconds = min(2.0, options.budget_s)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.record["ceilings"] = measure_ceilings(self.device, dtype, seconds).to_json()
        free_memory(self.device)
        if options.constraint:
            self._part("constraint", self._constraint)
        if options.rows:
            self.caller.progress.start(self._rows_planned(), "rows")
        try:
            if options.rows or options.ablations or options.online or options.attention or options.timeline:
                self._all_models()
        finally:
            self.caller.progress.finish()

    def _measured(self) -> bool:
        """Whether a row was measured; without rows, anything else that was asked for."""
        return any(map(_row_has_figures, self.record["rows"])) if self.options.rows else has_figures(self.record)

    def _rows_planned(self) -> int:
        options = self.options
        contexts = 1 if options.inputs else len(options.contexts)
        planned = len(self._models) * contexts * len(options.users) * len(options.beams)
        return planned if options.rows else 0

    # ---- one model --------------------------------------------------------------------------------------------------

    def _all_models(self) -> None:
        subject: Subject | None = None
        first = True
        for name in self._models:
            if not self._in_time(f"model {name}"):
                continue
            subject = None  # before the next takes its place
            free_memory(self.device)
            self._at = f"model {name}" if name else "the model"
            try:
                subject = self._load(name)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._leave_out(self._at, error)
                continue
            self.record["options"]["dtype"] = subject.model.dtype
            self._one_model(subject, first=first)
            first = False
        if subject is not None and self.options.timeline:
            # of the last model measured, and last of all: once a GPU's profiler has run, every later launch is slower
            self._part("timeline", partial(trace_batch, subject.chosen_row(), self.record), brief=True)

    def _one_model(self, subject: Subject, *, first: bool) -> None:
        model = subject.model
        self.caller.note(f"{model.name}: {model.bytes / 1e9:,.2f} GB of weights, {subject.catalog.name}")
        if self.options.rows:
            for workload in subject.rows():
                self._row(workload)
        chosen = subject.chosen_row()
        if self.options.attention:
            self._part("attention", partial(self._attention, subject))
        if first and self.options.ablations:
            self._part("ablations", partial(self._ablations, chosen))
        if self.options.online:
            for beam in self.options.online_beams or self.options.beams:
                self._part(f"online, W {beam}", partial(self._online, subject, beam))

    def _load(self, name: str) -> Subject:
        subject = load_subject(self.options, name, self.device)
        self.record["subject"] = subject.contents()
        return subject.with_prompts()

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _row(self, workload: Workload) -> None:
        def measure() -> None:
            names = list(dict.fromkeys(("xgr", *self.options.baselines)))
            self.record["rows"].append(Row(workload, names, self._budget, self.caller.note).measure())

        size = f"{workload.context} tokens x {users_text(workload.users)} x W {workload.search.beam}"
        before = len(self.record["rows"])
        self._part(f"{workload.model.name}, {size}", measure)
        self.caller.progress.advance(sum(map(_row_has_figures, self.record["rows"][before:])))

    def _part(self, name: str, measure: Callable[[], None], *, brief: bool = False) -> None:
        """Measure a part; if it fails, report that and go on. A brief one may begin after the time limit."""
        if not brief and not self._in_time(name):
            return
        self._at = name
        self.caller.note(name)
        try:
            measure()
        except Exception as error:
            self._leave_out(name, error)
        free_memory(self.device)
        self.caller.keep(self.record)

    def _leave_out(self, part: str, error: Exception) -> None:
        reason = "out of memory" if is_out_of_memory(error) else one_line(error)
        self.record["left_out"].append({"part": part, "reason": reason})

    def _in_time(self, part: str) -> bool:
        limit = self.options.time_limit_s
        if limit is None or time.monotonic() - self._started < limit:
            return True
        self.record["left_out"].append({"part": part, "reason": f"the time limit of {limit:,.6g} s had passed"})
        return False

    def _constraint(self) -> None:
        options = self.options
        geometry = find_geometry(options.geometries[0])
        shape = ConstraintShape(
            options.users[-1], options.beams[-1], options.codes or geometry.codes, options.levels or geometry.levels
        )

        def keep(record: Record) -> None:
            self.record["constraint"] = record
            self.caller.keep(self.record)

        constraint_costs(
            geometry,
            shape,
            options.constraint_items,
            self.device,
            options.seed,
            self.caller.note,
            keep,
            self._budget.over,
        )

    def _attention(self, subject: Subject) -> None:
        for workload in subject.attention_shapes():
            self.record["attention"].append(attention_times(workload))

    def _ablations(self, workload: Workload) -> None:
        self.record["ablations"] = run_ablations(workload, self._budget, self.caller.note)

    def _online(self, subject: Subject, beam: int) -> None:
        options, workload = self.options, subject.online_shape(beam)
        trials = Trials(options.slo_ms, options.online_requests, options.online_trial_s)
        for name in options.online_contenders:
            entry: Record = {"contender": name, "model": workload.model.name, "context": workload.context, "beam": beam}
            self.caller.note(f"  {name}")
            if self._budget.over() and name != options.online_contenders[0]:
                entry |= {"status": "not run", "reason": "the time limit had passed", "rate": None}
            else:
                entry |= online_figures(name, workload, trials, self.caller.note, self._budget.deadline)
            self.record["online"].append(entry)


def _row_has_figures(row: Record) -> bool:
    """Whether any contender of a row ran."""
    return any(one["status"] == "ok" for one in row["contenders"])


def run_bench(options: BenchOptions, device: torch.device, caller: BenchCaller) -> Record:
    """Run a benchmark and return its record (docs/benchmarking.md describes the fields)."""
    return Bench(options, device, caller).run()

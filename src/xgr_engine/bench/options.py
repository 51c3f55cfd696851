"""Options of a benchmark, and the presets that fill them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal

from xgr_engine.errors import UsageError
from xgr_engine.options import ScoreOver, check_types

PRESETS = ("sid-gr", "xgr-paper", "static", "quick")
_NUMBER = re.compile(r"\d+(\.\d+)?([eE]\+?\d{1,4})?")


@dataclass(frozen=True)
class BenchOptions:
    """What is measured. One row a combination of geometry, context, users and beam.

    Values are checked here; what means nothing beside the others is refused by :mod:`xgr_engine.bench.choices`.

    Attributes:
        preset: where the values came from.
        geometries: named sizes with random weights; unused with ``model``.
        model, vocab: directories of ``xgr convert`` and ``xgr build-vocab``.
        inputs: histories for real prompts; whole_prompts: of any length that the model reads, else those that fit into
            ``contexts``.
        items, codes, levels: synthetic catalog; None: the geometry's own code space.
        contexts: prompt tokens; users: prompts a batch; beams: W; top_k: K, W where that is less; None: K = W, so that
            nothing is pruned.
        shared_prefix: tokens that all synthetic prompts begin with.
        baselines: contenders beside the engine.
        budget_s: seconds of measurement a contender and row; one run is always measured.
        max_repeats: most latency samples a contender and row.
        ablations, online, attention, constraint, timeline: parts of the report.
        constraint_items: catalog sizes of the constraint's cost.
        slo_ms: what the P99 of the online mode must keep.
        online_beams: widths of the online mode, those of ``beams`` where empty.
        online_requests, online_trial_s: least requests and least seconds of a trial; online_contenders: who takes part.
        time_limit_s: no further part is begun after that many seconds; the report lists what was left out.
    """

    preset: str | None = None
    geometries: tuple[str, ...] = ()
    model: str | None = None
    vocab: str | None = None
    inputs: tuple[str, ...] = ()
    whole_prompts: bool = False
    history_col: str = "history"
    history_format: str = "items"
    items: int = 1_000_000
    codes: int | None = None
    levels: int | None = None
    contexts: tuple[int, ...] = (1000,)
    users: tuple[int, ...] = (8,)
    beams: tuple[int, ...] = (512,)
    top_k: int | None = 50
    score_over: ScoreOver = "vocab"
    shared_prefix: int = 0
    baselines: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "bfloat16"
    seed: int = 0
    budget_s: float = 6.0
    max_repeats: int = 100
    rows: bool = True
    ablations: bool = True
    online: bool = False
    attention: bool = True
    constraint: bool = False
    timeline: bool = True
    constraint_items: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000)
    slo_ms: float = 200.0
    online_beams: tuple[int, ...] = ()
    online_requests: int = 200
    online_trial_s: float = 4.0
    online_contenders: tuple[str, ...] = ("xgr", "paged")
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("contexts", "users", "beams"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise UsageError(f"--{name.rstrip('s')}: needs numbers of at least 1")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k {self.top_k}: must be at least 1")
        for flag, number in (("budget", self.budget_s), ("slo-ms", self.slo_ms), ("time-limit", self.time_limit_s)):
            if number is not None and not number > 0:  # this way round refuses NaN too
                raise UsageError(f"--{flag} {number:g}: must be above 0")
        if self.max_repeats < 1:
            raise UsageError(f"max_repeats {self.max_repeats}: must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: must be at least 0 and below 2**63")
        self._check_codes()
        self._check_workload()

    def _check_codes(self) -> None:
        if self.codes is None or self.levels is None:
            return
        space = f"--codes {self.codes}x{self.levels}"
        if self.codes * self.levels >= 2**30:
            raise UsageError(f"{space}: needs {self.codes * self.levels:,} tokens, must be fewer than 2**30")
        if self.levels * math.log2(self.codes) > 63:  # numbers of SIDs are drawn as int64
            raise UsageError(f"{space}: makes more than 2**63 SIDs", hint="use fewer codes or levels")

    def _check_workload(self) -> None:
        if self.shared_prefix >= min(self.contexts):
            raise UsageError(f"--shared-prefix {self.shared_prefix}: must be shorter than the shortest context")
        if (self.model is None) != (self.vocab is None):
            raise UsageError("--model and --vocab go together", hint="give both, or --geometry for random weights")


@dataclass(frozen=True)
class BenchWishes:
    """What the user asked for, as text where it is a list; None keeps the preset's value, or the machine's."""

    preset: str | None = None
    geometry: str | None = None
    model: str | None = None
    vocab: str | None = None
    inputs: tuple[str, ...] = ()
    history_col: str = "history"
    history_format: str = "items"
    items: str | None = None
    codes: str | None = None
    context: str | None = None
    shared_prefix: int = 0
    users: str | None = None
    beam: str | None = None
    top_k: int | None = None
    score_over: ScoreOver = "vocab"
    baselines: str | None = None
    ablations: bool | None = None
    online: bool | None = None
    slo_ms: float = 200.0
    budget_s: float | None = None
    time_limit_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)


def preset_options(name: str, *, on_gpu: bool) -> BenchOptions:
    """The options of a preset.

    Raises:
        UsageError: no such preset.
    """
    everyone = ("hf", "hf-fast", "paged", "paper", "cascade", "flashrec", "vllm")
    base = BenchOptions(preset=name, top_k=None, baselines=everyone)
    if name == "sid-gr":
        return replace(
            base, geometries=("qwen3-1.7b",), contexts=(1000, 5000), users=(1, 2, 4, 8), beams=(256,), budget_s=4.0
        )
    if name == "xgr-paper":
        return replace(
            base,
            geometries=("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "onerec-0.1b", "onerec-1b", "onerec-3b"),
            contexts=(512, 1024, 2048, 3072),
            users=(4,),
            beams=(128, 256, 512),
            budget_s=2.0,
            online=True,
        )
    if name == "static":
        small = ("qwen3-1.7b",) if on_gpu else ("quick",)
        return replace(
            base,
            geometries=small,
            users=(8,) if on_gpu else (2,),
            beams=(256,) if on_gpu else (64,),
            contexts=(1,),
            codes=8192 if on_gpu else 1024,
            levels=3,
            baselines=(),
            rows=False,
            ablations=False,
            attention=False,
            timeline=False,
            constraint=True,
        )
    if name == "quick":
        return replace(
            base,
            geometries=("quick",),
            items=20_000,
            contexts=(64, 128),
            users=(2,),
            beams=(32, 64),
            budget_s=0.25,
            max_repeats=30,
            time_limit_s=45.0,
            online=True,
            online_beams=(64,),
            online_requests=60,
            online_trial_s=1.0,
            online_contenders=("xgr",),
        )
    raise UsageError(f"--preset {name}: must be one of {', '.join(PRESETS)}")


def default_options(*, on_gpu: bool, gpu_bytes: int = 0) -> BenchOptions:
    """What ``xgr bench`` runs when nothing is said: a geometry that fits the machine."""
    everyone = ("hf", "hf-fast", "paged", "paper")
    if not on_gpu:
        return BenchOptions(
            geometries=("quick",),
            items=20_000,
            contexts=(64,),
            users=(2,),
            budget_s=1.0,
            baselines=everyone,
            time_limit_s=90.0,
        )
    geometry = "qwen3-1.7b" if gpu_bytes > 40e9 else "qwen3-0.6b" if gpu_bytes > 12e9 else "onerec-0.1b"
    return BenchOptions(geometries=(geometry,), baselines=everyone)


def parse_count(text: str, flag: str, whole: str | None = None) -> int:
    """``1e6``, ``1000000`` or ``2.5e5`` as a whole number.

    Args:
        whole: what was typed, where ``text`` is a part of it.

    Raises:
        UsageError: anything else.
    """
    typed = text if whole is None else whole
    said = f"{flag} {typed}" if typed.strip() else f"{flag} '{typed}'"
    if _NUMBER.fullmatch(text.strip()):
        number = Decimal(text.strip())  # a float is not exact beyond 2**53, and overflows
        if number >= 1 and number == number.to_integral_value():
            if number >= 2**31:
                raise UsageError(f"{said}: must be below 2**31")
            return int(number)
    raise UsageError(f"{said}: must be a whole number of at least 1, such as 20000 or 1e6")


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """A comma-separated list of counts, each once.

    Raises:
        UsageError: anything else.
    """
    parts = text.split(",")
    if not all(part.strip() for part in parts):
        raise UsageError(f"{flag} '{text}': must be whole numbers separated by commas, such as 8 or 128,256")
    return tuple(dict.fromkeys(parse_count(part, flag, text) for part in parts))


def parse_names(text: str, flag: str) -> tuple[str, ...]:
    """A comma-separated list of names, each once.

    Raises:
        UsageError: there is none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{flag} '{text}': names nothing")
    return names


def parse_codes(text: str) -> tuple[int, int]:
    """``8192x3`` as codes a level and levels.

    Raises:
        UsageError: anything else.
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.strip() for part in parts):
        raise UsageError(f"--codes '{text}': must be CODESxLEVELS, such as 8192x3")
    codes, levels = (parse_count(part, "--codes", text) for part in parts)
    return codes, levels

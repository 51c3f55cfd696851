"""From what was said on a command line to the options of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from xgr_engine.bench.baselines.base import BASELINES
from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.options import (
    BenchOptions,
    default_options,
    parse_codes,
    parse_count,
    parse_counts,
    preset_options,
)
from xgr_engine.errors import UsageError
from xgr_engine.job.engine import resolve_device
from xgr_engine.options import ScoreOver, check_threads


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


def open_device(wanted: str, threads: int | None, note: Callable[[str], None]) -> torch.device:
    """The device, and torch's CPU threads set.

    Raises:
        XgrError: see :func:`xgr_engine.job.engine.resolve_device`.
    """
    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.device(resolve_device(wanted, note).name)


def choose_options(device: torch.device, wishes: BenchWishes) -> BenchOptions:
    """The preset's options, or those that suit the machine, with every wish put in their place.

    Raises:
        UsageError: a wish that cannot be understood, or that contradicts another.
    """
    on_gpu = device.type == "cuda"
    if wishes.preset is not None:
        options = preset_options(wishes.preset, on_gpu=on_gpu)
    else:
        size = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
        options = default_options(on_gpu=on_gpu, gpu_bytes=size)
    changes: dict[str, Any] = {
        "device": str(device),
        "score_over": wishes.score_over,
        "shared_prefix": wishes.shared_prefix,
        "slo_ms": wishes.slo_ms,
        "seed": wishes.seed,
        # the contexts of a preset are made for synthetic prompts
        "whole_prompts": bool(wishes.inputs) and wishes.context is None,
    }
    for name in ("ablations", "online", "budget_s", "time_limit_s", "top_k"):
        if (value := getattr(wishes, name)) is not None:
            changes[name] = value
    for name, flag in (("contexts", "context"), ("users", "users"), ("beams", "beam")):
        if (text := getattr(wishes, flag)) is not None:
            changes[name] = parse_counts(text, f"--{flag}")
    if "beams" in changes:
        changes["online_beams"] = ()
    changes |= _model(wishes, options) | _catalog(wishes, options)
    if wishes.baselines is not None:
        changes["baselines"] = _baselines(wishes.baselines)
        # transformers needs more than a limit of milliseconds for one user: its latency says so already
        online = [name for name in changes["baselines"] if not name.startswith("hf")]
        changes["online_contenders"] = ("xgr", *online)
    return replace(options, **changes)


def _model(wishes: BenchWishes, options: BenchOptions) -> dict[str, Any]:
    if wishes.model is None and wishes.vocab is None:
        names = options.geometries
        if wishes.geometry is not None:
            names = tuple(name.strip() for name in wishes.geometry.split(","))
        own = {find_geometry(name).context for name in names}
        said = wishes.context is not None or wishes.preset is not None
        contexts = {} if said or None in own or len(own) > 1 else {"contexts": tuple(own)}
        return {"geometries": names, **contexts, **({"inputs": wishes.inputs} if wishes.inputs else {})}
    if wishes.geometry is not None or wishes.items is not None or wishes.codes is not None:
        raise UsageError("--model and --vocab bring their own sizes", hint="leave --geometry, --items and --codes out")
    given = {"model": wishes.model, "vocab": wishes.vocab, "inputs": wishes.inputs, "geometries": ()}
    return {**given, "history_col": wishes.history_col, "history_format": wishes.history_format}


def _catalog(wishes: BenchWishes, options: BenchOptions) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if wishes.codes is not None:
        changes["codes"], changes["levels"] = parse_codes(wishes.codes)
    if wishes.items is not None:
        changes["items"] = parse_count(wishes.items, "--items")
        changes["constraint_items"] = (changes["items"],)
    elif wishes.geometry is not None and wishes.preset is None and options.geometries != (wishes.geometry,):
        changes["items"] = 1_000_000 if wishes.geometry != "quick" else 20_000
    return changes


def _baselines(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names == ("none",):
        return ()
    if wrong := [name for name in names if name not in BASELINES]:
        raise UsageError(f"--baselines {wrong[0]}: must be of {', '.join(BASELINES)}, or none")
    return names

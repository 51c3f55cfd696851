"""From what was said on a command line to the options of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from xgr_engine.bench.baselines.base import BASELINES
from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.options import (
    BenchOptions,
    BenchWishes,
    default_options,
    parse_codes,
    parse_count,
    parse_counts,
    parse_names,
    preset_options,
)
from xgr_engine.errors import UsageError
from xgr_engine.job.engine import resolve_device
from xgr_engine.options import check_threads

# Fields of BenchWishes whose options have other names.
_FLAGS = {"inputs": "in", "budget_s": "budget", "time_limit_s": "time-limit"}


def open_device(wanted: str, threads: int | None, note: Callable[[str], None]) -> torch.device:
    """The device, and torch's CPU threads set.

    Raises:
        XgrError: see :func:`xgr_engine.job.engine.resolve_device`.
    """
    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.device(resolve_device(wanted, note).name)


def choose_options(device: torch.device, wishes: BenchWishes, configured: Collection[str] = ()) -> BenchOptions:
    """The preset's options, or those that suit the machine, overridden by the user's wishes.

    Args:
        configured: names of options, as in a configuration file, that come from variables or a file. Nobody typed them
            for this run, so where they mean nothing they are ignored instead of refused.

    Raises:
        UsageError: a wish that cannot be understood, or that means nothing beside the others.
    """
    on_gpu = device.type == "cuda"
    if wishes.preset is not None:
        options = preset_options(wishes.preset, on_gpu=on_gpu)
    else:
        size = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
        options = default_options(on_gpu=on_gpu, gpu_bytes=size)
    wishes = _without_ignored(wishes, options, configured)
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


def _without_ignored(wishes: BenchWishes, options: BenchOptions, configured: Collection[str]) -> BenchWishes:
    """The wishes without configured ones that mean nothing here.

    Raises:
        UsageError: a typed one means nothing here.
    """
    untouched: dict[str, Any] = {field.name: field.default for field in fields(BenchWishes)}
    for names, reason in _misplaced(wishes, options):
        if all(getattr(wishes, name) != untouched[name] for name in names):
            flags = {name: _FLAGS.get(name, name.replace("_", "-")) for name in names}
            dropped = next((name for name in names if flags[name] in configured), None)
            if dropped is None:
                raise UsageError(f"--{flags[names[0]]} {reason}")
            # without it others may mean something else
            return _without_ignored(replace(wishes, **{dropped: untouched[dropped]}), options, configured)
    return wishes


def _misplaced(wishes: BenchWishes, options: BenchOptions) -> Iterator[tuple[tuple[str, ...], str]]:
    """Wishes that would have no effect, or exclude each other: the options (if all are given), and the reason."""
    for name in ("geometry", "items", "codes"):
        for given in ("model", "vocab"):
            yield (name, given), f"does not go with --{given}: --model and --vocab bring their own sizes"
    if options.constraint:
        yield from _misplaced_in_static(wishes, f"--preset {options.preset}")
    if wishes.model is None and wishes.vocab is None:
        yield ("inputs",), "needs --model and --vocab: synthetic prompts need no histories"
    yield ("shared_prefix", "inputs"), "does not go with --in: real prompts are taken as they are"
    for name in ("history_col", "history_format"):
        if not wishes.inputs:
            yield (name,), "means nothing without --in"
    if not (options.online if wishes.online is None else wishes.online):
        yield ("slo_ms",), "means nothing without --online"
    beams = options.beams if wishes.beam is None else parse_counts(wishes.beam, "--beam")
    if wishes.top_k is not None and wishes.top_k > min(beams):
        yield ("top_k",), f"{wishes.top_k}: is above --beam {min(beams)}, and no list is longer than the beam"


def _misplaced_in_static(wishes: BenchWishes, preset: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for name in ("model", "vocab", "inputs"):
        yield (name,), f"does not go with {preset}: the constraint's cost is measured on synthetic catalogs"
    if not (wishes.online or wishes.ablations):
        for name in ("top_k", "score_over", "context", "shared_prefix", "baselines"):
            yield (name,), f"means nothing with {preset}: it measures the constraint alone, and no rows"
    for name in ("geometry", "users", "beam"):
        if "," in (getattr(wishes, name) or ""):
            yield (name,), f"{getattr(wishes, name)}: {preset} takes one"


def _model(wishes: BenchWishes, options: BenchOptions) -> dict[str, Any]:
    if wishes.model is None and wishes.vocab is None:
        names = options.geometries
        if wishes.geometry is not None:
            names = parse_names(wishes.geometry, "--geometry")
        own = {find_geometry(name).context for name in names}
        said = wishes.context is not None or wishes.preset is not None
        contexts = {} if said or None in own or len(own) > 1 else {"contexts": tuple(own)}
        return {"geometries": names, **contexts, **({"inputs": wishes.inputs} if wishes.inputs else {})}
    given = {"model": wishes.model, "vocab": wishes.vocab, "inputs": wishes.inputs, "geometries": ()}
    return {**given, "history_col": wishes.history_col, "history_format": wishes.history_format}


def _catalog(wishes: BenchWishes, options: BenchOptions) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if wishes.codes is not None:
        changes["codes"], changes["levels"] = parse_codes(wishes.codes)
    if wishes.items is not None:
        changes["items"] = parse_count(wishes.items, "--items")
        changes["constraint_items"] = (changes["items"],)
    elif wishes.geometry is not None and wishes.preset is None:
        names = parse_names(wishes.geometry, "--geometry")
        if names != options.geometries:
            changes["items"] = 1_000_000 if names != ("quick",) else 20_000
    return changes


def _baselines(text: str) -> tuple[str, ...]:
    names = parse_names(text, "--baselines")
    if names == ("none",):
        return ()
    if wrong := [name for name in names if name not in BASELINES]:
        raise UsageError(f"--baselines {wrong[0]}: must be one of {', '.join(BASELINES)}, or none")
    return names

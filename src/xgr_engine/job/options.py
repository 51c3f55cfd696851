"""Options of ``xgr recommend``, and which of them belong to the fingerprint of a run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from xgr_engine.errors import UsageError
from xgr_engine.job.filter_options import FilterOptions, parse_matches
from xgr_engine.options import (
    HistoryFormat,
    Layout,
    ListText,
    OnEmpty,
    OnError,
    OnUnknown,
    SearchOptions,
    check_threads,
    check_types,
)

# Options that cannot change what is written. Everything else is part of the fingerprint; a test enforces that a new
# option is either in the fingerprint or named here. Paths of inputs, model, vocabulary and item files are named here
# because their contents are fingerprinted instead (job/manifest.py, job/filters.py).
NOT_IN_FINGERPRINT = frozenset(
    {
        "model",
        "vocab",
        "out",
        "device",
        "threads",
        "max_memory",
        "max_rejects",
        "fresh",
        "histories.paths",
        "filters.allow_items",
        "filters.deny_items",
        "operation.grace",
        "operation.wait",
        "operation.metrics_file",
        "operation.cache_dir",
        "operation.trace",
        "slo_ms",
    }
)


def _at_least_1(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{option} {value}: must be at least 1")


@dataclass(frozen=True)
class HistoryOptions:
    """Where the users' rows are and how one row becomes a prompt and an exclusion set.

    Attributes:
        paths: files, globs or directories (``job.inputs.find_files``).
        user_col: column copied to the output unchanged.
        history_col: oldest interaction first.
        history_format: ``items`` (ids of the catalog), ``sids`` (SID text), ``tokens`` (model token ids of whole SIDs,
            flat), ``prompt`` (ready prompt text or token ids).
        list_text: how to parse a list column that is stored as text, if at all.
        max_history: newest whole items that enter the prompt; exclusions always see the whole history.
        on_unknown: an id that is not in the catalog: drop it, reject the row, or fail the run.
        on_empty: a history without a known item: reject the row, or render the prompt template without items.
        exclude_seen: never return an item of the history.
        exclude_col: list column of item ids that this user must not get.
        match: ``attribute`` or ``attribute=column``: only items whose attribute equals the user's column.
        keep: input columns copied to the output; ``("*",)`` copies all.
        limit: only the first rows of the input.
    """

    paths: tuple[str, ...]
    user_col: str = "user_id"
    history_col: str = "history"
    history_format: HistoryFormat = "items"
    list_text: ListText | None = None
    max_history: int | None = None
    on_unknown: OnUnknown = "drop"
    on_empty: OnEmpty = "reject"
    exclude_seen: bool = False
    exclude_col: str | None = None
    match: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    limit: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not self.paths:
            raise UsageError("no input given", hint="name at least one file, glob or directory with --in")
        _at_least_1("--max-history", self.max_history)
        _at_least_1("--limit", self.limit)
        parse_matches(self.match)
        if self.history_format == "prompt":
            self._check_ready_prompts()

    def _check_ready_prompts(self) -> None:
        if self.exclude_seen and self.exclude_col is None:
            raise UsageError(
                "--exclude-seen cannot see the items inside ready prompts",
                why="--history-format prompt gives text or token ids, not items",
                hint="give each user's seen items with --exclude-col",
            )
        if self.max_history is not None:
            raise UsageError(
                "--max-history cannot cut ready prompts",
                why="it is not known where an item begins inside a ready prompt",
                hint="shorten the prompts when they are made, or give histories as items, sids or tokens",
            )
        if self.on_empty == "template":
            raise UsageError(
                "--on-empty template does not work with ready prompts, which have no template",
                hint="use --on-empty reject, or write those prompts",
            )


@dataclass(frozen=True)
class OperationOptions:
    """How the job behaves towards the system that runs it; nothing in here changes what is written.

    Attributes:
        grace: seconds between a signal and the end of the process.
        wait: seconds to wait for another run that holds the output; 0 gives up at once.
        metrics_file: Prometheus textfile written when the run ends, however it ends.
        cache_dir: where compiled kernels are kept.
        trace: file for a timeline of every thread and lane, in the Chrome trace format.
    """

    grace: float = 20.0
    wait: float = 0.0
    metrics_file: str | None = None
    cache_dir: str | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.grace < 0 or self.wait < 0:
            raise UsageError(f"--grace {self.grace:g} --wait {self.wait:g}: neither may be negative")


@dataclass(frozen=True)
class RecommendOptions:
    """All options of ``xgr recommend``.

    Attributes:
        item_cols: catalog columns written beside each recommended item.
        layout: ``nested`` (one row per user) or ``long`` (one row per recommendation).
        shard_rows: users per part file.
        partition_by: columns in the names of the input's directories by which the output is split as well.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads of the computation; None leaves torch's choice.
        max_memory: bytes that the computation may plan for (model weights not counted); None: from free memory.
        slo_ms: batches are closed before they are expected to take longer; None: by capacity alone.
        max_rejects: a count (``100``) or a share (``1%``) of rows; more fail the run with exit code 3.
        on_error: a row that makes the engine raise: reject it, or fail the run.
        fresh: remove what an earlier run of xgr wrote into ``out``.
    """

    histories: HistoryOptions
    search: SearchOptions = field(default_factory=SearchOptions)
    filters: FilterOptions = field(default_factory=FilterOptions)
    model: str = "model"
    vocab: str = "vocab"
    out: str = "recs"
    item_cols: tuple[str, ...] = ()
    layout: Layout = "nested"
    shard_rows: int = 16_384
    partition_by: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | None = None
    max_memory: int | None = None
    slo_ms: float | None = None
    max_rejects: str = "1%"
    on_error: OnError = "reject"
    fresh: bool = False
    operation: OperationOptions = field(default_factory=OperationOptions)

    def __post_init__(self) -> None:
        check_types(self)
        if "://" in self.out and not self.out.startswith("s3://"):
            raise UsageError(f"--out {self.out}: only s3:// is known", hint="name a directory, or s3://bucket/folder")
        _at_least_1("--shard-rows", self.shard_rows)
        check_threads(self.threads)
        if self.slo_ms is not None and not self.slo_ms > 0:
            raise UsageError(f"--slo-ms {self.slo_ms:g}: must be above 0")
        max_rejects_of(self.max_rejects, 0)
        taken = {"item_id", "score", "sid"}
        if clash := sorted(taken.intersection(self.item_cols)):
            raise UsageError(f"--item-cols {clash[0]}: the output itself uses this name")


def max_rejects_of(text: str, rows: int) -> int:
    """Rows that may be rejected out of ``rows``: ``100`` is a count, ``1%`` and ``0.01`` are shares.

    Raises:
        UsageError: neither of them, negative, or a share above 1.
    """
    cleaned = text.strip()
    try:
        if cleaned.isdecimal():
            return int(cleaned)
        share = float(cleaned[:-1]) / 100 if cleaned.endswith("%") else float(cleaned)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"--max-rejects {text}: must be a count such as 100 or a share such as 1% or 0.01")
    # The small term keeps 29% of 100 at 29: 0.29 * 100 is 28.999999999999996 in binary floating point.
    return int(share * rows + 1e-9)


_MEMORY = re.compile(r"([0-9.]+(?:E[0-9]+)?)(?:([KMGT])?(I?)B?)?")


def parse_memory(text: str) -> int:
    """``2GB`` -> 2_000_000_000, ``512MiB`` -> 536_870_912, ``1e9`` -> 1_000_000_000 bytes.

    Raises:
        UsageError: not a size, or zero.
    """
    match = _MEMORY.fullmatch(text.strip().replace("_", "").upper())
    size = 0
    if match and (match[2] or not match[3]):
        base = 1024 if match[3] else 1000
        with contextlib.suppress(ValueError, OverflowError):
            size = int(float(match[1]) * base ** ("KMGT".index(match[2]) + 1 if match[2] else 0))
    if size < 1:
        raise UsageError(f"--max-memory {text}: must be a size such as 2GB or 512MiB")
    return size


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(option: str, text: str) -> float:
    """``10m`` -> 600.0 seconds; ``20``, ``20s``, ``1.5h`` and ``2d`` as well.

    Raises:
        UsageError: no duration.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)", text.strip().lower())
    if match is None:
        raise UsageError(f"{option} {text}: must be a duration such as 20s, 10m or 1.5h")
    return float(match[1]) * _SECONDS[match[2]]


def flatten(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each option, nested dataclasses opened, numpy's numbers as Python's for JSON."""
    for entry in fields(options):
        value = getattr(options, entry.name)
        if is_dataclass(value):
            yield from flatten(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", value.item() if hasattr(value, "item") else value


def fingerprinted(options: RecommendOptions) -> dict[str, Any]:
    """The options that decide what is written, JSON-able, by dotted name."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flatten(options)
        if name not in NOT_IN_FINGERPRINT
    }

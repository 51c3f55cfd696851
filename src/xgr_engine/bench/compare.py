"""Two results side by side: ratios, what got worse, and what is no longer there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgr_engine.bench.record import read_record
from xgr_engine.bench.record_entries import Entry, Figure, Subject, entries_of, request_of, subject_of
from xgr_engine.bench.record_fields import Field, FieldError
from xgr_engine.errors import InputError, UsageError

Record = dict[str, Any]
MISSING = "missing"  # the status of what has no entry any more


def parse_share(text: str) -> float:
    """``5%`` or ``0.05`` as a share; one of 100 % or more needs the sign, as ``5`` is meant as 5 %.

    Raises:
        UsageError: anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    if not found:
        raise UsageError(f"--fail-over {text}: must be a share such as 5% or 0.05")
    number, sign = float(found.group(1)), found.group(2)
    if number >= 1 and not sign:
        raise UsageError(
            f"--fail-over {text}: would be {number:.0%}",
            why="a number without % is a share, and must be below 1",
            hint="give percent with the sign, such as 5%, or a share, such as 0.05",
        )
    return number / 100 if sign else number


@dataclass(frozen=True)
class Result:
    """One side of a comparison, its fields checked.

    Attributes:
        name: the file.
        request: what the run was asked for (:func:`request_of`).
        unfinished: what its record says where the run did not end by itself.
        warnings: that the run gave about its own figures.
        left_out: ``part: reason`` of everything that was not measured.
        slo_ms: limit of the online mode.
    """

    name: str
    machine: str
    entries: dict[tuple[Any, ...], Entry]
    request: dict[str, list[Any]]
    unfinished: str
    warnings: list[str]
    left_out: list[str]
    slo_ms: float | None

    def was_asked_for(self, entry: Entry) -> bool:
        """Whether this run should have had a counterpart of another's entry, as far as its record tells."""
        return all(value in self.request[name] for name, value in entry.asks.items() if name in self.request)


def compare_files(before: Path, after: Path, limit: float | None) -> Record:
    """:func:`compare_records` of two files."""
    names = str(before), str(after)
    compared = compare_records(read_record(before), read_record(after), limit, names)
    return {"before": names[0], "after": names[1]} | compared


def compare_records(
    before: Record, after: Record, limit: float | None, names: tuple[str, str] = ("the first", "the second")
) -> Record:
    """Ratios after / before of every figure that both have, row by row and contender by contender.

    Models and catalogs are matched by content where both records tell it, else by name.

    Args:
        limit: share beyond which a figure that got worse is a regression; where it has an interval, the intervals of
            both runs must lie apart as well, and one of too few samples, or of a search cut short, is ``not_counted``
            instead. What ran before and was asked for again, but has no figures now, is a regression. None: nothing is.
        names: of the records, for messages.

    Raises:
        InputError: the two have nothing in common, or one is damaged; names the field.
    """
    old, new = _read_both(before, after, names)
    warnings = [f"{one.name}: {one.unfinished}" for one in (old, new) if one.unfinished]
    warnings += [f"{one.name}: {text}" for one in (old, new) for text in one.warnings]
    if old.slo_ms != new.slo_ms:
        with_rates = any(key[0] == "online" for one in (old, new) for key in one.entries)
        warnings += [f"online rates are not compared: {_limits(old, new)}"] if with_rates else []
        for one in (old, new):
            for key in [key for key in one.entries if key[0] == "online"]:
                del one.entries[key]
    common = [key for key in old.entries if key in new.entries]
    alone = [entry for key, entry in old.entries.items() if key not in new.entries]
    gone = [entry for entry in alone if entry.status == "ok" and new.was_asked_for(entry)]
    if not common and not gone:
        raise _nothing_in_common(old, new)
    lines = [line for key in common for line in _compare_entries(old.entries[key], new.entries[key], limit)]
    lines += [_line(entry, "status", entry.status, MISSING, limit is not None) for entry in gone]
    return {
        "machines": [old.machine, new.machine],
        "same_machine": old.machine == new.machine,
        "warnings": warnings,
        "rows": lines,
        "only_before": [entry.title for entry in alone if entry not in gone],
        "only_after": [entry.title for key, entry in new.entries.items() if key not in old.entries],
        "left_out": new.left_out,
        "regressions": [line for line in lines if line["regression"]],
        "not_counted": [line for line in lines if line["not_counted"]],
    }


# ---- reading --------------------------------------------------------------------------------------------------------


def _read_both(before: Record, after: Record, names: tuple[str, str]) -> tuple[Result, Result]:
    subjects: list[Subject | None] = []
    for name, record in zip(names, (before, after), strict=True):
        with _naming(name):
            subjects.append(subject_of(Field(record)))
    by_content = None not in subjects
    old, new = (
        _read(name, Field(record), subject if by_content else None)
        for name, record, subject in zip(names, (before, after), subjects, strict=True)
    )
    return old, new


def _read(name: str, record: Field, subject: Subject | None) -> Result:
    with _naming(name):
        left_out = [f"{one.at('part').text()}: {one.at('reason').text()}" for one in record.at("left_out").entries()]
        return Result(
            name,
            record.at("machine", "device_name").text(),
            entries_of(record, subject),
            request_of(record, subject),
            _unfinished(record.at("state").text()),
            [text.text() for text in record.at("warnings").entries()] if record.has("warnings") else [],
            left_out,
            record.at("options", "slo_ms").number(),
        )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """A wrong field becomes an error that names the record."""
    try:
        yield
    except FieldError as error:
        raise InputError(
            f"{name}: fields of a benchmark's result are missing or have the wrong type",
            why=str(error),
            hint="give files unchanged, as xgr bench --json or --out wrote them",
        ) from error


def _unfinished(state: str) -> str:
    if state == "done":
        return ""
    reasons = {"running": "the run is not over, or died", "failed": "an error ended the run, or it measured nothing"}
    return f"is not a complete result, its state is {state}: {reasons.get(state, 'the run was stopped')}"


def _limits(old: Result, new: Result) -> str:
    return " and ".join(f"--slo-ms {one.slo_ms:g}" for one in (old, new) if one.slo_ms is not None)


def _nothing_in_common(old: Result, new: Result) -> InputError:
    examples = [f"{one.name} has {_example(one)}" for one in (old, new)]
    return InputError(
        "the two results have no row in common",
        why="; ".join(examples),
        hint="model, catalog, dtype, context, users, beam, top-k and mode must be the same",
    )


def _example(result: Result) -> str:
    models = ", ".join(str(name) for name in result.request.get("models", []))
    first = next(iter(result.entries.values()), None)
    return f"{first.title} (model {models})" if first is not None else f"nothing (model {models})"


# ---- comparing ------------------------------------------------------------------------------------------------------


def _compare_entries(old: Entry, new: Entry, limit: float | None) -> list[Record]:
    if old.status != new.status:
        return [_line(old, "status", old.status, new.status, limit is not None and old.status == "ok")]
    if old.status != "ok":
        return []
    lines: list[Record] = []
    if old.answers != new.answers:
        worse = limit is not None and old.answers == "equal"
        lines.append(_line(old, "answers", old.answers, new.answers, worse))
    for name in (name for name in old.figures if name in new.figures):
        first, second = old.figures[name], new.figures[name]
        if first.value is not None or second.value is not None:
            worse = limit is not None and _is_worse(first, second, limit)
            few = worse and second.value is not None and (first.few_samples or second.few_samples)
            lines.append(_line(old, name, first.value, second.value, worse and not few, not_counted=few))
    return lines


def _is_worse(old: Figure, new: Figure, limit: float) -> bool:
    """Whether it got worse. A figure that is gone is worse, unless it was derived from others, which are compared."""
    if old.value is None:
        return False
    if new.value is None:
        return not old.derived
    if old.more_is_better:
        return old.value / new.value - 1 > limit and new.high < old.low
    return new.value - old.value > max(limit * old.value, old.slack) and new.low > old.high


def _line(entry: Entry, figure: str, before: Any, after: Any, worse: bool, *, not_counted: bool = False) -> Record:
    ratio = after / before if before and after is not None and not isinstance(before, str) else None
    line = {"row": entry.title, "contender": entry.contender, "figure": figure, "before": before, "after": after}
    return {**line, "ratio": ratio, "regression": worse, "not_counted": not_counted}

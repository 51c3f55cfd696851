"""What can be compared of a benchmark's record: who did what, under which key, with which figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xgr_engine.bench.record_fields import Field, FieldError

# What a row must have in common with its counterpart beside its model, its catalog and the contender.
_TEXTS, _NUMBERS = ("dtype", "score_over", "prompts"), ("items", "context", "users", "beam", "top_k", "shared_prefix")
# Options that hold for all rows of a run.
_SETTINGS = ("items", "codes", "levels", "score_over", "shared_prefix", "top_k", "inputs", "catalog", "gpu")
# Resident memory of two runs of the same code differs by some MB: by what the allocator has at hand.
_HOST_NOISE = 16 * 2**20
MIN_SAMPLES = 3  # with fewer, an interval says nothing about what another run would find
_CLAMPED_MS = 1e-6  # what a difference of times that came out negative was once recorded as


@dataclass(frozen=True)
class Figure:
    """A figure of one contender.

    Attributes:
        value: None where the run has none: null, NaN, or 0 where only more than that makes sense.
        low, high: its interval; :meth:`exact`: a figure without one.
        slack: a difference up to this is none.
        derived: made of others, which are compared as well; it may be absent.
        few_samples: fewer than ``MIN_SAMPLES``, or from a search that was cut short: getting worse is no regression.
    """

    value: float | None
    low: float
    high: float
    more_is_better: bool = False
    slack: float = 0.0
    derived: bool = False
    few_samples: bool = False

    @classmethod
    def exact(cls, value: float | None, **more: Any) -> Figure:
        """The interval is the value itself."""
        return cls(value, value or 0.0, value or 0.0, **more)


@dataclass(frozen=True)
class Entry:
    """One contender in one row, online setting, catalog size of the constraint, or shape of the attention.

    Attributes:
        key: by which it is matched; the first part is ``rows``, ``online``, ``constraint`` or ``attention``.
        title: of the row, for people.
        status: ``ok``, or why there are no figures.
        answers: ``equal``, what is wrong with them, or ``not compared``; None where they are not judged.
        asks: what a run must have been asked for to have this entry; see :func:`request_of`.
    """

    key: tuple[Any, ...]
    title: str
    contender: str
    status: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    answers: str | None = None
    asks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """The contents of the model directory and of the vocabulary that a run measured."""

    model: str
    catalog: str


def subject_of(record: Field) -> Subject | None:
    """None for random weights, and in records of before there were fingerprints."""
    if not record.has("subject"):
        return None
    subject = record.at("subject")
    return Subject(subject.at("model_fingerprint").text(), subject.at("catalog_hash").text())


def request_of(record: Field, subject: Subject | None) -> dict[str, list[Any]]:
    """What a run was asked for: the values of every option, those of ``_SETTINGS`` as they hold for all rows.

    Beside the options' names: ``models``, ``contenders``, ``catalog``, ``gpu``, and which of several contexts, users,
    beams and models the parts choose that take one of each. What the record does not say is left out.
    """
    options = record.at("options")
    if not isinstance(options.value, dict):
        raise FieldError("options must be an object")
    asked = {name: value if isinstance(value, list) else [value] for name, value in options.value.items()}
    contexts, users, beams = (
        [one.whole() for one in options.at(name).entries()] for name in ("contexts", "users", "beams")
    )
    geometries, baselines = ([one.text() for one in options.at(name).entries()] for name in ("geometries", "baselines"))
    models: list[str | None] = [*geometries]
    asked |= {
        "models": models or [subject.model if subject else options.value.get("model")],
        "catalog": [subject.catalog if subject else options.value.get("vocab")],
        "contenders": ["xgr", *baselines],
        "gpu": [_on_gpu(record)],
        "inputs": [bool(options.value.get("inputs"))],
        "online_beams": asked.get("online_beams") or beams,
        "online_context": contexts[len(contexts) // 2 :][:1],
        "last_context": contexts[-1:],
        "last_users": users[-1:],
        "last_beam": beams[-1:],
        "first_model": geometries[:1],
    }
    return {name: values for name, values in asked.items() if values}


def entries_of(record: Field, subject: Subject | None) -> dict[tuple[Any, ...], Entry]:
    """All entries by key.

    Args:
        subject: by which the model and the catalog are matched; None: by their names.

    Raises:
        FieldError: a field that is compared is missing or holds something else.
    """
    request = request_of(record, subject)
    settings = {name: request[name][0] for name in _SETTINGS if name in request}
    found = [
        *_rows(record, subject, settings),
        *_online(record, subject, settings),
        *_attention(record, subject, settings),
        *_constraint(record, settings),
    ]
    return {entry.key: entry for entry in found}


def _on_gpu(record: Field) -> bool:
    return record.at("machine", "device").text().startswith("cuda")


def _rows(record: Field, subject: Subject | None, settings: dict[str, Any]) -> Iterator[Entry]:
    for row in record.at("rows").entries():
        shape: dict[str, Any] = {name: row.at(name).text() for name in _TEXTS}
        shape |= {name: row.at(name).whole() for name in _NUMBERS}
        name, catalog = row.at("model").text(), row.at("catalog").text()
        model = subject.model if subject else name
        title = f"{name}, {shape['context']} x {shape['users']} x W {shape['beam']}"
        asks = settings | {"rows": True, "models": model, "users": shape["users"], "beams": shape["beam"]}
        if shape["prompts"] == "synthetic":  # else it is the longest prompt that there was
            asks["contexts"] = shape["context"]
        for one in row.at("contenders").entries():
            contender, status = one.at("name").text(), one.at("status").text()
            key = ("rows", model, subject.catalog if subject else catalog, *shape.values(), contender)
            asks = asks | {"contenders": contender}
            if status == "ok":
                figures = _row_figures(one, on_gpu=_on_gpu(record))
                answers = _marks(one.at("parity", "marks")) if one.at("parity").value is not None else "not compared"
                yield Entry(key, title, contender, status, figures, answers, asks)
            else:
                yield Entry(key, title, contender, status, asks=asks)


def _row_figures(one: Field, *, on_gpu: bool) -> dict[str, Figure]:
    if on_gpu:
        memory = {"device memory, bytes": Figure.exact(one.at("device_peak_bytes").number())}
    else:
        memory = {"memory on top, bytes": Figure.exact(one.at("host_own_bytes").number(), slack=_HOST_NOISE)}
    latency = one.at("latency_ms")
    few = latency.has("samples") and latency.at("samples").whole() < MIN_SAMPLES
    in_flight = one.has("users_per_s_from") and one.at("users_per_s_from").text() == "batches in flight"
    return {
        "latency p50, ms": _estimate(latency.at("p50"), few=few),
        "users/s": _estimate(one.at("users_per_s"), more_is_better=True, few=few and not in_flight),
        **memory,
    }


def _online(record: Field, subject: Subject | None, settings: dict[str, Any]) -> Iterator[Entry]:
    for one in record.at("online").entries():
        name, contender, status = (one.at(name).text() for name in ("model", "contender", "status"))
        context, beam = one.at("context").whole(), one.at("beam").whole()
        model = subject.model if subject else name
        asks = settings | {"online": True, "models": model, "online_contenders": contender, "online_beams": beam}
        if not settings.get("inputs"):
            asks["online_context"] = context
        key = ("online", *map(repr, settings.values()), model, context, beam, contender)
        cut_short = one.has("reason") and one.at("reason").text() != ""
        figures = {"online users/s": replace(_plain(one.at("rate"), more_is_better=True), few_samples=cut_short)}
        yield Entry(key, f"{name}, {context} tokens, W {beam}", contender, status, figures, asks=asks)


def _attention(record: Field, subject: Subject | None, settings: dict[str, Any]) -> Iterator[Entry]:
    for one in record.at("attention").entries():
        name, status = one.at("model").text(), one.at("status").text()
        context, users, beam = (one.at(name).whole() for name in ("context", "users", "beam"))
        model = subject.model if subject else name
        asks = settings | {"attention": True, "models": model, "last_users": users, "beams": beam}
        if not settings.get("inputs"):
            asks["last_context"] = context
        for contender in ("xgr", "paged"):
            key = ("attention", _on_gpu(record), model, context, users, beam, one.at("own_tokens").whole(), contender)
            figures = {"attention a layer, ms": _plain(one.at(f"{contender}_ms"))} if status == "ok" else {}
            yield Entry(key, f"{name}, {context} x {users} x W {beam}", contender, status, figures, asks=asks)


def _constraint(record: Field, settings: dict[str, Any]) -> Iterator[Entry]:
    """The engine's search and the masked one at every catalog size."""
    if not record.has("constraint"):
        return
    table = record.at("constraint")
    shape = {name: table.at(name).text() for name in ("geometry", "codes")}
    users, beam = table.at("users").whole(), table.at("beam").whole()
    asks: dict[str, Any] = {name: settings[name] for name in ("codes", "levels", "gpu") if name in settings}
    asks |= {"constraint": True, "first_model": shape["geometry"], "last_users": users, "last_beam": beam}
    for size in table.at("sizes").entries():
        items, status = size.at("items").whole(), size.at("status").text()
        for contender, prefix in (("xgr", ""), ("masked", "masked_")):
            key = ("constraint", _on_gpu(record), *shape.values(), users, beam, items, contender)
            title = f"constraint, {items:,} items x {users} x W {beam}"
            if status != "ok":
                yield Entry(key, title, contender, status)
                continue
            if not size.has(f"{contender}_ms") and isinstance(size.value.get(contender), str):  # why it has none
                yield Entry(key, title, contender, size.value[contender])
                continue
            figures = {"search, ms": _plain(size.at(f"{contender}_ms"))}
            if size.has(f"{prefix}constraint_ms"):
                figures["constraint, ms"] = _plain(size.at(f"{prefix}constraint_ms"), derived=True)
            answers = _marks(size.at(f"{prefix}marks")) if f"{prefix}marks" in size.value else "not compared"
            yield Entry(key, title, contender, status, figures, answers, asks | {"constraint_items": items})


def _estimate(estimate: Field, *, more_is_better: bool = False, few: bool = False) -> Figure:
    """A figure above 0 with its interval; one without width is that of one sample."""
    value = None if estimate.value is None else estimate.at("value").number()
    if not value:
        return Figure.exact(None, more_is_better=more_is_better)
    low, high = (estimate.at(name).number() for name in ("low", "high"))
    if low is None or high is None:
        raise FieldError(f"{estimate.place} needs low and high beside its value")
    return Figure(value, low, high, more_is_better, few_samples=few or low == high)


def _plain(number: Field, *, more_is_better: bool = False, derived: bool = False) -> Figure:
    """A figure above 0 without an interval."""
    value = number.number()
    if value is not None and value <= (_CLAMPED_MS if derived else 0):
        value = None
    return Figure.exact(value, more_is_better=more_is_better, derived=derived)


def _marks(marks: Field) -> str:
    return ", ".join(mark.text() for mark in marks.entries()) or "equal"

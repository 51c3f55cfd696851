"""The record's parts as tables with their notes, for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xgr_engine.bench.claims import OTHERS
from xgr_engine.bench.record import exceeded
from xgr_engine.bench.record_entries import MIN_SAMPLES

Record = dict[str, Any]
WRONG = "WRONG"


@dataclass(frozen=True)
class Table:
    """Cells are text, numbers or None; ``notes`` are sentences below it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[object]]
    notes: tuple[str, ...] = ()


def shape_of(entry: Record) -> str:
    """``qwen3-1.7b, 1,000 tokens x 8 users x W 512``."""
    users = f" x {users_text(entry['users'])}" if "users" in entry else ""
    return f"{entry['model']}, {entry['context']:,} tokens{users}, W {entry['beam']}"


def users_text(count: int) -> str:
    """``1 user``, ``8 users``."""
    return f"{count} user{'s' if count != 1 else ''}"


def number_text(value: float) -> str:
    """Four significant digits, thousands apart."""
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def bytes_text(count: int | None) -> str | None:
    """GB or MB."""
    if count is None:
        return None
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


# ---- rows -----------------------------------------------------------------------------------------------------------


def row_table(row: Record, ceilings: Record | None = None) -> Table:
    """One workload: speed, memory and answers of every contender, and a note if they exceed the ``ceilings``."""
    ran = [one for one in row["contenders"] if one["status"] != "not run"]
    on_gpu = any(one.get("device_peak_bytes") is not None for one in ran)
    memory = ("GPU memory", "extra host memory") if on_gpu else ("extra memory",)
    columns = ("", "p50 ms", "95 % interval", "p90", "p99", "users/s", "prompt tokens/s", *memory, "TFLOP/s", "TB/s")
    cells = [_contender_cells(one, len(columns), on_gpu=on_gpu) for one in ran]
    title = f"{shape_of(row)}, K {row['top_k']}: {row['dtype']}, {row['catalog']}"
    notes = [*_row_notes(row, ran), *(exceeded(ceilings, [row]) if ceilings else ())]
    return Table(title, (*columns, "answers", "top-1", "overlap", "score error"), cells, tuple(notes))


def _contender_cells(one: Record, columns: int, *, on_gpu: bool) -> list[object]:
    if one["status"] != "ok":
        return [one["name"], *[None] * (columns - 1), one["status"], None, None, None]
    latency = one["latency_ms"]
    p50 = latency["p50"]
    samples = latency["samples"]
    interval = f"{p50['low']:.4g} to {p50['high']:.4g}"
    if samples < MIN_SAMPLES:  # what there is between them is no interval of 95 %
        interval = f"{samples} sample{'s' if samples != 1 else ''}"
    own = bytes_text(one["host_own_bytes"])
    return [
        one["name"],
        p50["value"],
        interval,
        *(latency[name]["value"] if latency[name] else None for name in ("p90", "p99")),
        one["users_per_s"]["value"],
        one["prompt_tokens_per_s"]["value"],
        *((bytes_text(one["device_peak_bytes"]), own) if on_gpu else (own,)),
        f"{one['tflops']:.3g}",
        f"{one['tbs']:.3g}",
        *answer_cells(one["parity"]),
    ]


def answer_cells(parity: Record | None) -> list[object]:
    """``ok`` or ``WRONG``, top-1, overlap, largest score difference."""
    if parity is None:
        return ["not compared", None, None, None]
    difference = parity["score_difference"]
    return [
        WRONG if parity["marks"] else "ok",
        f"{parity['top1']:.0%}",
        f"{parity['overlap']:.1%}",
        None if difference is None else f"{difference:.1g}",
    ]


def _row_notes(row: Record, ran: Sequence[Record]) -> list[str]:
    notes = [_comparison(row["comparison"])] if row.get("comparison") else []
    ok = [one for one in ran if one["status"] == "ok"]
    sources: dict[str, list[str]] = {}
    for one in ok:
        sources.setdefault(one["users_per_s_from"], []).append(one["name"])
    if sources:
        notes.append("users/s from " + "; from ".join(f"{source}: {', '.join(who)}" for source, who in sources.items()))
        samples = (f"{one['name']} {one['latency_ms']['samples']}" for one in ok)
        notes.append(f"latency samples: {', '.join(samples)}")
    notes += wrong_notes((one["name"], one["parity"]) for one in ok)
    for one in ran:
        if one["status"] != "ok" and one["reason"]:
            notes.append(f"{one['name']} {one['status']}: {one['reason']}")
        notes += [f"{one['name']}: {text}" for text in one.get("notes", ())]
    return notes


def wrong_notes(found: Any) -> list[str]:
    """What is wrong with each contender's answers, from pairs of a name and its parity; right answers give no note."""
    return [f"{name} {WRONG}: {', '.join(parity['marks'])}" for name, parity in found if parity and parity["marks"]]


def _comparison(facts: Record) -> str:
    if "reason" in facts:
        return f"answers were not compared: {facts['reason']}"
    text = f"answers: {users_text(facts['users'])} compared with the definition in float32; rounding cannot lose "
    text += f"{facts['certain']} of its {facts['sids']} SIDs (scores may be off by {facts['score_tolerance']:.2g}"
    if facts["measured_noise"] is None:
        return text + ")"
    text += f"; plain torch in {facts['dtype']} is off by {facts['measured_noise']:.2g}"
    text += f" and finds {facts['plain_overlap']:.1%} of the SIDs"
    return text + (f", {facts['least_overlap']:.0%} are required)" if facts.get("least_overlap") else ")")


# ---- parts ----------------------------------------------------------------------------------------------------------


def claims_table(claims: Sequence[Record]) -> Table:
    """The paper's claims beside the engine's figures, and those of others with how many times better the engine is."""
    others = [name for name in OTHERS if any(name in claim["values"] for claim in claims)]
    rows: list[list[object]] = []
    for claim in claims:
        values, unit = claim["values"], claim["unit"]
        row: list[object] = [claim["claim"], claim["shape"], claim["paper"] or None, _figure(values["xgr"], unit)]
        for name in others:
            better = claim["better"].get(name)
            row.append(_figure(values.get(name), unit) if better is None else
                       f"{_figure(values[name], unit)} ({better:.2f})")  # fmt: skip
        rows.append(row)
    notes = ("in parentheses: how many times better xgr is",) if any(claim["better"] for claim in claims) else ()
    columns = ("claim", "where", "the paper says", "xgr", *others)  # "paper" is the name of a contender
    return Table("Beside the paper (arXiv 2512.11529)", columns, rows, notes)


def _figure(value: object, unit: str) -> str | None:
    if isinstance(value, float | int):
        return f"{number_text(value)} {unit}"
    return None if value is None else str(value)


def phases_table(phases: Record, timeline: Record | None) -> Table:
    """Where the time of one batch goes."""
    total = sum(phases["ms"].values()) or 1.0
    rows: list[list[object]] = [[name, ms, f"{ms / total:.1%}"] for name, ms in phases["ms"].items()]
    notes: list[str] = []
    if timeline and timeline["shares"]:
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in timeline["shares"].items())
        notes.append(f"time of the {timeline['unit']}: {kinds}")
        if timeline["busy"] is not None:
            what = "the GPU was computing" if timeline["unit"] == "kernels" else "operators were running"
            share = timeline["busy"] * timeline["span_us"] / timeline["wall_us"]  # busy: from the first to the last
            notes.append(f"{what} for {share:.0%} of the time of a single batch under the profiler")
    return Table(f"One batch by itself: {shape_of(phases)}", ("phase", "ms", "share"), rows, tuple(notes))


def attention_table(entries: Sequence[Record]) -> Table:
    """The engine's decode attention beside the paged one's; FlashInfer's where its figure for a shape is known."""
    rows: list[list[object]] = []
    with_flashinfer = any(one.get("paged_against_flashinfer") for one in entries)
    for one in entries:
        ok, known = one["status"] == "ok", one.get("paged_against_flashinfer")
        cells = [shape_of(one), one["heads"], one.get("xgr_ms"), one.get("paged_ms"), one.get("paged_over_xgr")]
        if with_flashinfer:
            ratio = "-" if known is None else f"{known:.2f}" + (", more than 1.3" if known > 1.3 else "")
            cells += [one.get("flashinfer_paged_ms"), ratio]
        difference = f"{one['relative_difference']:.1g}" if ok else None
        rows.append([*cells, one["kernels"] if ok else one["status"], difference])
    columns = ["", "heads", "xgr ms", "paged ms", "paged / xgr"]
    columns += ["FlashInfer's ms", "paged / FlashInfer's"] if with_flashinfer else []
    plain = any(one.get("kernels") == "reference" for one in entries)
    notes = ("reference: both are plain torch, whose times say little about kernels of a GPU",) if plain else ()
    return Table("Decode attention of one layer", (*columns, "kernels", "output difference"), rows, notes)


def ablations_table(ablations: Record) -> Table:
    """One part off at a time."""
    whole = ablations["whole"]
    rate = whole["users_per_s"]["value"] if whole["status"] == "ok" else None
    first = answer_cells(whole["parity"]) if rate else [whole["status"], None, None, None]
    rows: list[list[object]] = [["nothing", "the whole engine", rate, 1.0 if rate else None, *first]]
    for part in ablations["parts"]:
        cells: list[object] = [None, None, part["status"], None, None, None]
        if part["status"] == "ok":
            cells = [part["users_per_s"]["value"], part["slower"], *answer_cells(part["parity"])]
        rows.append([part["part"], part["off"], *cells])
    named = [
        ("the whole engine", whole.get("parity")),
        *((one["part"], one.get("parity")) for one in ablations["parts"]),
    ]
    notes = [_comparison(ablations["comparison"])] if ablations.get("comparison") else []
    notes += wrong_notes(named)
    notes += [f"{one['part']} {one['status']}: {one['reason']}" for one in ablations["parts"] if one.get("reason")]
    columns = ("switched off", "what runs instead", "users/s", "times slower", "answers", "top-1", "overlap")
    title = f"One part switched off at a time: {shape_of(ablations)}, {ablations['shared_prefix']} shared tokens"
    return Table(title, (*columns, "score error"), rows, tuple(notes))


def online_table(entries: Sequence[Record], options: Record) -> Table:
    """Highest rates that keep the limit, how well batch times were predicted, and who of the run was not measured."""
    rows: list[list[object]] = []
    for one in entries:
        off = (one.get("latency_model") or {}).get("relative_error")
        rows.append(
            [
                one["contender"],
                shape_of(one),
                one.get("rate"),
                one.get("p99_ms"),
                one.get("requests"),
                one.get("mean_batch"),
                one.get("largest_batch"),
                None if off is None else f"{off['p50_abs']:.0%} / {off['p90_abs']:.0%}",
            ]
        )
    notes = ["Poisson arrivals that do not wait for answers; latency from arrival to answer, queueing included"]
    notes += [
        f"{one['contender']}, W {one['beam']}: {one.get('reason') or one['status']}"
        for one in entries
        if one.get("reason") or one["status"] != "ok"
    ]
    if others := [name for name in options["baselines"] if name not in options["online_contenders"]]:
        where = f" in preset {options['preset']}" if options["preset"] else ""
        notes.append(f"not measured online{where}: {', '.join(others)}")
    columns = ("", "workload", "users/s", "P99 ms", "requests", "users per batch", "largest batch")
    return Table(
        f"Online: highest rate with P99 <= {options['slo_ms']:,.0f} ms",
        (*columns, "prediction error, p50 / p90"),
        rows,
        tuple(notes),
    )


def constraint_table(constraint: Record) -> Table:
    """The constraint's cost by catalog size."""
    rows: list[list[object]] = []
    for one in constraint["sizes"]:
        marks = [*one.get("marks", ()), *(f"masked: {text}" for text in one.get("masked_marks", ()))]
        ok = f"ok, overlap {one['overlap']:.1%}" if "overlap" in one else one.get("reason") or one.get("masked")
        answers = f"{WRONG}: {', '.join(marks)}" if marks else ok
        times = (one.get("constraint_ms"), one.get("masked_constraint_ms"), one.get("masked_over_xgr"))
        rows.append([one["items"], *times, answers])
    who = users_text(constraint["users"])
    title = f"The constraint alone: {who}, W {constraint['beam']}, {constraint['codes']} codes"
    columns = ("items", "xgr ms", "masked top-k ms", "masked / xgr", "answers")
    notes = [f"heads excluded; vocabulary of {constraint['vocabulary']:,} tokens; masked: {constraint['masked']}"]
    notes += [f"{one['items']:,} items, {text}" for one in constraint["sizes"] for text in one.get("notes", ())]
    return Table(title, columns, rows, tuple(notes))


def absent_table(record: Record) -> Table | None:
    """Which contenders and parts were not run, and why; None if all were."""
    absent: dict[tuple[str, str], list[str]] = {}
    for row in record["rows"]:
        for one in row["contenders"]:
            if one["status"] == "not run":
                absent.setdefault((one["name"], one["reason"]), []).append(shape_of(row))
    rows: list[list[object]] = []
    for (name, reason), where in sorted(absent.items()):
        if len(where) < len(record["rows"]):
            reason += f": {'; '.join(where)}" if len(where) < 4 else f", in {len(where)} of {len(record['rows'])} rows"
        rows.append([name, reason])
    rows += [[part["part"], part["reason"]] for part in record["left_out"]]
    return Table("Not run", ("", "why"), rows) if rows else None


def part_tables(record: Record) -> list[Table]:
    """The tables after those of the rows."""
    tables: list[Table | None] = [
        constraint_table(record["constraint"]) if record["constraint"] else None,
        phases_table(record["phases"], record["timeline"]) if record["phases"] else None,
        attention_table(record["attention"]) if record["attention"] else None,
        ablations_table(record["ablations"]) if record["ablations"] else None,
        online_table(record["online"], record["options"]) if record["online"] else None,
        claims_table(record["claims"]) if record["claims"] else None,
        absent_table(record),
    ]
    return [table for table in tables if table is not None]

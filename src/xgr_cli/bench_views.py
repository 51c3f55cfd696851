"""How the records of ``xgr bench`` look as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xgr_cli.output import Output, show

Record = dict[str, Any]


def show_bench(out: Output, record: Record) -> None:
    """``record`` as ``xgr_engine.bench.run`` makes it."""
    machine, ceilings = record["machine"], record["ceilings"]
    versions = machine["versions"]
    out.fields(
        {
            "machine": f"{machine['device_name']}, {machine['cores']} cores, {machine['threads']} threads",
            "versions": ", ".join(
                f"{name} {versions[name]}" for name in ("xgr", "torch", "triton") if name in versions
            ),
            "measured ceilings": f"{ceilings['tflops']:.3g} TFLOP/s ({ceilings['matmul']}), "
            f"{ceilings['tbs']:.3g} TB/s ({ceilings['copy']})",
            "command": " ".join(record["command"]),
            "seconds": f"{record['seconds']:,.0f}",
        },
        title="Benchmark" + (f", preset {record['preset']}" if record["preset"] else ""),
    )
    for row in record["rows"]:
        _show_row(out, row)
    if record["constraint"]:
        _show_constraint(out, record["constraint"])
    if record["phases"]:
        _show_phases(out, record["phases"], record["timeline"])
    _show_attention(out, record["attention"])
    if record["ablations"]:
        _show_ablations(out, record["ablations"])
    _show_online(out, record["online"])
    if record["claims"]:
        rows = [[claim["claim"], claim["paper"] or "-", claim["here"], claim["ratio"]] for claim in record["claims"]]
        out.table(["the paper's claim", "paper", "here", "times"], rows, title="Beside the paper (arXiv 2512.11529)")
    _show_absent(out, record)


def _show_row(out: Output, row: Record) -> None:
    title = f"{row['model']} ({row['dtype']}), {row['catalog']}: {row['context']} tokens x {row['users']} users x W "
    title += f"{row['beam']}, K {row['top_k']}"
    cells = [_contender_cells(one) for one in row["contenders"] if one["status"] != "not run"]
    columns = ["", "p50 ms", "95 %", "p90", "p99", "users/s", "tokens/s", "memory", "TFLOP/s", "TB/s", "answers"]
    out.table(columns, cells, title=title)


def _contender_cells(one: Record) -> list[object]:
    if one["status"] != "ok":
        reason = f": {one['reason']}" if one["reason"] else ""
        return [one["name"], *["-"] * 9, f"{one['status']}{reason}"]
    latency = one["latency_ms"]
    p50 = latency["p50"]
    interval = f"{p50['low']:.4g} to {p50['high']:.4g}" if latency["samples"] > 1 else "1 sample"
    tails = [f"{latency[name]['value']:.4g}" if latency[name] else "-" for name in ("p90", "p99")]
    memory = one["device_peak_bytes"] if one["device_peak_bytes"] is not None else one["host_own_bytes"]
    return [
        one["name"],
        f"{p50['value']:.4g}",
        interval,
        *tails,
        f"{one['users_per_s']['value']:,.4g}",
        f"{one['prompt_tokens_per_s']['value']:,.0f}",
        bytes_text(memory),
        f"{one['tflops']:.3g}",
        f"{one['tbs']:.3g}",
        answers_text(one["parity"]),
    ]


def answers_text(parity: Record | None) -> str:
    """Parity in a few words, what is wrong first."""
    if parity is None:
        return "not compared"
    agreement = f"top-1 {parity['top1']:.0%}, overlap {parity['overlap']:.1%}"
    if (difference := parity["score_difference"]) is not None:
        agreement += f", scores {difference:.1g}"
    return f"WRONG ({', '.join(parity['marks'])}): {agreement}" if parity["marks"] else f"ok: {agreement}"


def bytes_text(count: int | None) -> str:
    """GB or MB."""
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _show_constraint(out: Output, constraint: Record) -> None:
    rows = [
        [
            entry["items"],
            entry.get("constraint_ms"),
            entry.get("masked_constraint_ms"),
            entry.get("masked_over_xgr"),
            entry.get("reason") or ", ".join(entry.get("marks", [])) or f"overlap {entry.get('overlap', 0):.1%}",
        ]
        for entry in constraint["sizes"]
    ]
    title = f"The constraint alone: {constraint['users']} users x W {constraint['beam']}, {constraint['codes']} codes, "
    title += f"vocabulary {constraint['vocabulary']:,}; heads taken off"
    out.table(["items", "xgr ms", "masked top-k ms", "times", "answers"], rows, title=title)


def _show_phases(out: Output, phases: Record, timeline: Record | None) -> None:
    total = sum(phases["ms"].values())
    rows = [[name, f"{ms:.3g}", f"{ms / total:.1%}"] for name, ms in phases["ms"].items()]
    out.table(["phase", "ms", "share"], rows, title=f"One batch: {_shape(phases)}")
    if timeline and timeline["shares"]:
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in timeline["shares"].items())
        busy = "" if timeline["busy"] is None else f"; busy {timeline['busy']:.0%}"
        out.print(f"  {timeline['unit']}: {kinds}{busy}", "")


def _shape(entry: Record) -> str:
    return f"{entry['model']}, {entry['context']} tokens x {entry['users']} users x W {entry['beam']}"


def _show_attention(out: Output, entries: Sequence[Record]) -> None:
    if not entries:
        return
    rows = []
    for entry in entries:
        known = entry.get("paged_against_flashinfer")
        rows.append(
            [
                f"{_shape(entry)}, {entry['heads']}",
                entry.get("xgr_ms"),
                entry.get("paged_ms"),
                entry.get("paged_over_xgr"),
                entry["status"] if entry["status"] != "ok" else entry["kernels"],
                "-" if known is None else f"{known:.2f} times" + (", slower than 1.3" if known > 1.3 else ""),
            ]
        )
    columns = ["decode attention of a layer", "xgr ms", "paged ms", "times", "kernels", "paged / FlashInfer's"]
    out.table(columns, rows)


def _show_ablations(out: Output, ablations: Record) -> None:
    rows = [["nothing", "", f"{ablations['whole']['users_per_s']['value']:,.4g}", "1.00", "as the others see it"]]
    for part in ablations["parts"]:
        if part["status"] == "ok":
            rate, slower = f"{part['users_per_s']['value']:,.4g}", f"{part['slower']:.2f}"
            rows.append([part["part"], part["off"], rate, slower, answers_text(part["parity"])])
        else:
            reason = f": {part['reason']}" if part["reason"] else ""
            rows.append([part["part"], part["off"], "-", "-", f"{part['status']}{reason}"])
    rows[0][4] = answers_text(ablations["whole"]["parity"])
    out.table(
        ["switched off", "what runs instead", "users/s", "times slower", "answers"], rows, title=_shape(ablations)
    )


def _show_online(out: Output, entries: Sequence[Record]) -> None:
    if not entries:
        return
    rows = [
        [
            entry["contender"],
            f"{entry['model']}, {entry['context']} tokens, W {entry['beam']}",
            entry.get("rate"),
            entry.get("p99_ms"),
            entry.get("largest_batch"),
            entry.get("reason") or ("" if entry["status"] == "ok" else entry["status"]),
        ]
        for entry in entries
    ]
    columns = ["", "workload", "highest users/s", "P99 ms", "largest batch", ""]
    out.table(columns, rows, title="Online: Poisson arrivals, queueing counted")


def _show_absent(out: Output, record: Record) -> None:
    absent = {
        (one["name"], one["reason"])
        for row in record["rows"]
        for one in row["contenders"]
        if one["status"] == "not run"
    }
    if absent:
        out.table(["not run", "why"], sorted(absent))
    for part in record["left_out"]:
        out.print(f"left out: {part['part']}: {part['reason']}")


def show_comparison(out: Output, comparison: Record) -> None:
    """``comparison`` as ``xgr_engine.bench.compare`` makes it."""
    rows = [
        [
            row["row"],
            row["contender"],
            row["figure"],
            show(row["before"]),
            show(row["after"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
            "WORSE" if row["regression"] else "",
        ]
        for row in comparison["rows"]
    ]
    out.table(["row", "", "figure", "before", "after", "after / before", ""], rows)
    if not comparison["same_machine"]:
        out.print(f"different machines: {' and '.join(comparison['machines'])}")
    for name in ("only_before", "only_after"):
        if comparison[name]:
            out.print(f"{name.replace('_', ' ')}: {len(comparison[name])} figures' rows have no counterpart")
    out.print(f"{len(comparison['regressions'])} regression(s)")

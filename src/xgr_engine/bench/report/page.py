"""The report: one HTML file, no script, nothing fetched. Text comes from the record and is escaped."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from xgr_engine.bench.report.charts import model_charts, other_charts
from xgr_engine.bench.report.style import STYLE
from xgr_engine.files import write_text

Record = dict[str, Any]
_COLUMNS = (
    *("", "p50 ms", "95 %", "p90", "p99", "users/s", "prompt tokens/s", "device GB", "host MB", "TFLOP/s", "TB/s"),
    "answers against the definition",
)


def write_page(path: Path, record: Record) -> None:
    """Write the report; a file that is there is replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(record))


def page(record: Record) -> str:
    """The whole document."""
    title = "xgr bench" + (f", {record['preset']}" if record["preset"] else "")
    models = list(dict.fromkeys(row["model"] for row in record["rows"]))
    charts = [_chart_grid(f"{model}", model_charts(record, model)) for model in models]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(_machine_line(record))}, {escape(record["started"])}</p>',
        _warnings(record),
        _headline(record),
        *charts,
        _chart_grid("Where the time goes", other_charts(record)),
        _claims(record),
        "<h2>Every row</h2>" if record["rows"] else "",
        *(_row_table(row) for row in record["rows"]),
        _attention(record),
        _ablations(record),
        _online(record),
        _constraint(record),
        _absent(record),
        _machine(record),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f"<!doctype html>\n<html lang=en><head>{head}<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls sideways on its own where it is too wide; numbers to the right, wrong answers marked."""
    cells = [[_text(cell) for cell in row] for row in rows]
    right = [bool(cells) and all(_numeric(row[at]) for row in cells) for at in range(len(columns))]
    head = "".join(f"<th{_class(right[at])}>{escape(column)}</th>" for at, column in enumerate(columns))
    lines = []
    for row in cells:
        parts = [f"<td{_class(right[at], cell)}>{escape(cell)}</td>" for at, cell in enumerate(row)]
        lines.append(f"<tr>{''.join(parts)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _class(right: bool, cell: str = "") -> str:
    if cell.startswith(("WRONG", "out of memory", "failed")):
        return " class=bad"
    return " class=n" if right else ""


def _numeric(text: str) -> bool:
    return (
        text == "-"
        or text.replace(",", "").replace(".", "").replace("e", "").replace("+", "").replace("-", "").isdigit()
    )


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _machine_line(record: Record) -> str:
    machine = record["machine"]
    torch_version = machine["versions"].get("torch", "?")
    return f"{machine['device_name']}, torch {torch_version}, {record['rows'][0]['dtype'] if record['rows'] else ''}"


def _warnings(record: Record) -> str:
    if not record["warnings"]:
        return ""
    lines = "".join(f"<p>{escape(text)}</p>" for text in record["warnings"])
    return f'<div class="warnings">{lines}</div>'


def _headline(record: Record) -> str:
    """The engine against each baseline, over all rows that both ran."""
    ratios: dict[str, list[float]] = {}
    for row in record["rows"]:
        ran = {one["name"]: one for one in row["contenders"] if one["status"] == "ok"}
        if "xgr" not in ran:
            continue
        for name, one in ran.items():
            if name != "xgr":
                ratios.setdefault(name, []).append(ran["xgr"]["users_per_s"]["value"] / one["users_per_s"]["value"])
    cards = [
        f'<div class="card"><b>{_span(values)} times</b>the users/s of {escape(name)}, {len(values)} row(s)</div>'
        for name, values in ratios.items()
    ]
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _chart_grid(heading: str, charts: Sequence[tuple[str, str]]) -> str:
    if not charts:
        return ""
    cards = "".join(f'<div class="card"><h3>{escape(title)}</h3>{svg}</div>' for title, svg in charts)
    return f'<h2>{escape(heading)}</h2><div class="grid">{cards}</div>'


def _claims(record: Record) -> str:
    if not record["claims"]:
        return ""
    rows = [[one["claim"], one["paper"] or "-", one["here"], one["ratio"]] for one in record["claims"]]
    columns = ["claim", "paper (arXiv 2512.11529)", "here", "times"]
    return f"<h2>Beside the paper</h2>{table(columns, rows)}"


def _row_table(row: Record) -> str:
    title = f"{row['model']}: {row['context']} tokens x {row['users']} users x W {row['beam']}, K {row['top_k']}"
    about = f"{row['catalog']}; {row['dtype']}; score over {row['score_over']}; {row['prompts']} prompts; rows a level "
    about += ", ".join(str(count) for count in row["rows_a_level"])
    cells = [_cells(one) for one in row["contenders"] if one["status"] != "not run"]
    return f'<h3>{escape(title)}</h3><p class="dim">{escape(about)}</p>{table(_COLUMNS, cells)}'


def _cells(one: Record) -> list[object]:
    if one["status"] != "ok":
        return [
            one["name"],
            *["-"] * (len(_COLUMNS) - 2),
            f"{one['status']}{': ' if one['reason'] else ''}{one['reason']}",
        ]
    latency = one["latency_ms"]
    p50 = latency["p50"]
    tails = [latency[name]["value"] if latency[name] else None for name in ("p90", "p99")]
    return [
        one["name"],
        p50["value"],
        f"{p50['low']:.4g} to {p50['high']:.4g}, {latency['samples']} samples",
        *tails,
        one["users_per_s"]["value"],
        one["prompt_tokens_per_s"]["value"],
        None if one["device_peak_bytes"] is None else one["device_peak_bytes"] / 1e9,
        None if one["host_own_bytes"] is None else one["host_own_bytes"] / 1e6,
        one["tflops"],
        one["tbs"],
        _answers(one["parity"]),
    ]


def _status(one: Record) -> str:
    return f"{one['status']}: {one['reason']}" if one["reason"] else str(one["status"])


def _answers(parity: Record | None) -> str:
    if parity is None:
        return "not compared"
    text = f"top-1 {parity['top1']:.0%}, overlap {parity['overlap']:.1%}"
    if parity["score_difference"] is not None:
        text += f", scores within {parity['score_difference']:.1g}"
    return f"WRONG ({', '.join(parity['marks'])}): {text}" if parity["marks"] else f"ok: {text}"


def _attention(record: Record) -> str:
    if not record["attention"]:
        return ""
    rows = [
        [
            f"{one['model']}, {one['context']} tokens x {one['users']} users x W {one['beam']}",
            one["heads"],
            one.get("xgr_ms"),
            one.get("paged_ms"),
            one.get("paged_over_xgr"),
            one.get("flashinfer_paged_ms"),
            one["status"]
            if one["status"] != "ok"
            else f"{one['kernels']}, outputs {one['relative_difference']:.1g} apart",
        ]
        for one in record["attention"]
    ]
    columns = ["shape", "heads", "xgr ms", "paged ms", "times", "FlashInfer's paged ms", "kernels"]
    return f"<h2>Decode attention of one layer</h2>{table(columns, rows)}"


def _ablations(record: Record) -> str:
    if not record["ablations"]:
        return ""
    rows = []
    for part in record["ablations"]["parts"]:
        ok = part["status"] == "ok"
        answer = _answers(part["parity"]) if ok else _status(part)
        rows.append([part["part"], part["off"], part["slower"] if ok else None, answer])
    columns = ["switched off", "what runs instead", "times slower", "answers"]
    return f"<h2>Ablations</h2>{table(columns, rows)}"


def _online(record: Record) -> str:
    if not record["online"]:
        return ""
    rows = [
        [
            one["contender"],
            f"{one['model']}, {one['context']} tokens, W {one['beam']}",
            one.get("rate"),
            one.get("p99_ms"),
            one.get("largest_batch"),
            one.get("reason") or one["status"],
        ]
        for one in record["online"]
    ]
    columns = ["", "workload", "highest users/s", "P99 ms there", "largest batch", ""]
    note = "Open loop: Poisson arrivals that do not wait for answers; latency from arrival to answer, queueing counted."
    return f"<h2>Online</h2><p class=dim>{note}</p>{table(columns, rows)}"


def _constraint(record: Record) -> str:
    if not record["constraint"]:
        return ""
    rows = [
        [one["items"], one.get("constraint_ms"), one.get("masked_constraint_ms"), one.get("masked_over_xgr")]
        for one in record["constraint"]["sizes"]
    ]
    columns = ["items", "xgr ms", "masked full-vocabulary top-k ms", "times"]
    return f"<h2>The constraint alone</h2>{table(columns, rows)}"


def _absent(record: Record) -> str:
    absent = sorted(
        {
            (one["name"], one["reason"])
            for row in record["rows"]
            for one in row["contenders"]
            if one["status"] == "not run"
        }
    )
    absent += [(part["part"], part["reason"]) for part in record["left_out"]]
    return f"<h2>Not run</h2>{table(['', 'why'], absent)}" if absent else ""


def _machine(record: Record) -> str:
    machine, ceilings, noise = record["machine"], record["ceilings"], record.get("noise", {})
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    rows: list[list[object]] = [
        ["device", machine["device_name"]],
        ["CPU", f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"],
        ["memory", f"{machine['memory_bytes'] / 1e9:,.0f} GB"],
        ["system", f"{machine['system']}, Python {machine['python']}"],
        ["versions", versions],
        ["ceiling, matrix product", f"{ceilings['tflops']:.3g} TFLOP/s: {ceilings['matmul']}"],
        ["ceiling, copy", f"{ceilings['tbs']:.3g} TB/s: {ceilings['copy']}"],
        ["other CPU load", f"{noise.get('other_busy_cores', '?')} cores"],
        ["GPU clocks", str(noise["gpu_clocks"]) if noise.get("gpu_clocks") else None],
        ["took", f"{record['seconds'] or 0:,.0f} s"],
    ]
    command = escape(shlex.join(record["command"]))
    return f"<h2>Machine, versions, command</h2>{table(['', ''], rows)}<p><code>{command}</code></p>"

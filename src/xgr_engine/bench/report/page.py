"""The report: one HTML file, no script, nothing fetched. Text comes from the record and is escaped."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from xgr_engine.bench.report.charts import model_charts, other_charts
from xgr_engine.bench.report.style import STYLE
from xgr_engine.bench.report.tables import WRONG, Table, claims_table, number_text, part_tables, row_table
from xgr_engine.files import write_text

Record = dict[str, Any]
_SHORT = 20  # cells up to this length are never wrapped


def write_page(path: Path, record: Record) -> None:
    """Write the report; a file that is there is replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(record))


def page(record: Record) -> str:
    """The whole document."""
    title = "xgr bench" + (f", {record['preset']}" if record["preset"] else "")
    models = list(dict.fromkeys(row["model"] for row in record["rows"]))
    charts = [_chart_grid(model, model_charts(record, model)) for model in models]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(_machine_line(record))}, {escape(record["started"])}</p>',
        _warnings(record),
        _headline(record),
        *charts,
        _chart_grid("Where the time goes", other_charts(record)),
        _section(claims_table(record["claims"])) if record["claims"] else "",
        "<h2>Every row</h2>" if record["rows"] else "",
        *(_section(row_table(row, record.get("ceilings")), "h3") for row in record["rows"]),
        *(_section(view) for view in part_tables({**record, "claims": []})),
        _machine(record),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f"<!doctype html>\n<html lang=en><head>{head}<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls sideways by itself if it is too wide; numbers align right, wrong answers are marked."""
    cells = [[_text(cell) for cell in row] for row in rows]
    right = [bool(cells) and all(_numeric(row[at]) for row in cells) for at in range(len(columns))]
    head = "".join(f"<th{_class(right[at])}>{escape(column)}</th>" for at, column in enumerate(columns))
    lines = []
    for row in cells:
        parts = [f"<td{_class(right[at], cell)}>{escape(cell)}</td>" for at, cell in enumerate(row)]
        lines.append(f"<tr>{''.join(parts)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _class(right: bool, cell: str = "") -> str:
    if cell.startswith((WRONG, "out of memory", "failed")):
        return " class=bad"
    if right:
        return " class=n"
    return " class=short" if 0 < len(cell) <= _SHORT else ""


def _numeric(text: str) -> bool:
    return text == "-" or re.fullmatch(r"[+-]?[\d,]*\.?\d+(e[+-]?\d+)?%?", text) is not None


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_text(value)
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
    wrong = set()
    for row in record["rows"]:
        ran = {one["name"]: one for one in row["contenders"] if one["status"] == "ok"}
        wrong |= {name for name, one in ran.items() if one["parity"] and one["parity"]["marks"]}
        if "xgr" not in ran:
            continue
        for name, one in ran.items():
            if name != "xgr":
                ratios.setdefault(name, []).append(ran["xgr"]["users_per_s"]["value"] / one["users_per_s"]["value"])
    cards = []
    for name, values in ratios.items():
        faulty = " and ".join(sorted({"xgr", name} & wrong))
        marked = f'; <span class="bad">answers of {escape(faulty)} {WRONG}</span>' if faulty else ""
        rows = f"{len(values)} row{'s' if len(values) > 1 else ''}"
        text = f"the users/s of {escape(name)}, over {rows}{marked}"
        cards.append(f'<div class="card"><b>{_span(values)} times</b>{text}</div>')
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _chart_grid(heading: str, charts: Sequence[tuple[str, str]]) -> str:
    if not charts:
        return ""
    cards = "".join(f'<div class="card"><h3>{escape(title)}</h3>{svg}</div>' for title, svg in charts)
    return f'<h2>{escape(heading)}</h2><div class="grid">{cards}</div>'


def _section(view: Table, level: str = "h2") -> str:
    notes = "".join(f'<p class="{"bad" if WRONG in note else "dim"}">{escape(note)}</p>' for note in view.notes)
    return f"<{level}>{escape(view.title)}</{level}>{table(view.columns, view.rows)}{notes}"


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
        ["GPU clocks", _clocks(noise["gpu_clocks"]) if noise.get("gpu_clocks") else None],
        ["took", f"{record['seconds'] or 0:,.0f} s"],
    ]
    command = escape(shlex.join(record["command"]))
    return f"<h2>Machine, versions, command</h2>{table(['', ''], rows)}<p><code>{command}</code></p>"


def _clocks(clocks: Record) -> str:
    text = f"median {clocks['median_mhz']:,.0f} MHz, lowest {clocks['lowest_mhz']:,.0f} of "
    text += f"{clocks['highest_possible_mhz']:,.0f}; up to {clocks['highest_power_w']:,.0f} W and "
    text += f"{clocks['highest_temperature_c']:,.0f} degrees"
    return text + (f"; slowed by {', '.join(clocks['slowed_by'])}" if clocks["slowed_by"] else "; never slowed")

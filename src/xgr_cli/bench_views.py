"""Records of ``xgr bench`` as text."""

from __future__ import annotations

import shlex
import shutil
from typing import Any

from xgr_cli.output import PLAIN_WIDTH, Output, show
from xgr_engine.bench.compare import MISSING
from xgr_engine.bench.record_entries import MIN_SAMPLES
from xgr_engine.bench.report.tables import Table, part_tables, row_table

Record = dict[str, Any]
_WIDEST_TEXT = 40  # longer cells are wrapped
_GAP = 3  # between columns


def show_bench(out: Output, record: Record) -> None:
    """``record`` as ``xgr_engine.bench.run`` makes it."""
    machine, ceilings = record["machine"], record["ceilings"]
    versions = machine["versions"]
    facts = {
        "machine": f"{machine['device_name']}, {machine['cores']} cores, {machine['threads']} threads",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "measured ceilings": f"{ceilings['tflops']:.3g} TFLOP/s ({ceilings['matmul']}), "
        f"{ceilings['tbs']:.3g} TB/s ({ceilings['copy']})",
        "command": shlex.join(record["command"]),
        "seconds": f"{record['seconds']:,.0f}",
    }
    facts |= {"warning" if at == 0 else f"warning {at + 1}": text for at, text in enumerate(record["warnings"])}
    out.fields(facts, title="Benchmark" + (f", preset {record['preset']}" if record["preset"] else ""))
    out.print("")
    for row in record["rows"]:
        _show_table(out, row_table(row, ceilings))
    for table in part_tables(record):
        _show_table(out, table)


def _show_table(out: Output, table: Table) -> None:
    """The title is printed separately: as part of the table it would be wrapped to the table's width."""
    from rich.text import Text

    out.print(Text(table.title, style="bold"))
    for part in _parts(table, shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns):
        out.table([table.columns[at] for at in part], [[row[at] for at in part] for row in table.rows])
    for note in table.notes:
        out.print(Text(f"  {note}", style="dim"))
    if table.notes:
        out.print("")


def _parts(table: Table, width: int) -> list[list[int]]:
    """Column numbers of the parts into which a table is split so that each fits the width, the first column in every
    part: on a narrow terminal a whole table would wrap its numbers."""
    needed = [
        min(_WIDEST_TEXT, max(len(show(cell)) for cell in (name, *(row[at] for row in table.rows))))
        for at, name in enumerate(table.columns)
    ]
    parts: list[list[int]] = []
    used = width
    for at in range(1, len(needed)):
        if used + needed[at] + _GAP > width:
            parts.append([0])
            used = needed[0] + _GAP
        parts[-1].append(at)
        used += needed[at] + _GAP
    return parts


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
            "WORSE" if row["regression"] else "not counted" if row["not_counted"] else "",
        ]
        for row in comparison["rows"]
    ]
    out.table(["row", "", "figure", "before", "after", "after / before", ""], rows)
    if not comparison["same_machine"]:
        out.print(f"different machines: {' and '.join(comparison['machines'])}")
    for name in ("only_before", "only_after"):
        if comparison[name]:
            out.print(f"{name.replace('_', ' ')}: {len(comparison[name])} row(s) of a contender without a counterpart")
    if any(row["after"] == MISSING for row in comparison["rows"]):
        for text in comparison["left_out"]:
            out.print(f"not run after: {text}")
    if few := len(comparison["not_counted"]):
        why = f"come from fewer than {MIN_SAMPLES} samples, or from a search cut short by its time limit"
        out.print(f"{few} figure(s) got worse, but {why}: not counted")
    out.print(f"{len(comparison['regressions'])} regression(s)")

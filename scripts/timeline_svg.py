"""A picture of a timeline that ``xgr recommend --trace`` wrote: one row per thread or lane, one bar per span.

python scripts/timeline_svg.py trace.json docs/img/timeline.svg --from 1.0 --seconds 2 [--title TEXT]
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LABEL, ROW, BAR = 1000, 130, 30, 18
COLOURS = {
    "read": "#4c78a8",
    "tokenise": "#72b7b2",
    "plan": "#b7a3d0",
    "prepare": "#8c6bb1",
    "submit": "#f2a541",
    "compute": "#e45756",
    "retry": "#9d1c20",
    "fetch": "#54a24b",
    "write": "#9d755d",
}
ORDER = ["read", "tokenise", "plan and upload", "MainThread", "CPU", "GPU lane 0", "GPU lane 1", "fetch", "write"]
SHOWN_AS = {"MainThread": "submit", "plan and upload": "plan, upload"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--from", dest="start", type=float, default=0.0, help="seconds after the first span")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of the window shown")
    parser.add_argument("--title", default="xgr recommend")
    args = parser.parse_args()
    svg = picture(json.loads(args.trace.read_text("utf-8")), args.start, args.seconds, args.title)
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    args.svg.write_text(svg, "utf-8")
    return 0


def picture(trace: dict[str, Any], start: float, seconds: float, title: str) -> str:
    """The window ``start .. start + seconds`` of a trace as SVG text."""
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    zero = min(event["ts"] for event in spans) + start * 1e6
    present = {names[event["tid"]] for event in spans}
    tracks = [track for track in ORDER if track in present] + sorted(present - set(ORDER))
    row_of = {track: row for row, track in enumerate(tracks)}
    scale = (WIDTH - LABEL - 10) / (seconds * 1e6)
    height = 40 + ROW * len(tracks) + 44
    parts = [_text(10, 22, title, 15, "bold")]
    for track, row in row_of.items():
        y = 40 + row * ROW
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{WIDTH - LABEL - 10}" height="{BAR}" fill="#f3f3f3"/>')
        parts.append(_text(10, y + 13, SHOWN_AS.get(track, track), 12))
    for event in spans:
        left = max(0.0, event["ts"] - zero) * scale
        right = min(seconds * 1e6, event["ts"] + event["dur"] - zero) * scale
        if right <= 0 or left >= WIDTH - LABEL - 10:
            continue
        y = 40 + row_of[names[event["tid"]]] * ROW
        parts.append(_bar(LABEL + left, y, max(0.6, right - left), event))
    for tick in range(6):
        x = LABEL + (WIDTH - LABEL - 10) * tick / 5
        parts.append(_text(x - 14, 40 + ROW * len(tracks) + 8, f"{seconds * tick / 5:.2g} s", 11))
    parts += _legend(sorted({event["name"] for event in spans}, key=list(COLOURS).index), height - 12)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def _bar(x: float, y: float, width: float, event: dict[str, Any]) -> str:
    facts = ", ".join(f"{value} {name}" for name, value in event["args"].items())
    label = escape(f"{event['name']} {event['dur'] / 1e3:.1f} ms" + (f" ({facts})" if facts else ""))
    colour = COLOURS[event["name"]]
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}" stroke="white" '
        f'stroke-width="0.4"><title>{label}</title></rect>'
    )


def _legend(names: list[str], y: int) -> list[str]:
    parts, x = [], LABEL
    for name in names:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(_text(x + 16, y, name, 12))
        x += 30 + 8 * len(name)
    return parts


def _text(x: float, y: float, text: str, size: int, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())

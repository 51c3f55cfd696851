"""The claims of the xGR paper (arXiv 2512.11529) beside what this run measured, where it measured them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


def paper_claims(record: Record) -> list[Record]:
    """One entry a claim that this run has figures for: ``paper`` is the paper's text, ``here`` ours."""
    return [*_memory(record), *_growth(record), *_attention(record), *_throughput(record)]


def _memory(record: Record) -> Iterable[Record]:
    """Device memory at W 512 with the longest prompt, the engine against pages."""
    rows = [row for row in record["rows"] if row["beam"] == 512]
    for model in dict.fromkeys(row["model"] for row in rows):
        row = max((row for row in rows if row["model"] == model), key=lambda row: (row["context"], row["users"]))
        ours, paged = (_contender(row, name) for name in ("xgr", "paged"))
        if ours and ours["device_peak_bytes"] is not None:
            there = f"{paged['device_peak_bytes'] / 1e9:.1f} GB" if paged else _why_not(row, "paged")
            yield {
                "claim": f"device memory at W 512, {row['context']} tokens x {row['users']} users, {model}",
                "paper": "10.6 GB against 46.3 GB",
                "here": f"{ours['device_peak_bytes'] / 1e9:.1f} GB against {there}",
                "ratio": paged["device_peak_bytes"] / ours["device_peak_bytes"] if paged else None,
            }


def _growth(record: Record) -> Iterable[Record]:
    """Latency from W 128 to W 512."""
    rows = {(row["model"], row["context"], row["users"], row["beam"]): row for row in record["rows"]}
    for (model, context, users, beam), narrow in rows.items():
        wide = rows.get((model, context, users, 512))
        if beam != 128 or wide is None:
            continue
        growths = {}
        for name in ("xgr", "paged"):
            before, after = _contender(narrow, name), _contender(wide, name)
            if before and after:
                growths[name] = after["latency_ms"]["p50"]["value"] / before["latency_ms"]["p50"]["value"]
        if "xgr" in growths:
            paged = f"{growths['paged']:.2f} times" if "paged" in growths else _why_not(wide, "paged")
            yield {
                "claim": f"latency from W 128 to 512, {context} tokens x {users} users, {model}",
                "paper": "",
                "here": f"{growths['xgr']:.2f} times against {paged}",
                "ratio": growths.get("paged", 0.0) / growths["xgr"] or None,
            }


def _attention(record: Record) -> Iterable[Record]:
    for entry in record["attention"]:
        if entry.get("status") == "ok" and entry["kernels"] == "triton":  # plain torch says nothing about kernels
            yield {
                "claim": f"decode attention of a layer, {entry['context']} tokens x {entry['users']} users x "
                f"W {entry['beam']}, {entry['model']}",
                "paper": "6.6 times quicker than paged",
                "here": f"{entry['xgr_ms']:.3f} ms against {entry['paged_ms']:.3f} ms",
                "ratio": entry["paged_over_xgr"],
            }


def _throughput(record: Record) -> Iterable[Record]:
    by_shape: dict[tuple[Any, ...], dict[str, Record]] = {}
    for entry in record["online"]:
        by_shape.setdefault((entry["model"], entry["context"], entry["beam"]), {})[entry["contender"]] = entry
    for (model, context, beam), found in by_shape.items():
        ours, paged = found.get("xgr"), found.get("paged")
        if ours and paged and ours["rate"]:
            other = f"{paged['rate']:,.1f} users/s" if paged["rate"] else "no rate that holds"
            limit = f"P99 <= {record['options']['slo_ms']:,.0f} ms"
            yield {
                "claim": f"throughput with {limit}, {context} tokens, W {beam}, {model}",
                "paper": "2.89 to 8 times others",
                "here": f"{ours['rate']:,.1f} users/s against {other}",
                "ratio": ours["rate"] / paged["rate"] if paged["rate"] else None,
            }


def _contender(row: Record, name: str) -> Record | None:
    """A contender's figures in a row, where it ran."""
    return next((one for one in row["contenders"] if one["name"] == name and one["status"] == "ok"), None)


def _why_not(row: Record, name: str) -> str:
    found = next((one for one in row["contenders"] if one["name"] == name), None)
    return found["status"] if found else "not run"

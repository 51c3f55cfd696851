"""One part of the engine switched off at a time. What does not exist is listed as not available, never simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from xgr_engine.bench.measure import Budget
from xgr_engine.bench.row import Row
from xgr_engine.bench.workloads import Workload

Note = Callable[[str], None]


@dataclass(frozen=True)
class Ablation:
    """A part, and the contender that runs without it (None: no such contender exists in this version).

    Attributes:
        off: what runs when it is off.
    """

    part: str
    off: str
    contender: str | None


ABLATIONS = (
    Ablation("xAttention", "paged attention, one sequence per beam, blocks copied on a fork", "paged"),
    Ablation("xBeam: constraint", "masks: dense for the first levels, sparse later", "paper-masks"),
    Ablation("xBeam: ragged rows", "W rows at every level but the root", "xgr-full-rows"),
    Ablation("xBeam: early termination", "every live row expanded, all candidates ranked", "xgr-full-sort"),
    Ablation("xSchedule: graph", "kernels launched one by one", "xgr-eager"),
    Ablation("xSchedule: overlap", "one batch at a time, host and device by turns", "xgr-no-overlap"),
    Ablation("xSchedule: streams", "two streams: batches in flight compute side by side", "xgr-two-streams"),
    Ablation("shared prefix", "the prompts' common beginning computed once per user", "xgr-no-shared-prefix"),
    Ablation("all of them", "paged, masks, W rows, full sort, eager, one thread", "all-off"),
)
# Prompts without a common beginning get one, of their length divided by this, so that there is something to share.
_PREFIX_DIVISOR = 8


def run_ablations(workload: Workload, budget: Budget, note: Note) -> dict[str, Any]:
    """Latency and rate with each part off, beside the whole engine, answers compared as everywhere.

    Returns:
        The workload and one entry a part; ``slower`` is how many times longer a user takes without it.
    """
    sharing = workload.model.decoder.causal and workload.users > 1
    if not workload.prompts and not workload.shared_prefix and sharing:
        workload = replace(workload, shared_prefix=workload.context // _PREFIX_DIVISOR)
    names = ["xgr", *(ablation.contender for ablation in ABLATIONS if ablation.contender)]
    row = Row(workload, names, budget, note).measure()
    measured = {entry["name"]: entry for entry in row.pop("contenders")}
    whole = measured["xgr"]
    entries = []
    for ablation in ABLATIONS:
        entry: dict[str, Any] = {"part": ablation.part, "off": ablation.off}
        found = measured.get(ablation.contender or "")
        if found is None:
            entry |= {"status": "not available", "reason": "no such variant in this version"}
        elif found["status"] == "not run":
            reason = found["reason"].removeprefix("not available: ")
            entry |= {"status": "not available", "reason": reason}
        elif found["status"] != "ok" or whole["status"] != "ok":
            entry |= {"status": found["status"], "reason": found.get("reason", "")}
        else:
            entry |= {
                "status": "ok",
                "contender": found["name"],
                "latency_ms": found["latency_ms"],
                "users_per_s": found["users_per_s"],
                "slower": whole["users_per_s"]["value"] / found["users_per_s"]["value"],
                "device_own_bytes": found["device_own_bytes"],
                "parity": found["parity"],
            }
        entries.append(entry)
    return {**row, "whole": whole, "parts": entries}

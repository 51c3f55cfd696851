"""What was found about the contenders of a row, and the row's record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from xgr_engine.bench.baselines.base import NotAvailableError, RankedSids
from xgr_engine.bench.cost import decode_work, kv_cache_bytes, prefill_work, rows_a_level
from xgr_engine.bench.measure import Estimate, Samples, quantile
from xgr_engine.bench.memory import Peak
from xgr_engine.bench.parity import Parity
from xgr_engine.bench.record import one_line
from xgr_engine.bench.workloads import Workload
from xgr_engine.xschedule.engines import is_out_of_memory


@dataclass
class Measured:
    """One contender's part of a row.

    Attributes:
        status: ``ok``, ``out of memory``, ``not run`` (with ``reason``) or ``failed`` (with ``reason``).
        rate: users a second, from batches one after the other, or in flight where the contender can.
        answer: to the batch that is compared; parity: what came of that, None where the definition did not fit.
        interleaved: its samples were taken between those of the others; its notes say why not.
        own_weights: it runs in another process, whose memory ``peak`` is, a copy of the weights included.
    """

    name: str
    what: str = ""
    status: str = "ok"
    reason: str = ""
    samples: Samples = field(default_factory=Samples)
    rate: Estimate | None = None
    rate_from: str = ""
    peak: Peak = field(default_factory=Peak)
    answer: RankedSids | None = None
    parity: Parity | None = None
    interleaved: bool = True
    own_weights: bool = False
    notes: list[str] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        """Why it has no figures."""
        if isinstance(error, NotAvailableError):
            self.status, self.reason = "not run", ": ".join(part for part in (error.what, error.hint) if part)
        elif is_out_of_memory(error):
            self.status, self.reason = "out of memory", ""
        else:
            self.status, self.reason = "failed", one_line(error)


def row_record(workload: Workload, comparison: dict[str, Any], contenders: Iterable[Measured]) -> dict[str, Any]:
    """The row: what was asked for, the least work that it takes, and each contender's figures."""
    users = workload.users
    prefill, decode = prefill_work(workload, users), decode_work(workload, users)
    return {
        "model": workload.model.name,
        "dtype": workload.model.dtype,
        "catalog": workload.catalog.name,
        "items": workload.catalog.trie.num_items,
        "context": workload.context,
        "users": users,
        "beam": workload.search.beam,
        "top_k": workload.search.top_k,
        "score_over": workload.search.score_over,
        "shared_prefix": workload.shared_prefix,
        "prompts": "given" if workload.prompts else "synthetic",
        "rows_a_level": rows_a_level(workload),
        "work": {
            "prefill_flops": prefill.flops,
            "prefill_bytes": prefill.bytes,
            "decode_flops": decode.flops,
            "decode_bytes": decode.bytes,
        },
        "kv_cache_bytes": kv_cache_bytes(workload, users),
        "weight_bytes": workload.model.bytes,
        "comparison": comparison,
        "contenders": [_contender_record(workload, found) for found in contenders],
    }


def _contender_record(workload: Workload, found: Measured) -> dict[str, Any]:
    record: dict[str, Any] = {"name": found.name, "what": found.what, "status": found.status}
    if found.status != "ok":
        return {**record, "reason": found.reason}
    latency, rate = quantile(found.samples.seconds, 50), found.rate
    assert latency is not None and rate is not None
    prefill, decode = prefill_work(workload, workload.users), decode_work(workload, workload.users)
    on_gpu = workload.model.device.type == "cuda"
    shared_weights = 0 if found.own_weights else workload.model.bytes
    return {
        **record,
        "latency_ms": found.samples.summary(),
        "users_per_s": rate.to_json(),
        "users_per_s_from": found.rate_from,
        "prompt_tokens_per_s": rate.scaled(workload.batch(0).tokens / workload.users).to_json(),
        "device_peak_bytes": shared_weights + (found.peak.device_own or 0) if on_gpu else None,
        "device_own_bytes": found.peak.device_own,
        "host_peak_bytes": found.peak.host,
        "host_own_bytes": found.peak.host_own,
        "tflops": (prefill.flops + _rows_computed(found.statistics) * decode.flops) / latency.value / 1e12,
        "tbs": (prefill.bytes + decode.bytes) / latency.value / 1e12,
        "parity": found.parity and found.parity.to_json(),
        "interleaved": found.interleaved,
        "notes": found.notes,
        "statistics": found.statistics,
    }


def _rows_computed(statistics: dict[str, Any]) -> float:
    """Share of the beam rows that a contender computed: with K below W the engine leaves out rows that cannot win, and
    gets no credit for them."""
    live = statistics.get("rows_live", 0)
    return float(statistics["rows_expanded"] / live) if live else 1.0

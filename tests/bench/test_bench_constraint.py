"""The constraint's cost: what is taken off for the heads, and shapes that used to break it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_support import CPU, TINY, tiny_workload

from xgr_engine.bench import constraint
from xgr_engine.bench.constraint import ConstraintShape, MaskedSearch, constraint_costs, engine_search, without_heads
from xgr_engine.bench.report.tables import constraint_table


@pytest.mark.parametrize("beam", [3, 9, 500])
def test_the_masked_head_is_timed_over_the_rows_of_its_search(monkeypatch: pytest.MonkeyPatch, beam: int) -> None:
    """It used to have W rows at every level, where the search has no more than the tokens of the level before."""
    workload = tiny_workload(context=1, beam=beam, top_k=3)
    hidden = torch.zeros(workload.users, workload.model.spec.hidden_size, dtype=workload.model.decoder.dtype)
    masked = MaskedSearch(workload, engine_search(workload, hidden)[1])
    rows: list[int] = []

    def spied(hidden: torch.Tensor, head: torch.Tensor, logits: Any = constraint._logits) -> torch.Tensor:
        rows.append(len(hidden))
        return torch.as_tensor(logits(hidden, head))

    monkeypatch.setattr(constraint, "_logits", spied)
    masked.run(hidden)
    searched = rows.copy()
    rows.clear()
    masked.head_only(hidden)
    assert rows == searched and len(rows) == 3


def test_a_difference_below_zero_is_no_figure() -> None:
    times = {"xgr_ms": 3.0, "head_ms": 1.0, "masked_ms": 7.0, "masked_head_ms": 8.0}
    left = without_heads(times)
    assert (left["constraint_ms"], left["masked_constraint_ms"], left["masked_over_xgr"]) == (2.0, None, None)
    assert len(left["notes"]) == 1 and left["notes"][0].startswith("masked: ")
    whole = without_heads(times | {"masked_ms": 9.0})
    assert (whole["masked_constraint_ms"], whole["masked_over_xgr"], whole["notes"]) == (1.0, 0.5, [])
    entry = {"items": 2000, "status": "ok", "overlap": 1.0, **left}
    view = constraint_table(
        {"sizes": [entry], "users": 1, "beam": 2, "codes": "4x2", "vocabulary": 9, "masked": "plain"}
    )
    assert view.rows == [[2000, 2.0, None, None, "ok, overlap 100.0%"]]
    assert view.notes[1].startswith("2,000 items, masked: ")


@pytest.mark.parametrize("part", ["run", "head_only"])
def test_the_engine_s_figure_stays_where_the_masked_search_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It used to be left out with the other's, though it had been measured."""

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MaskedSearch, part, full)
    monkeypatch.setattr(constraint, "head_only", lambda *arguments: None)  # takes no time, so that something is left
    entry = constraint_costs(TINY, ConstraintShape(2, 3, 7, 3), (90,), CPU, 0, lambda text: None)["sizes"][0]
    assert entry["constraint_ms"] == pytest.approx(entry["xgr_ms"] - entry["head_ms"]) and entry["constraint_ms"] > 0
    assert (entry["masked"], entry["masked_ms"], entry["masked_constraint_ms"]) == ("out of memory", None, None)
    assert (entry["masked_over_xgr"], entry["notes"]) == (None, [])


def test_more_users_than_tokens() -> None:
    """The users' last tokens are the first of the vocabulary; there may be fewer of them."""
    found = constraint_costs(TINY, ConstraintShape(40, 3, 7, 3), (90,), CPU, 0, lambda text: None)
    assert found["vocabulary"] < 40 and found["sizes"][0]["marks"] == []


def test_past_the_time_limit_no_further_size_is_begun_and_each_is_kept_at_once() -> None:
    kept: list[int] = []
    found = constraint_costs(
        TINY,
        ConstraintShape(2, 3, 7, 3),
        (90, 120),
        CPU,
        0,
        lambda text: None,
        lambda record: kept.append(len(record["sizes"])),
        lambda: True,
    )
    assert kept == [1, 2]
    assert [entry["status"] for entry in found["sizes"]] == ["ok", "not run"] and found["flatness"] == 1.0
    assert constraint_table(found).rows[1] == [120, None, None, None, "the time limit had passed"]

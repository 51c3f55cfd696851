"""A converted model with real histories: which prompts are drawn, and how long the rows say they are."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bench_support import CPU
from job_support import make_model, make_vocabulary

from xgr_engine.bench.choices import choose_options
from xgr_engine.bench.options import BenchWishes
from xgr_engine.bench.run import BenchCaller, run_bench
from xgr_engine.errors import HistoryError, UsageError


@pytest.fixture(scope="module")
def wishes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Histories of 25 to 30 items of three codes: prompts longer than a row on a CPU has where nothing is said."""
    root = tmp_path_factory.mktemp("real")
    histories = [[100 + item for item in range(length)] for length in (25, 28, 30)]
    pq.write_table(pa.table({"user_id": ["a", "b", "c"], "history": histories}), root / "users.parquet")
    return {
        "model": str(make_model(root / "model", max_context=128)),
        "vocab": str(make_vocabulary(root / "vocab")),
        "inputs": (str(root / "users.parquet"),),
        "beam": "4,8",
        "top_k": 4,
        "baselines": "none",
        "ablations": False,
        "budget_s": 0.02,
    }


@pytest.mark.parametrize("preset", [None, "quick"])
def test_without_a_context_prompts_are_taken_whole(wishes: dict[str, object], preset: str | None) -> None:
    """The default of 64 tokens for synthetic prompts used to leave no real one: ``--in`` alone ended with an error."""
    options = choose_options(CPU, BenchWishes(preset=preset, online=False, **wishes))  # type: ignore[arg-type]
    record = run_bench(options, CPU, BenchCaller())
    shortest, longest = sorted(row["context"] for row in record["rows"])
    assert shortest == longest >= 90
    assert [entry["context"] for entry in record["attention"]] == [longest, longest]
    assert not [left for left in record["left_out"] if "tokens" in left.get("part", "")]


def test_a_context_leaves_longer_prompts_out(wishes: dict[str, object]) -> None:
    given = BenchWishes(context="80", **wishes)  # type: ignore[arg-type]
    record = run_bench(choose_options(CPU, given), CPU, BenchCaller())
    assert {75 <= row["context"] <= 80 for row in record["rows"]} == {True}
    with pytest.raises(UsageError, match="at most 40 tokens"):
        run_bench(choose_options(CPU, BenchWishes(context="40", **wishes)), CPU, BenchCaller())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("histories", "column", "error", "said"),
    [
        ([[1], [2]], "history", UsageError, r"rows makes a prompt\nthe first of them: none of its 1 ids is in the"),
        ([], "history", UsageError, "there are no rows"),
        (["[100]", "[101]"], "history", HistoryError, "holds text, not lists"),
        ([[100]], "items", HistoryError, "no column 'items'"),
    ],
    ids=["unknown", "empty", "text", "absent"],
)
def test_users_without_a_prompt_are_told_why_by_options_that_there_are(
    wishes: dict[str, object], tmp_path: Path, histories: list[object], column: str, error: type, said: str
) -> None:
    kind = pa.string() if histories and isinstance(histories[0], str) else pa.list_(pa.int64())
    pq.write_table(pa.table({"history": pa.array(histories, kind)}), tmp_path / "users.parquet")
    given = BenchWishes(**{**wishes, "inputs": (str(tmp_path / "users.parquet"),), "history_col": column})  # type: ignore[arg-type]
    with pytest.raises(error, match=said) as raised:
        run_bench(choose_options(CPU, given), CPU, BenchCaller())
    assert "--list-text" not in str(raised.value) and "--keep" not in str(raised.value)

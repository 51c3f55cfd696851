"""Shards, batches, memory and options: plans are complete, deterministic and within their limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.errors import UsageError
from xgr_engine.job.manifest import differences
from xgr_engine.job.options import (
    NOT_IN_FINGERPRINT,
    HistoryOptions,
    RecommendOptions,
    fingerprinted,
    flatten,
    max_rejects_of,
    parse_memory,
)
from xgr_engine.job.shards import plan_shards
from xgr_engine.options import SearchOptions
from xgr_engine.xschedule.memory import CostModel, default_budget, plan_limits

files_of_groups = st.lists(st.lists(st.integers(0, 50), max_size=6), min_size=1, max_size=4)


@given(files_of_groups, st.integers(1, 60), st.one_of(st.none(), st.integers(1, 200)))
@settings(max_examples=150, deadline=None)
def test_shards_cover_the_first_rows_once_in_order(files: list[list[int]], most: int, limit: int | None) -> None:
    shards = plan_shards(files, most, limit)
    rows = [(shard.file, row) for shard in shards for row in range(shard.start, shard.stop)]
    whole = [(file, row) for file, groups in enumerate(files) for row in range(sum(groups))]
    assert rows == whole[:limit]
    assert [shard.first_row for shard in shards] == np.cumsum([0, *(shard.rows for shard in shards)])[:-1].tolist()
    assert all(shard.rows <= most and shard.index == i and shard.count == len(shards) for i, shard in enumerate(shards))


def test_large_groups_are_split_small_ones_joined_never_across_files() -> None:
    shards = plan_shards([[100], [10, 10, 10], [30]], 32)
    assert [(s.file, s.start, s.stop) for s in shards] == [
        (0, 0, 32), (0, 32, 64), (0, 64, 96), (0, 96, 100), (1, 0, 30), (2, 0, 30),
    ]  # fmt: skip
    assert shards[-1].name == "part-00005-of-00006"


COST = CostModel(
    per_token=1000, per_row=500, per_user=2000, rows_per_user=64, logits_per_row=3000, logits_cap=1_000_000
)


def test_logits_are_computed_in_the_chunks_that_the_plan_assumes() -> None:
    from xgr_engine.kernels.reference import LOGITS_BYTES
    from xgr_engine.xschedule import memory

    assert memory._LOGITS_CHUNK == LOGITS_BYTES


@given(st.integers(3 * 10**5, 10**10), st.integers(1, 10**6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_largest_planned_batch_fits_the_budget_at_full_width(budget: int, longest: int, gpu: bool) -> None:
    limits = plan_limits(COST, budget, longest, gpu)
    assert limits.rows_per_user == COST.rows_per_user
    assert COST.of_batch(limits.tokens, limits.users) <= budget
    assert COST.of_batch(limits.longest_prompt, 1) <= budget
    assert 1 <= limits.longest_prompt <= longest


def test_a_budget_too_small_for_one_user_is_refused_with_the_size_it_takes() -> None:
    with pytest.raises(UsageError, match="needs 40 MB") as refused:
        plan_limits(dataclasses.replace(COST, per_row=500_000), 10_000_000, 100, gpu=False)
    assert "never lowered" in refused.value.why


def test_default_budgets_do_not_follow_small_changes_of_free_memory() -> None:
    assert default_budget(None, 30 << 30) == default_budget(None, 5 << 30) == 2 << 30
    assert default_budget(100 << 30, None) == default_budget(101 << 30, None)


# ---- options ------------------------------------------------------------------------------------------------------

BASE = RecommendOptions(HistoryOptions(("users.parquet",)))

# Another value for every option: adding an option means adding a line here and deciding where it belongs.
OTHER: dict[str, Any] = {
    "histories.paths": ("other.parquet",),
    "histories.user_col": "uid",
    "histories.history_col": "past",
    "histories.history_format": "sids",
    "histories.list_text": "json",
    "histories.max_history": 3,
    "histories.on_unknown": "fail",
    "histories.on_empty": "template",
    "histories.exclude_seen": True,
    "histories.exclude_col": "deny",
    "histories.keep": ("country",),
    "histories.match": ("country",),
    "histories.limit": 5,
    "search.beam": 64,
    "search.top_k": 7,
    "search.score_over": "level",
    "search.collisions": "first",
    "model": "m",
    "vocab": "v",
    "out": "o",
    "item_cols": ("title",),
    "layout": "long",
    "shard_rows": 10,
    "partition_by": ("dt",),
    "device": "cpu",
    "threads": 1,
    "max_memory": 10**9,
    "max_rejects": "5",
    "on_error": "fail",
    "fresh": True,
    "filters.where": "price < 5",
    "filters.allow_items": ("allow.txt",),
    "filters.deny_items": ("deny.txt",),
    "filters.items_col": "id",
    "filters.diversify": "brand=2",
    "operation.grace": 5.0,
    "operation.wait": 60.0,
    "operation.metrics_file": "xgr.prom",
    "operation.cache_dir": "cache",
    "operation.trace": "trace.json",
    "slo_ms": 50.0,
}


def changed(name: str) -> RecommendOptions:
    group, _, inner = name.rpartition(".")
    if not group:
        return dataclasses.replace(BASE, **{name: OTHER[name]})
    nested = dataclasses.replace(getattr(BASE, group), **{inner: OTHER[name]})
    return dataclasses.replace(BASE, **{group: nested})


def test_every_option_is_in_the_fingerprint_unless_named_as_harmless() -> None:
    """A new option is in the fingerprint unless it is put on the list, and neither happens by accident."""
    names = {name for name, _ in flatten(BASE)}
    assert names == OTHER.keys()
    assert names >= NOT_IN_FINGERPRINT
    for name in names:
        differs = fingerprinted(changed(name)) != fingerprinted(BASE)
        assert differs == (name not in NOT_IN_FINGERPRINT), name
    # results do not depend on these; contents of inputs, model, vocabulary and item files are fingerprinted instead
    assert {
        "filters.allow_items", "filters.deny_items",
        "histories.paths", "model", "vocab", "out", "device", "threads", "max_memory", "max_rejects", "fresh",
        "operation.grace", "operation.wait", "operation.metrics_file", "operation.cache_dir",
        "operation.trace", "slo_ms",
    } == NOT_IN_FINGERPRINT  # fmt: skip


def test_every_option_of_the_command_reaches_the_engine_or_is_named_here() -> None:
    import inspect

    from xgr_cli.commands.recommend import recommend

    engine = {name.rsplit(".", 1)[-1] for name, _ in flatten(BASE)} - {"paths"}
    command = set(inspect.signature(recommend).parameters)
    assert command - engine == {"output", "inputs", "dry_run", "log_every"}
    assert engine <= command


def test_differences_of_two_runs_are_told_by_flag_with_both_values() -> None:
    other = dataclasses.replace(
        BASE,
        search=dataclasses.replace(BASE.search, top_k=7),
        histories=dataclasses.replace(BASE.histories, exclude_seen=True, keep=("country", "age"), max_history=5),
    )
    old, new = (
        {**{f"option {name}": value for name, value in fingerprinted(options).items()}, "model": model}
        for options, model in ((BASE, "m1"), (other, "m2"))
    )
    assert set(differences(old, new)) == {
        "--exclude-seen was off, is on",
        "--keep was not given, is country,age",
        "--max-history was not given, is 5",
        "--top-k was 50, is 7",
        "the content of --model was m1, is m2",
    }
    flags = (Path(__file__).parent.parent / "cli" / "options.txt").read_text("utf-8").replace("/", " ").split()
    for name in fingerprinted(BASE):
        assert differences({f"option {name}": 1}, {f"option {name}": 2})[0].split()[0] in flags


@pytest.mark.parametrize(
    ("text", "rows", "allowed"),
    [("1%", 1000, 10), ("1%", 99, 0), ("29%", 100, 29), ("0.5%", 1000, 5), ("7", 3, 7), ("0", 9, 0), ("0.01", 200, 2),
     ("100%", 7, 7)],
)  # fmt: skip
def test_max_rejects_as_count_or_share(text: str, rows: int, allowed: int) -> None:
    assert max_rejects_of(text, rows) == allowed


@pytest.mark.parametrize("text", ["", "-1", "x", "101%", "1.5", "nan", "nan%"])
def test_max_rejects_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--max-rejects"):
        max_rejects_of(text, 10)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("1e9", 10**9), ("1.5g", 15 * 10**8), ("3 kb".replace(" ", ""), 3000),
     ("7", 7), ("1TiB", 1 << 40)],
)  # fmt: skip
def test_memory_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5IB", "2XB", "..", "1e999"])
def test_memory_sizes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--max-memory"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"history_format": "prompt", "exclude_seen": True}, "--exclude-col"),
        ({"history_format": "prompt", "max_history": 5}, "--max-history"),
        ({"history_format": "prompt", "on_empty": "template"}, "--on-empty"),
        ({"history_format": "nonsense"}, "--history-format"),
        ({"limit": 0}, "--limit"),
    ],
)
def test_contradictions_are_usage_errors(given: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError) as refused:
        HistoryOptions(("users.parquet",), **given)
    assert match in str(refused.value) and refused.value.exit_code == 2


def test_search_options_refuse_more_results_than_beams() -> None:
    """cases.md: K > W is a clear usage error."""
    with pytest.raises(UsageError, match="--top-k 3"):
        SearchOptions(beam=2, top_k=3)


def test_nothing_is_held_open_by_a_plan(tmp_path: Path) -> None:
    assert plan_shards([[]], 5)[0].rows == 0

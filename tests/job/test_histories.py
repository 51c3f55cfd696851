"""From rows to prompts and exclusion sets, in all four history formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_support import CODES, OFFSETS, SIDS, Place

from xgr_engine.catalog.build import BuildOptions, build_vocabulary
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.job.histories import HistoryResolver, _split_tokens
from xgr_engine.job.input_formats import Rows
from xgr_engine.job.options import HistoryOptions
from xgr_engine.job.prompts import Prepared, make_prompt_maker
from xgr_engine.tokens.table import SidTokenTable


def prepare(place: Place, column: Any, exclude: Any = None, **given: Any) -> Prepared:
    if exclude is not None:
        given["exclude_col"] = "exclude"
    options = HistoryOptions(("-",), **given)
    resolver = HistoryResolver(load_vocabulary(place.vocab), load_model_dir(place.model).table, options)
    lists = {"history": column} | ({} if exclude is None else {"exclude": exclude})
    rows = Rows(pa.table({"user_id": range(len(column))}), lists, len(column))
    return make_prompt_maker(load_model_dir(place.model), resolver, options).prepare(rows)


def text(sid: list[int]) -> str:
    return "".join(f"<{letter}_{code}>" for letter, code in zip("abc", sid, strict=True))


def tokens(sid: list[int]) -> list[int]:
    return [offset + code for offset, code in zip(OFFSETS, sid, strict=True)]


def row_of(place: Place, item: int) -> int:
    return int(load_vocabulary(place.vocab).rows_of(pa.array([item]))[0])


def rows_of_sid(place: Place, sid: list[int]) -> list[int]:
    return sorted(row_of(place, 100 + number) for number, other in enumerate(SIDS) if other == sid)


def test_items_sids_and_tokens_of_one_history_make_one_prompt(place: Place) -> None:
    history = [0, 7, 35, 7]
    sids = [SIDS[number] for number in history]
    made = [
        prepare(place, [[100 + number for number in history]]),
        prepare(place, [[str(100 + number) for number in history]]),
        prepare(place, [[text(sid) for sid in sids]], history_format="sids"),
        prepare(place, [["-".join(map(str, sid)) for sid in sids]], history_format="sids"),
        prepare(place, [[token for sid in sids for token in tokens(sid)]], history_format="tokens"),
        prepare(place, [[token for sid in sids for token in tokens(sid)]], history_format="prompt"),
    ]
    for prepared in made:
        assert not prepared.rejects
        assert prepared.prompts[0].tolist() == [token for sid in sids for token in tokens(sid)]


def test_item_histories_exclude_the_item_and_keep_its_siblings(place: Place) -> None:
    prepared = prepare(place, [[100, 100]], exclude_seen=True)
    assert prepared.excluded[0].tolist() == [row_of(place, 100)]
    assert row_of(place, 136) != row_of(place, 100)


@pytest.mark.parametrize("history_format", ["sids", "tokens"])
def test_sid_and_token_histories_exclude_every_item_of_the_sid(place: Place, history_format: Any) -> None:
    sid = SIDS[0]
    cell: list[Any] = [text(sid)] if history_format == "sids" else tokens(sid)
    prepared = prepare(place, [cell, []], exclude_seen=True, history_format=history_format, on_empty="template")
    assert prepared.excluded[0].tolist() == rows_of_sid(place, sid) and len(prepared.excluded[0]) == 2
    assert not len(prepare(place, [cell], history_format=history_format).excluded[0])


def test_exclusions_by_column_match_by_text_and_join_the_seen_items(place: Place) -> None:
    prepared = prepare(place, [[100], [101], [102]], exclude=[["101", "999"], None, [103]], exclude_seen=True)
    expected = [[100, 101], [101], [102, 103]]
    assert [rows.tolist() for rows in prepared.excluded] == [sorted(row_of(place, i) for i in row) for row in expected]
    assert prepared.counts["unknown_exclusions"] == 1


def test_a_row_whose_exclusions_cannot_be_read_is_rejected_not_ignored(place: Place) -> None:
    exclude = pa.array([[100.0, float("nan")], [101.0]], pa.list_(pa.float64()))
    prepared = prepare(place, [[100], [101]], exclude=exclude)
    assert prepared.live == [1] and [(r.row, r.reason) for r in prepared.rejects] == [(0, "null-in-list")]


def test_ready_prompts_take_their_exclusions_from_the_column(place: Place) -> None:
    prepared = prepare(place, [[3, 4], [5]], exclude=[[100], []], history_format="prompt", exclude_seen=True)
    assert [prompt.tolist() for prompt in prepared.prompts] == [[3, 4], [5]]
    assert [rows.tolist() for rows in prepared.excluded] == [[row_of(place, 100)], []]


def test_ready_prompts_that_cannot_be_used_are_rejected_each_with_its_reason(place: Place) -> None:
    rows = [[3], [], None, [2 + 3 * CODES], [-1], list(range(2, 12)) * 10, [None], "text", ["x"]]
    prepared = prepare(place, rows, history_format="prompt")
    assert prepared.live == [0]
    assert {reject.row: reject.reason for reject in prepared.rejects} == {
        1: "empty-history", 2: "empty-history", 3: "bad-token", 4: "bad-token", 5: "prompt-too-long",
        6: "null-in-list", 7: "bad-prompt", 8: "bad-token",
    }  # fmt: skip


def test_a_long_history_loses_its_oldest_whole_items_to_the_context(place: Place) -> None:
    prepared = prepare(place, [[100 + i % 40 for i in range(100)], [101]])
    longest = prepared.prompts[0]
    assert len(longest) <= 64 and len(longest) % 3 == 0
    assert prepared.counts["dropped_items"] == 100 - len(longest) // 3
    assert longest[-3:].tolist() == tokens(SIDS[99 % 40])


def test_sids_outside_the_catalog_stay_in_the_prompt_if_the_model_can_spell_them(place: Place) -> None:
    unlisted = [7, 7, 7]
    assert unlisted not in SIDS
    column = [[text(unlisted), text(SIDS[1]), "<a_1><b_99><c_0>", "<a_1>", "rubbish", "<a_1><b_1><c_1><c_1>"]]
    prepared = prepare(place, column, history_format="sids", exclude_seen=True)
    assert prepared.prompts[0].tolist() == tokens(unlisted) + tokens(SIDS[1])
    assert prepared.counts["unknown_items"] == 4
    assert prepared.excluded[0].tolist() == rows_of_sid(place, SIDS[1])


def test_sids_as_numbers_are_read_beside_sids_as_tokens_and_beside_rubbish(place: Place) -> None:
    column = [["-".join(map(str, SIDS[0]))], [text(SIDS[1])], ["<rubbish>", "-".join(map(str, SIDS[2]))]]
    prepared = prepare(place, column, history_format="sids", exclude_seen=True)
    assert [prompt.tolist() for prompt in prepared.prompts] == [tokens(SIDS[number]) for number in range(3)]
    assert [rows.tolist() for rows in prepared.excluded] == [rows_of_sid(place, SIDS[number]) for number in range(3)]
    assert prepared.counts["unknown_items"] == 1


def test_sids_deeper_than_todays_catalog_stay_in_the_prompt_if_the_model_can_spell_them(tmp_path: Path) -> None:
    catalog = tmp_path / "c.parquet"
    pq.write_table(pa.table({"item_id": ["x", "y"], "sid": ["<a_1><b_2>", "<a_1><b_3>"]}), catalog)
    build_vocabulary([catalog], tmp_path / "vocab", ReadOptions(), BuildOptions())
    vocabulary = load_vocabulary(tmp_path / "vocab")
    templates = ("<a_{}>", "<b_{}>", "<c_{}>")
    table = SidTokenTable.from_levels([range(CODES)] * 3, [range(at, at + CODES) for at in OFFSETS], templates)
    column = [["<a_1><b_2><c_3>", "<a_1><b_3>", "<a_1><b_2><x_3>"]]
    resolver = HistoryResolver(vocabulary, table, HistoryOptions(("-",), history_format="sids"))
    resolved = resolver.resolve(Rows(pa.table({"user_id": [1]}), {"history": column}, 1))
    assert resolved.known.tolist() == [True, True, False]
    assert resolved.newest(None)[0].tolist() == [[1, 2, 3], [1, 3, -1]]
    assert resolved.leaves.tolist() == [-1, 1, -1]


def test_a_row_of_tokens_fares_alike_whether_or_not_another_row_writes_them_as_text(place: Place) -> None:
    row = [*tokens(SIDS[3]), -1, 5_000_000_000]
    alone = prepare(place, [row], history_format="tokens")
    beside = prepare(place, [row, [str(token) for token in tokens(SIDS[4])], ["x"]], history_format="tokens")
    assert alone.prompts[0].tolist() == beside.prompts[0].tolist() == tokens(SIDS[3])
    assert beside.prompts[1].tolist() == tokens(SIDS[4])
    assert [(reject.row, reject.reason) for reject in beside.rejects] == [(2, "bad-token")]


def test_stray_tokens_count_as_unknown_and_never_become_an_item(place: Place) -> None:
    good = tokens(SIDS[3])
    column = [[0, 1, *good, good[1], good[2], good[0]], [0]]
    prepared = prepare(place, column, history_format="tokens")
    assert prepared.prompts[0].tolist() == good
    # the run [0, 1], the run of two later tokens, and a SID cut short; then [0]
    assert prepared.counts["unknown_items"] == 4
    assert prepared.rejects[0].reason == "empty-history"


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=6))
@settings(max_examples=80, deadline=None)
def test_flat_tokens_split_into_the_sids_they_were_made_of(sids: list[list[int]]) -> None:
    code_of = [{10 * (level + 1) + code: code for code in range(4)} for level in range(3)]
    flat = [10 * (level + 1) + code for sid in sids for level, code in enumerate(sid)]
    assert list(_split_tokens(flat, code_of)) == [tuple(sid) for sid in sids]


def test_one_set_of_tokens_for_all_levels_is_split_by_length() -> None:
    code_of = [{4 + code: code for code in range(6)}] * 3
    assert list(_split_tokens([4, 5, 6, 9, 8, 7], code_of)) == [(0, 1, 2), (5, 4, 3)]


@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(95, 145), max_size=12)), min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(1, 5)),
)
@settings(max_examples=60, deadline=None)
def test_prompts_and_exclusions_equal_a_row_by_row_oracle(
    assets: tuple[Any, Any], rows: list[list[int] | None], newest: int | None
) -> None:
    place = Place(assets[0].parent, *assets)
    column = pa.array(rows, pa.list_(pa.int64()))
    prepared = prepare(place, column, exclude_seen=True, max_history=newest)
    unknown, live = 0, []
    for number, row in enumerate(rows):
        known = [item for item in row or [] if 100 <= item < 140]
        unknown += len(row or []) - len(known)
        if known:
            live.append(number)
            place_of = live.index(number)
            kept = known[-newest:] if newest else known
            expected = [token for item in kept for token in tokens(SIDS[item - 100])]
            assert prepared.prompts[place_of].tolist() == expected
            assert prepared.excluded[place_of].tolist() == sorted({row_of(place, item) for item in known})
    assert prepared.live == live and prepared.counts["unknown_items"] == unknown
    assert [reject.row for reject in prepared.rejects] == [n for n in range(len(rows)) if n not in live]


def test_excluded_rows_are_int32_and_sorted(place: Place) -> None:
    [rows] = prepare(place, [[139, 100, 120, 100]], exclude_seen=True).excluded
    assert rows.dtype == np.int32 and rows.tolist() == sorted(set(rows.tolist()))

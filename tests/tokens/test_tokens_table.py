"""The semantic-ID token table: found in tokenizers, proven, and compared with a catalog."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from token_support import KINDS, SID_TEXTS, byte_level, save_tokenizer, table_of
from tokenizers import AddedToken, Tokenizer, models

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import CheckpointError, InputError, UsageError
from xgr_engine.tokens.sid_tokens import check_level_offsets, offset_token_table, sid_token_table, split_template
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.tokens.tokenizer_files import open_source_tokenizer


def trie_of(*sids: tuple[int, ...]) -> ItemTrie:
    """A trie of distinct SIDs of one length, one item each."""
    rows = sorted(sids)
    codes, child_start, leaf_start = [], [], []
    parents = [()]
    for depth in range(len(rows[0])):
        nodes = sorted({row[: depth + 1] for row in rows})
        codes.append(np.array([node[-1] for node in nodes], np.int32))
        starts = [sum(node[:depth] < parent for node in nodes) for parent in parents] + [len(nodes)]
        child_start.append(np.array(starts, np.int32))
        leaf_start.append(
            np.array([next(at for at, row in enumerate(rows) if row[: depth + 1] == n) for n in nodes], np.int32)
        )
        parents = nodes
    leaves = len(rows)
    return ItemTrie(
        tuple(codes),
        tuple(child_start),
        tuple(leaf_start),
        np.full(leaves, len(rows[0]), np.uint8),
        np.arange(leaves + 1, dtype=np.int32),
        np.arange(leaves, dtype=np.int32),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ids_come_from_the_tokenizer_where_tokens_were_added_in_text_order(kind: str) -> None:
    tokenizer = KINDS[kind]()
    table = table_of(tokenizer)
    assert [codes.tolist() for codes in table.codes] == [list(range(5)), list(range(12)), list(range(12))]
    assert table.templates == ("<a_{}>", "<b_{}>", "<c_{}>")
    for level, letter in enumerate("abc"):
        for code, token_id, text in zip(
            table.codes[level].tolist(), table.token_ids[level].tolist(), table.texts[level], strict=True
        ):
            assert text == f"<{letter}_{code}>"
            assert tokenizer.token_to_id(text) == token_id
    # "<b_10>" sorts before "<b_2>" as text: ids are not offset + code
    assert (np.diff(table.token_ids[1]) < 0).any()


def test_tokens_that_no_catalog_uses_are_in_the_table() -> None:
    table = table_of(byte_level([*SID_TEXTS, "<d_3>", "<d_70>"]))
    assert table.levels == 4
    assert table.codes[3].tolist() == [3, 70]


@pytest.mark.parametrize(
    ("texts", "templates"),
    [
        (["<s_a_0>", "<s_a_10>", "<s_b_7>"], ("<s_a_{}>", "<s_b_{}>")),
        (["<C0_12>", "<C1_3>", "<C2_0>"], ("<C0_{}>", "<C1_{}>", "<C2_{}>")),
    ],
)
def test_known_spellings_are_found(texts: list[str], templates: tuple[str, ...]) -> None:
    table = table_of(byte_level(texts))
    assert table.templates == templates
    assert sorted(text for level in table.texts for text in level) == sorted(texts)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "no semantic-ID tokens"),
        (["<a_1>", "<b_1>", "<s_a_1>"], "two spellings"),
        (["<a_1>", "<c_1>"], "levels a, c"),
        (["<b_1>", "<c_1>"], "levels b, c"),
        (["<a_01>", "<b_007>"], "no semantic-ID tokens"),
    ],
)
def test_what_must_not_be_guessed_is_an_error(texts: list[str], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        table_of(byte_level(texts))
    assert "--sid-tokens" in caught.value.hint


def test_own_spelling() -> None:
    tokenizer = byte_level(["item0=3;", "item0=4;", "item1=9;", "<a_1>"])
    table = sid_token_table(tokenizer, "item0={}; item1={};")
    assert [codes.tolist() for codes in table.codes] == [[3, 4], [9]]
    with pytest.raises(CheckpointError, match=r"level 2: .* spelled item2=\{\};"):
        sid_token_table(tokenizer, "item0={};,item2={};")


@pytest.mark.parametrize("template", ["", "abc", "<a_{}_{}>", "<a_{}><a_{}>", "<a_{}> <b>"])
def test_own_spelling_that_cannot_be_split_is_an_error(template: str) -> None:
    with pytest.raises(UsageError, match="--sid-tokens"):
        split_template(template)


def test_token_that_encodes_to_two_ids_is_refused() -> None:
    """A token that is in the vocabulary but that the tokenizer cuts into pieces (a BPE entry without merges)."""
    letters = {letter: number for number, letter in enumerate("<>_abc0123456789")}
    tokenizer = Tokenizer(models.BPE({**letters, "<a_1>": 20, "<b_1>": 21}, []))
    with pytest.raises(CheckpointError, match=r"<a_1> is id 20 .* encodes it as \[0, 3, 2"):
        table_of(tokenizer)


def test_token_of_another_id_is_refused() -> None:
    """An added token that swallows its neighbourhood: <a_1> is read as the longer token."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<a_1>": 1, "<b_1>": 2}, unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken("<a", normalized=False)])
    with pytest.raises(CheckpointError, match="<a_1> is id 1"):
        table_of(tokenizer)


def test_tokenizer_without_c_255_is_named_before_any_work() -> None:
    table = table_of(byte_level())
    with pytest.raises(InputError, match=r"level 3: the model has no token for <c_255>"):
        table.bind(trie_of((0, 1, 2), (1, 1, 255)))
    columns = table.bind(trie_of((4, 0, 2), (4, 11, 0)))
    assert [column.tolist() for column in columns] == [[4], [0, 11], [2, 0]]


@dataclass
class Spelled:
    trie: ItemTrie
    sid_templates: tuple[str, ...] | None


def test_a_catalog_of_other_tokens_is_refused_though_its_codes_would_fit() -> None:
    table, trie = table_of(byte_level()), trie_of((4, 0, 2), (4, 11, 0))
    bound = [column.tolist() for column in table.bind(trie)]
    for spelling in (None, ("<a_{}>", "<b_{}>", "<c_{}>")):
        assert [column.tolist() for column in table.bind_catalog(Spelled(trie, spelling))] == bound
    for spelling in (("<x_{}>", "<b_{}>", "<c_{}>"), ("<b_{}>", "<c_{}>", "<a_{}>")):
        with pytest.raises(InputError, match=r"level 1: the catalog's tokens are spelled <[xb]_\{\}>, the model's <a"):
            table.bind_catalog(Spelled(trie, spelling))
    numbers = SidTokenTable.from_levels(table.codes, table.token_ids)  # tokens without a spelling fit any
    assert [column.tolist() for column in numbers.bind_catalog(Spelled(trie, ("<x_{}>",) * 3))] == bound


def test_catalog_deeper_than_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="SIDs of 4 codes"):
        table_of(byte_level()).bind(trie_of((0, 0, 0, 0)))


def test_offsets_reach_to_the_next_level_and_the_last_to_the_vocabulary() -> None:
    table = offset_token_table((2, 258, 514, 770), 1026)
    assert [len(codes) for codes in table.codes] == [256] * 4
    assert table.token_ids[3].tolist() == list(range(770, 1026))
    shared = offset_token_table((10, 10), 14)  # one set of tokens for both levels
    assert [ids.tolist() for ids in shared.token_ids] == [[10, 11, 12, 13]] * 2
    assert offset_token_table((8, 3), 12).codes[1].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="no token for code 256"):
        table.bind(trie_of((0, 256, 0, 0)))


def test_levels_with_one_offset_need_codes_that_differ_from_level_to_level() -> None:
    """--token-offsets 2,2,2: token 5 would be code 3 of every level."""
    check_level_offsets((2, 258, 514), None)
    with pytest.raises(UsageError, match="levels 1 and 2 both begin at token 2") as caught:
        check_level_offsets((2, 2, 2), None)
    assert "--vocab" in caught.value.hint
    with pytest.raises(UsageError, match="levels 1 and 3 both begin at token 2: code 7 of either is token 9"):
        check_level_offsets((2, 258, 2), trie_of((7, 1, 2), (8, 1, 7)))
    check_level_offsets((2, 2, 2), trie_of((7, 10, 20), (8, 11, 21)))
    check_level_offsets((2, 2), trie_of((7,), (8,)))


@pytest.mark.parametrize("offsets", [(), (-1, 4), (3, 20)])
def test_bad_offsets_are_usage_errors(offsets: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="--token-offsets"):
        offset_token_table(offsets, 20)


@pytest.mark.parametrize("table", [table_of(byte_level()), offset_token_table((2, 7), 12)], ids=["texts", "offsets"])
def test_json_round_trip(table: SidTokenTable) -> None:
    again = SidTokenTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.texts == table.texts
    assert again.templates == table.templates
    for ours, theirs in zip(again.codes + again.token_ids, table.codes + table.token_ids, strict=True):
        assert ours.tolist() == theirs.tolist()
        assert ours.dtype == np.int32


@pytest.mark.parametrize(
    "level",
    [
        {"template": "<a_{}>", "codes": [3, 3], "token_ids": [1, 2]},
        {"template": "<a_{}>", "codes": [1, 2], "token_ids": [1]},
        {"template": "<a_{}>", "codes": [], "token_ids": []},
        {"template": None, "codes": [1], "token_ids": [-5]},
    ],
)
def test_broken_json_is_an_error(level: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="level 1"):
        SidTokenTable.from_json([level])


# ---- files --------------------------------------------------------------------------------------------------------


def test_files_that_disagree_are_refused(tmp_path: Path) -> None:
    save_tokenizer(byte_level(), tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a_1>": 7}))
    with pytest.raises(CheckpointError, match="disagree about the token <a_1>") as caught:
        open_source_tokenizer(tmp_path)
    assert "added_tokens.json: id 7" in caught.value.why


def test_added_tokens_decoder_that_disagrees_is_refused(tmp_path: Path) -> None:
    save_tokenizer(byte_level(), tmp_path)
    config = {"added_tokens_decoder": {"400": {"content": "<z_1>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="disagree about the token <z_1>") as caught:
        open_source_tokenizer(tmp_path)
    assert "no such token" in caught.value.why


def test_stale_copy_that_only_lacks_tokens_is_no_contradiction(tmp_path: Path) -> None:
    tokenizer = byte_level()
    save_tokenizer(tokenizer, tmp_path, eos="<|im_end|>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": tokenizer.token_to_id("<|im_end|>")}))
    source = open_source_tokenizer(tmp_path)
    assert source is not None
    assert source.eos_token == "<|im_end|>"
    assert source.bos_token is None
    assert table_of(source.tokenizer).levels == 3


def test_special_tokens_may_be_objects_and_stand_in_either_file(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|im_start|>"}}))
    source = open_source_tokenizer(tmp_path)
    assert source is not None
    assert (source.bos_token, source.eos_token) == ("<|im_start|>", None)


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """A trainer's max_length must not cut the histories of a nightly job."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    save_tokenizer(tokenizer, tmp_path)
    source = open_source_tokenizer(tmp_path)
    assert source is not None
    assert len(source.tokenizer.encode("<a_1>" * 9).ids) == 9
    assert len(source.tokenizer.encode("<a_1>").ids) == 1


def test_no_tokenizer_and_half_a_tokenizer(tmp_path: Path) -> None:
    assert open_source_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model but no tokenizer\.json"):
        open_source_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        open_source_tokenizer(tmp_path)


@pytest.mark.parametrize("added", [[1], "x", {"400": None}, {"400": {}}, {"x": {"content": "<a_1>"}}])
def test_added_tokens_decoder_of_no_sensible_shape_is_named(added: object, tmp_path: Path) -> None:
    save_tokenizer(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder must give each id"):
        open_source_tokenizer(tmp_path)


def test_null_added_tokens_decoder_is_none(tmp_path: Path) -> None:
    save_tokenizer(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": None}))
    assert open_source_tokenizer(tmp_path) is not None

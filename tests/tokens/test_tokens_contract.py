"""The score contract: suffix tokens are proven after semantic-ID tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from token_support import KINDS, byte_level, save_tokenizer, table_of
from tokenizers import AddedToken, Tokenizer

from xgr_engine.errors import CheckpointError, UsageError
from xgr_engine.tokens.contract import ScoreContract, make_score_contract
from xgr_engine.tokens.sid_tokens import offset_token_table
from xgr_engine.tokens.tokenizer_files import SourceTokenizer, open_source_tokenizer


def source_of(tokenizer: Tokenizer, folder: Path, eos: str | None = None) -> SourceTokenizer:
    save_tokenizer(tokenizer, folder, eos=eos)
    source = open_source_tokenizer(folder)
    assert source is not None
    return source


@pytest.mark.parametrize("suffix", ["\n", "\\n"])
def test_line_break_given_as_itself_or_as_a_shell_leaves_it(suffix: str, tmp_path: Path) -> None:
    source = source_of(byte_level(), tmp_path)
    contract = make_score_contract(suffix, source, table_of(source.tokenizer))
    assert contract.suffix_text == "\n"
    assert contract.suffix_ids == tuple(source.tokenizer.encode("\n").ids)
    assert len(contract.suffix_ids) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_suffix_is_what_follows_a_sid_in_the_text(kind: str, tmp_path: Path) -> None:
    source = source_of(KINDS[kind](), tmp_path)
    table = table_of(source.tokenizer)
    contract = make_score_contract("\\n", source, table)
    for text in (table.texts[2][0], table.texts[1][-1]):
        ids = source.tokenizer.encode(text + "\n", add_special_tokens=False).ids
        assert tuple(ids[1:]) == contract.suffix_ids


def test_eos_and_line_break_then_eos(tmp_path: Path) -> None:
    source = source_of(byte_level(), tmp_path, eos="<|im_end|>")
    table = table_of(source.tokenizer)
    eos = source.tokenizer.token_to_id("<|im_end|>")
    assert make_score_contract("eos", source, table) == ScoreContract((eos,), "<|im_end|>")
    line_break = source.tokenizer.encode("\n").ids
    assert make_score_contract("\\n<|im_end|>", source, table).suffix_ids == (*line_break, eos)


def test_no_suffix_needs_nothing() -> None:
    assert make_score_contract("", None, offset_token_table((0,), 4)) == ScoreContract()


def test_suffix_without_tokenizer_or_eos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer"):
        make_score_contract("eos", None, offset_token_table((0,), 4))
    source = source_of(byte_level(), tmp_path)
    with pytest.raises(CheckpointError, match="names no eos_token"):
        make_score_contract("eos", source, table_of(source.tokenizer))


def test_suffix_that_depends_on_the_sid_is_refused(tmp_path: Path) -> None:
    """Some tokens swallow the blank behind them: the suffix would not be the same tokens for every item."""
    tokenizer = byte_level([f"<a_{code}>" for code in range(3)])
    tokenizer.add_tokens([AddedToken(f"<b_{code}>", rstrip=True, normalized=False) for code in range(3)])
    source = source_of(tokenizer, tmp_path)
    with pytest.raises(CheckpointError, match="after semantic-ID tokens"):
        make_score_contract(" x", source, table_of(source.tokenizer))


def test_round_trip() -> None:
    contract = ScoreContract((201, 0), "\n<|im_end|>")
    assert ScoreContract.from_json(contract.to_json()) == contract

"""Prompts of T5 checkpoints: which one, which end token, what is refused; the command line; the published fixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_support import make_checkpoint
from t5_support import OFFSETS, OFFSETS_TEXT, make_t5
from token_support import save_tokenizer, t5_like

from xgr_cli.main import run
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.checkpoint.options import ConvertOptions, ConvertReport
from xgr_engine.errors import CheckpointError, InputError, UsageError


def converted(source: Path, **more: Any) -> ConvertReport:
    return convert(ConvertOptions(**{"source": source, "out": source.parent / "out", "token_offsets": OFFSETS, **more}))


def with_tokenizer(folder: Path, *, eos: str | None = "</s>", **config: Any) -> Path:
    """As LETTER-TIGER saves it: T5's tokenizer with tokens added for the codes that occur."""
    tokenizer = t5_like()
    source = make_t5(folder, vocab_size=tokenizer.get_vocab_size(), **config)
    save_tokenizer(tokenizer, source, eos=eos)
    return source


# ---- which prompt ---------------------------------------------------------------------------------------------------


def test_tiger_unless_another_is_named(tmp_path: Path) -> None:
    report = converted(make_t5(tmp_path / "source"))
    assert report.warnings == ()
    renderer = report.model.renderer()
    assert renderer.max_tokens == 2048 - 3
    assert renderer.render([[(1, 2, 3), (0, 9, 4)]])[0].token_ids.tolist() == [3, 14, 25, 2, 21, 26, 1]
    assert renderer.render([[]])[0].token_ids.tolist() == [1]


def test_context_drops_the_oldest_items_and_never_the_end_token(tmp_path: Path) -> None:
    renderer = converted(make_t5(tmp_path / "source", n_positions=11)).model.renderer()
    prompt = renderer.render([[(1, 1, 1), (2, 2, 2), (3, 3, 3)]])[0]  # room for 8 tokens: two items and the end token
    assert (prompt.token_ids.tolist(), prompt.dropped) == ([4, 14, 24, 5, 15, 25, 1], 1)


def test_tokenizer_with_added_tokens(tmp_path: Path) -> None:
    model = converted(with_tokenizer(tmp_path / "source"), token_offsets=None).model
    assert model.prompt.eos_ids == (1,)
    tokenizer = t5_like()
    rendered = model.renderer().render([[(1, 11, 2), (4, 0, 10)]])[0].token_ids.tolist()
    assert rendered == tokenizer.encode("<a_1><b_11><c_2><a_4><b_0><c_10>").ids
    assert rendered[-1] == 1


def test_presets_of_decoders_are_refused_for_a_t5(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source")
    for preset in ("lc-rec", "minionerec-eval", "openonerec"):
        with pytest.raises(UsageError, match=f"--prompt {preset}: is worded for a decoder") as caught:
            converted(source, token_offsets=None, prompt=preset)
        assert "--prompt tiger" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_tiger_is_refused_for_a_decoder(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(UsageError, match="--prompt tiger: is made for an encoder") as caught:
        convert(ConvertOptions(source, tmp_path / "out", prompt="tiger"))
    assert "sids-only" in caught.value.hint


def test_prompt_without_the_end_token_is_warned_about(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source")
    report = converted(source, token_offsets=None, prompt="sids-only")
    assert "the prompt sids-only does not end with the end token" in report.warnings[0]
    again = converted(source, token_offsets=None, prompt="sids-only")
    assert (again.status, again.warnings) == ("unchanged", report.warnings)
    for text, warned in (("{{ history }}</s>", False), ("{{ history }}", True)):
        file = tmp_path / "mine.j2"
        file.write_text(text)
        report = converted(source, token_offsets=None, prompt=str(file), out=tmp_path / f"warned {warned}")
        assert bool(report.warnings) is warned


@pytest.mark.parametrize(
    ("text", "warned"),
    [("{{ history }}</s>", False), ("§ {{ history }}</s>", True), ("{% set joiner = '§' %}{{ history }}</s>", True)],
)
def test_words_that_the_tokenizer_does_not_know_are_warned_about(tmp_path: Path, text: str, warned: bool) -> None:
    file = tmp_path / "mine.j2"
    file.write_text(text)
    report = converted(with_tokenizer(tmp_path / "source"), token_offsets=None, prompt=str(file))
    assert ["1 are <unk>" in warning for warning in report.warnings] == [True] * warned


def test_a_decoder_whose_tokenizer_has_codes_alone_is_warned_of_a_prompt_with_words(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "datasets" / "movielens" / "checkpoint"
    report = convert(ConvertOptions(demo, tmp_path / "words", prompt="lc-rec"))
    assert "the tokenizer does not know all words of the prompt lc-rec" in report.warnings[0]
    assert convert(ConvertOptions(demo, tmp_path / "codes")).warnings == ()


# ---- which end token ------------------------------------------------------------------------------------------------


def test_end_token_comes_from_the_user_the_tokenizer_and_the_config_in_this_order(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source", eos_token_id=0)
    unnamed = with_tokenizer(tmp_path / "unnamed", eos=None, eos_token_id=0)
    found = [
        converted(source, token_offsets=None, out=tmp_path / "0", end_token=3).model.prompt.eos_ids,
        converted(source, token_offsets=None, out=tmp_path / "1").model.prompt.eos_ids,
        converted(unnamed, token_offsets=None, out=tmp_path / "2").model.prompt.eos_ids,
    ]
    assert found == [(3,), (1,), (0,)]


@pytest.mark.parametrize("named", [None, [1, 2]])
def test_config_that_names_no_or_two_end_tokens(named: list[int] | None, tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source", eos_token_id=named)
    with pytest.raises(CheckpointError, match=r"neither the tokenizer nor config\.json names one"):
        converted(source)
    assert converted(source, end_token=1).model.prompt.eos_ids == (1,)


def test_list_of_one_end_token(tmp_path: Path) -> None:
    assert converted(make_t5(tmp_path / "source", eos_token_id=[1])).model.prompt.eos_ids == (1,)


def test_end_tokens_that_cannot_be(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")
    with pytest.raises(CheckpointError, match="end token 1 is also the token of code 1, level 1"):
        converted(source, token_offsets=(0, 10, 20))  # the offsets of a model without padding and end token
    with pytest.raises(UsageError, match="end token 32 is not a token of the model: it has 0 to 31"):
        converted(source, end_token=32)
    for named in (32, -1):
        with pytest.raises(UsageError, match=f"end token {named} is not a token of the model"):
            converted(make_t5(tmp_path / f"named {named}", eos_token_id=named))
    with pytest.raises(UsageError, match="--end-token -1"):
        converted(source, end_token=-1)
    with pytest.raises(UsageError, match="--end-token 1: the prompt sids-only does not end"):
        converted(source, end_token=1, prompt="sids-only")
    assert not (tmp_path / "out").exists()


# ---- command line ---------------------------------------------------------------------------------------------------


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_t5(tmp_path / "source", eos_token_id=None)
    monkeypatch.chdir(tmp_path)
    Path("semantic_ids.json").write_text(json.dumps({"7": [1, 2, 3], "abc": [1, 2, 4], "07": [9, 9, 9]}))
    assert run(["build-vocab", "semantic_ids.json", "--out", "vocab", "-q"]) == 0
    assert sorted(load_vocabulary("vocab").item_ids.to_pylist()) == ["07", "7", "abc"]
    arguments = ["convert", "source", "--token-offsets", OFFSETS_TEXT]
    assert run(arguments) == 2
    assert "--end-token 1" in capsys.readouterr().err
    assert run([*arguments, "--end-token", "1"]) == 0
    printed = capsys.readouterr()
    assert "no --prompt: tiger, the tokens of the history and the end token" in printed.err
    assert "t5, 2 encoder and 3 decoder layers" in printed.out
    assert run(["inspect", "model", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "2 encoder and 3 decoder layers of 16" in shown and "4 key-value heads of 6" in shown
    assert "tiger" in shown and "end token" in shown
    assert run(["inspect", "model", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["spec"]["family"], record["prompt"]["eos_ids"]) == ("t5", [1])


@pytest.mark.shared_data
def test_published_tiger_from_catalog_to_lists(shared_data: Path, tmp_path: Path) -> None:
    """build-vocab, convert --verify and recommend: prompts, items and scores of all golden users."""
    pytest.importorskip("transformers")
    data = shared_data / "industrial"
    vocab, model, out = (str(tmp_path / name) for name in ("vocab", "model", "recs"))
    golden = json.loads((data / "golden_t5_tiger.json").read_text())["users"]
    assert len(golden) == 256
    assert run(["build-vocab", str(data / "t5_tiger" / "semantic_ids.json"), "--out", vocab, "-q"]) == 0
    offsets = ["--token-offsets", "2,258,514,770", "--prompt", "tiger", "--verify"]
    assert run(["convert", str(data / "t5_tiger"), "--vocab", vocab, "--out", model, *offsets, "-q"]) == 0

    vocabulary, renderer = load_vocabulary(vocab), load_model_dir(model).renderer()
    codes, _ = vocabulary.sids()
    histories = pq.read_table(data / "users.parquet", columns=["history"])["history"].to_pylist()[: len(golden)]
    for history, user in zip(histories, golden, strict=True):
        assert history == [str(item) for item in user["history_item_id"]]
        rows = vocabulary.rows_of(pa.array(history))
        prompt = renderer.render([list(map(tuple, codes[vocabulary.leaf_of_row[rows]].tolist()))])[0]
        assert prompt.token_ids.tolist() == user["encoder_ids"]

    paths = ["--model", model, "--vocab", vocab, "--out", out, "--device", "cpu", "-q"]
    users = ["--in", str(data / "users.parquet"), "--limit", str(len(golden)), "--beam", "50", "--top-k", "50"]
    assert run(["recommend", *users, *paths]) == 0
    for row, user in zip(pq.read_table(out).to_pylist(), golden, strict=True):
        expected = dict(user["items"])
        found = {int(item["item_id"]): item["score"] for item in row["items"]}
        assert row["user_id"] == user["user_id"] and len(found) == 50
        assert {item for item in expected if expected[item] > min(expected.values()) + 1e-4} <= set(found)
        assert max(abs(score - expected[item]) for item, score in found.items() if item in expected) < 1e-4


# ---- offsets and the catalog ----------------------------------------------------------------------------------------


def vocabulary_of(folder: Path, *sids: list[int]) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "semantic_ids.json").write_text(json.dumps({str(item): sid for item, sid in enumerate(sids)}))
    assert run(["build-vocab", str(folder / "semantic_ids.json"), "--out", str(folder / "vocab")]) == 0
    return load_vocabulary(folder / "vocab")


def test_codes_beyond_an_offset_are_told_with_the_offsets(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path / "catalog", [1, 2, 3], [10, 2, 3])
    options = ConvertOptions(make_t5(tmp_path / "source"), tmp_path / "out", token_offsets=OFFSETS)
    with pytest.raises(InputError, match="level 1: the model has no token for code 10") as caught:
        convert(options, vocabulary)
    assert "with these --token-offsets, the level's codes go from 0 to 9" in caught.value.why
    assert "tokenizer" not in caught.value.why and "offsets" in caught.value.hint
    few = ConvertOptions(tmp_path / "source", tmp_path / "out", token_offsets=OFFSETS[:2])
    with pytest.raises(InputError, match="SIDs of 3 codes, but the model has tokens for 2 levels") as caught:
        convert(few, vocabulary)
    assert "one offset a level in --token-offsets" in caught.value.hint


def test_an_offset_too_many_brings_a_warning(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path / "catalog", [1, 2, 3], [2, 2, 3])
    source = make_t5(tmp_path / "source")
    report = convert(ConvertOptions(source, tmp_path / "four", token_offsets=(*OFFSETS, 30)), vocabulary)
    assert "--token-offsets names 4 levels, but the SIDs of the catalog have 3" in report.warnings[0]
    assert convert(ConvertOptions(source, tmp_path / "three", token_offsets=OFFSETS), vocabulary).warnings == ()


def test_end_token_of_a_tokenizer_that_is_a_code(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source", eos="<a_1>")
    with pytest.raises(CheckpointError, match="is also the token of <a_1>, level 1") as caught:
        converted(source, token_offsets=None)
    assert "--end-token" in caught.value.hint and "--token-offsets" not in caught.value.hint


def test_start_token_that_is_a_code_brings_a_warning(tmp_path: Path) -> None:
    """Offsets without room for padding and end token are easily taken for those of the model."""
    source = make_t5(tmp_path / "source")
    warned = converted(source, token_offsets=(0, 10, 20), out=tmp_path / "a", prompt="sids-only").warnings
    assert "start token 0 is also the token of code 0, level 1" in warned[-1]
    assert converted(source, out=tmp_path / "b").warnings == ()


@pytest.mark.parametrize(("start", "end", "codes"), [(0, 31, 9), (30, 31, 8), (31, 29, 7), (0, 1, 10)])
def test_special_tokens_behind_the_codes_are_no_codes(start: int, end: int, codes: int, tmp_path: Path) -> None:
    """Some models number the codes first, and padding and end token behind them."""
    source = make_t5(tmp_path / "source", decoder_start_token_id=start, eos_token_id=end)
    report = converted(source)
    assert report.warnings == ()
    assert [len(level) for level in report.model.table.codes] == [10, 10, codes]
    assert report.model.renderer().render([[(1, 2, 3)]])[0].token_ids.tolist() == [3, 14, 25, end]


def test_end_token_inside_the_last_level_leaves_catalog_codes_without_token(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path / "catalog", [1, 2, 3], [1, 2, 4])
    options = ConvertOptions(make_t5(tmp_path / "source", eos_token_id=26), tmp_path / "out", token_offsets=OFFSETS)
    with pytest.raises(InputError, match="level 3: the model has no token for code 4") as caught:
        convert(options, vocabulary)
    assert "the end token" in caught.value.why

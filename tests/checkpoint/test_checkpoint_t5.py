"""Conversion of a T5: names and tensors, types, the model directory, and parity with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import all_tensors, edit_config, edit_tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from t5_support import CONFIG, OFFSETS, make_t5
from torch import Tensor

from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.checkpoint.names import HF_T5, HF_T5_GATED, NameMap, names_of
from xgr_engine.checkpoint.options import ConvertOptions, ConvertReport, describe
from xgr_engine.errors import CheckpointError, UsageError, XgrError
from xgr_engine.models.spec import EncoderDecoderSpec

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


# As transformers 4 wrote a T5 of version 1.1, and 5 the same.
OWN_HEAD: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


UNSCALED: dict[str, Any] = {
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": True,
    "scale_decoder_outputs": False,
}


def converted(source: Path, **more: Any) -> ConvertReport:
    return convert(ConvertOptions(**{"source": source, "out": source.parent / "out", "token_offsets": OFFSETS, **more}))


def refused(source: Path, said: str, **more: Any) -> XgrError:
    """The error; nothing may be left behind."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(CheckpointError, match=said) as caught:
        converted(source, **more)
    assert caught.value.exit_code == 2
    assert sorted(source.parent.iterdir()) == before
    return caught.value


@given(st.sampled_from([HF_T5, HF_T5_GATED]), st.data(), st.integers(0, 10_000))
def test_names_map_both_ways(names: NameMap, data: st.DataObject, layer: int) -> None:
    name = data.draw(st.sampled_from(sorted(names.pairs))).replace("{i}", str(layer))
    own = names.to_xgr(name)
    assert own is not None
    assert "{i}" not in own
    assert names.to_foreign(own) == name


@pytest.mark.parametrize("names", [HF_T5, HF_T5_GATED])
def test_no_two_names_share_one_and_the_bias_has_no_layer(names: NameMap) -> None:
    assert len(set(names.pairs.values())) == len(names.pairs)
    bias = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    assert names.to_xgr(bias.format(0)) == "encoder.bias.weight"
    assert names.to_xgr(bias.format(1)) is None  # the name of UMT5, whose layers have biases of their own
    assert names.to_xgr(bias.format("{i}")) is None


@pytest.mark.parametrize("changes", [{}, OWN_HEAD, {"num_decoder_layers": 1, "num_layers": 4}])
def test_every_tensor_arrives_unchanged_under_its_own_name(changes: dict[str, Any], tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source", head=changes is OWN_HEAD, **changes)
    report = converted(source)
    model = report.model
    assert (report.warnings, report.skipped) == ((), ())
    theirs, ours, names = all_tensors(source), load_file(model.weights_path), names_of(model.spec)
    assert {names.to_foreign(name) for name in ours} == set(theirs)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == model.spec.tensor_shapes()
    for own, tensor in ours.items():
        foreign = names.to_foreign(own)
        assert foreign is not None
        assert names.to_xgr(foreign) == own
        assert torch.equal(tensor, theirs[foreign])


@pytest.mark.parametrize("kept", EMBEDDINGS)
def test_any_one_name_of_the_embedding_suffices(kept: str, tmp_path: Path) -> None:
    """Case: T5 files that hold only one of shared, encoder.embed_tokens, decoder.embed_tokens."""
    source = make_t5(tmp_path / "source")
    embed = all_tensors(source)["shared.weight"]
    edit_tensors(source, lambda t: t.update({kept: t.pop("shared.weight")}))
    report = converted(source)
    assert (report.skipped, report.model.spec.tied) == ((), True)
    assert torch.equal(load_file(report.model.weights_path)["embed.weight"], embed)


@pytest.mark.parametrize("missing", [None, *EMBEDDINGS])
def test_equal_copies_of_the_embedding_are_left_out(missing: str | None, tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")

    def copy(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensors["shared.weight"].clone() for name in (*EMBEDDINGS, "lm_head.weight")}
        tensors.pop(missing or "", None)

    edit_tensors(source, copy)
    report = converted(source)
    there = [name for name in EMBEDDINGS if name != missing]
    assert set(report.skipped) == {*there[1:], "lm_head.weight"}
    assert (report.model.spec.tied, report.warnings) == (True, ())


@pytest.mark.parametrize(("one", "other"), [EMBEDDINGS[:2], EMBEDDINGS[1:], EMBEDDINGS[::2]])
def test_different_embeddings_are_refused(one: str, other: str, tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")

    def spoil(tensors: dict[str, Tensor]) -> None:
        embed = tensors.pop("shared.weight")
        tensors |= {one: embed, other: embed + 1}

    edit_tensors(source, spoil)
    refused(source, f"{one} and {other} are different")


def test_head_of_its_own(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source", head=True, **OWN_HEAD)
    spec = converted(source).model.spec
    assert (spec.tied, spec.scaled_output, spec.gated) == (False, False, True)  # type: ignore[union-attr]
    edit_tensors(source, lambda t: t.pop("lm_head.weight"))
    refused(source, r"lm_head\.weight is missing", out=source.parent / "other")


def test_stored_head_counts_more_than_the_flag(tmp_path: Path) -> None:
    report = converted(make_t5(tmp_path / "source", head=True))
    assert not report.model.spec.tied
    assert report.model.spec.scaled_output  # type: ignore[union-attr]
    assert "a different one, which is used" in report.warnings[0]


def test_bias_of_cross_attention_in_old_files_is_left_out(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")
    old = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    edit_tensors(source, lambda t: t.update({old: torch.ones(8, 4)}))
    assert converted(source).skipped == (old,)


@pytest.mark.parametrize(
    "name",
    [
        "shared.weight",
        "encoder.block.1.layer.1.DenseReluDense.wi.weight",
        "decoder.block.2.layer.1.EncDecAttention.k.weight",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder.final_layer_norm.weight",
    ],
)
def test_missing_tensor(name: str, tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")
    edit_tensors(source, lambda t: t.pop(name))
    refused(source, f"1 tensors are missing: {name}".replace(".", r"\."))


@pytest.mark.parametrize(
    "name",
    [
        "encoder.block.2.layer.0.SelfAttention.q.weight",  # one layer more than the config has
        "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.block.0.layer.1.DenseReluDense.wi_1.weight",  # the gate of a model that has none
        "decoder.block.0.layer.0.SelfAttention.q.lora_A.weight",
        "classification_head.dense.weight",
    ],
)
def test_tensor_without_a_place(name: str, tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")
    edit_tensors(source, lambda t: t.update({name: torch.zeros(3)}))
    refused(source, f"1 tensors have no place in the model: {name}")


def test_gates_and_config_that_disagree(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source", feed_forward_proj="gated-gelu")
    edit_config(source, feed_forward_proj="relu")
    assert "wi_0" in refused(source, r"5 tensors are missing: decoder\.block\.0\.layer\.2\.DenseReluDense\.wi").why


def test_float16_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Case: T5 in float16: refused; bfloat16 and float32 offered."""
    source = make_t5(tmp_path / "source")
    error = refused(source, "a T5 cannot be stored in float16: --dtype float16", dtype="float16")
    assert "infinite" in error.why
    assert "bfloat16" in error.hint and "float32" in error.hint
    half = make_t5(tmp_path / "half", dtype=torch.float16)
    assert "--dtype bfloat16" in refused(half, "as these weights are").hint
    for dtype in ("bfloat16", "float32"):
        assert converted(half, dtype=dtype, out=tmp_path / dtype).model.spec.dtype == dtype


def test_bfloat16_stays(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source", dtype=torch.bfloat16)
    report = converted(source)
    assert report.model.spec.dtype == "bfloat16"
    assert "config.json says float32" in report.warnings[0]


def test_pickled_weights_name_the_class_that_saves_them_again(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "AutoModelForSeq2SeqLM.from_pretrained" in refused(source, "the weights are pickled").hint


def test_everything_comes_back_from_the_directory(tmp_path: Path) -> None:
    report = converted(make_t5(tmp_path / "source"))
    model = load_model_dir(report.model.path)
    assert model.spec == report.model.spec
    assert isinstance(model.spec, EncoderDecoderSpec)
    assert (model.prompt, model.fingerprint) == (report.model.prompt, report.model.fingerprint)
    assert (model.prompt.name, model.prompt.eos_ids) == ("tiger", (1,))
    model.verify_weights()
    assert converted(tmp_path / "source").status == "unchanged"
    record = json.loads(json.dumps(describe(report)))
    assert (record["family"], record["end_token"]) == ("t5", 1)


def test_fingerprint_changes_with_the_end_token_and_the_scale(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source", vocab_size=33)
    offsets = (3, 13, 23)
    prints = [converted(source, out=tmp_path / "0", token_offsets=offsets).model.fingerprint]
    prints.append(converted(source, out=tmp_path / "1", token_offsets=offsets, end_token=2).model.fingerprint)
    edit_config(source, scale_decoder_outputs=False)
    prints.append(converted(source, out=tmp_path / "2", token_offsets=offsets).model.fingerprint)
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("changes", "head"),
    [({}, False), (OWN_HEAD, True), (UNSCALED, False), ({"decoder_start_token_id": 5}, False), ({}, True)],
    ids=["tied", "own head, gated", "unscaled, gated", "another start token", "own head, scaled"],
)
def test_converted_model_computes_what_transformers_computes(
    changes: dict[str, Any], head: bool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    report = converted(make_t5(tmp_path / "source", head=head, **changes), verify=True)
    assert report.parity is not None
    assert report.parity.max_difference < 1e-4
    assert report.parity.same_best_token


def test_saved_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    keys = ("d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "vocab_size")
    config = transformers.T5Config(**{key: CONFIG[key] for key in keys}, feed_forward_proj="gated-gelu")
    config.decoder_start_token_id = 0
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source", max_shard_size="10KB")
    assert len(list((tmp_path / "source").glob("model-*.safetensors"))) > 2
    report = converted(tmp_path / "source", verify=True)
    assert report.warnings == ()
    assert report.model.spec.dtype == "bfloat16"
    assert report.parity is not None
    assert report.parity.max_difference < 1e-4


@pytest.mark.parametrize(
    "exchanged",
    [
        (
            "decoder.block.{i}.layer.2.DenseReluDense.wi_0.weight",
            "decoder.block.{i}.layer.2.DenseReluDense.wi_1.weight",
        ),
        ("decoder.block.{i}.layer.0.SelfAttention.k.weight", "decoder.block.{i}.layer.0.SelfAttention.v.weight"),
        ("encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"),
        (
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
    ],
)
def test_verify_finds_exchanged_tensors(
    exchanged: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    import xgr_engine.checkpoint.plan as plan

    one, other = exchanged
    pairs = dict(HF_T5_GATED.pairs)
    pairs[one], pairs[other] = pairs[other], pairs[one]
    monkeypatch.setattr(plan, "names_of", lambda _: NameMap(pairs))
    with pytest.raises(XgrError, match="differs from transformers"):
        converted(make_t5(tmp_path / "source", feed_forward_proj="gated-gelu"), verify=True)
    assert not (tmp_path / "out").exists()


def test_verify_on_given_prompts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "p.json").write_text(json.dumps([[3, 4, 5], [7, 1], [2] * 30]))
    report = converted(make_t5(tmp_path / "source"), verify=True, verify_prompts=tmp_path / "p.json")
    assert report.parity is not None
    assert (report.parity.prompts, report.parity.tokens) == (3, 35)


def test_offsets_beyond_the_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="level 3 starts at token 40"):
        converted(make_t5(tmp_path / "source"), token_offsets=(2, 12, 40))


def test_untrained_embedding_under_another_name(tmp_path: Path) -> None:
    source = make_t5(tmp_path / "source")
    tensors = all_tensors(source)
    embed = tensors.pop("shared.weight")
    embed[12:22] = 0.5
    save_file({**tensors, EMBEDDINGS[2]: embed}, source / "model.safetensors", metadata={"format": "pt"})
    refused(source, "level 2: the embeddings of all 10 semantic-ID tokens are equal")


@pytest.mark.parametrize(("changes", "kept"), [({}, True), ({"scale_decoder_outputs": True}, False)])
def test_hint_for_a_missing_head_keeps_the_scale(changes: dict[str, Any], kept: bool, tmp_path: Path) -> None:
    """transformers 5 ties such a file and does not scale: with tie_word_embeddings true alone, xgr would scale."""
    source = make_t5(tmp_path / "source", tie_word_embeddings=False, **changes)
    hint = refused(source, "lm_head.weight is missing").hint
    assert ("scale_decoder_outputs to false" in hint) is kept
    edit_config(source, tie_word_embeddings=True, **({"scale_decoder_outputs": False} if kept else {}))
    spec = converted(source).model.spec
    assert (spec.tied, spec.scaled_output) == (True, not kept)  # type: ignore[union-attr]


def test_verify_says_that_transformers_cannot_load_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = make_t5(tmp_path / "source", model_type=None)
    assert "model_type" in refused(source, "transformers cannot load the checkpoint", verify=True).why
    assert converted(source).status == "written"

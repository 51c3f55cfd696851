"""Checkpoints that must be refused, each with a message that names the cause; nothing is written for any of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import LLAMA3_ROPE, edit_config, edit_tensors, make_checkpoint, shards_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.errors import CheckpointError, OutputExistsError, XgrError


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A good single-file Qwen3; whatever a test does to it, no output and no leftovers may appear."""
    yield make_checkpoint(tmp_path / "source")
    assert [path.name for path in tmp_path.iterdir() if path.name != "source"] == []


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Path]:
    yield make_checkpoint(tmp_path / "source", shard_size="20KB")
    assert [path.name for path in tmp_path.iterdir() if path.name != "source"] == []


def refused(source: Path, said: str, **more: Any) -> XgrError:
    with pytest.raises(CheckpointError, match=said) as caught:
        convert(ConvertOptions(source, source.parent / "out", **more))
    assert caught.value.exit_code == 2
    return caught.value


# ---- files ----------------------------------------------------------------------------------------------------------


def test_deleted_shard_is_named(sharded: Path) -> None:
    """Case: two shards, one deleted: the error lists what is missing."""
    shards = shards_of(sharded)
    shards[1].unlink()
    shards[-1].unlink()
    error = refused(sharded, f"2 of {len(shards)} shards are missing: {shards[1].name}, {shards[-1].name}")
    assert "index" in error.why


def test_index_that_names_a_tensor_no_shard_has(sharded: Path) -> None:
    """Case: the index names a tensor that no shard holds."""
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = shards_of(sharded)[0].name
    content["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard
    index.write_text(json.dumps(content))
    refused(sharded, rf"names 1 tensors .* model\.layers\.7\.mlp\.up_proj\.weight \(in {shard}\)")


def test_index_that_names_the_wrong_shard(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, shard = next(iter(content["weight_map"].items()))
    content["weight_map"][name] = next(other.name for other in shards_of(sharded) if other.name != shard)
    index.write_text(json.dumps(content))
    refused(sharded, f"{name} .in ")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "index")


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, second = shards_of(sharded)[:2]
    name, tensor = next(iter(load_file(first).items()))
    edit_tensors(sharded, lambda t: t.update({name: tensor}), second.name)
    refused(sharded, f"{name} is in {first.name} and in {second.name}")


def test_file_cut_short(source: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(source, "not a complete safetensors file")


def test_no_weights(source: Path) -> None:
    (source / "model.safetensors").unlink()
    refused(source, "has no weights")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt", "__0_0.distcp"])
def test_pickled_weights(source: Path, name: str) -> None:
    (source / "model.safetensors").rename(source / name)
    error = refused(source, f"the weights are pickled .{name}")
    assert "runs code" in error.why
    assert "save_pretrained" in error.hint


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter(source: Path, name: str) -> None:
    (source / name).write_text("{}")
    assert "merge" in refused(source, "LoRA adapter").hint


def test_no_config_no_directory(source: Path) -> None:
    (source / "config.json").write_text("[]")
    refused(source, "one JSON object")
    (source / "config.json").unlink()
    refused(source, r"has no config\.json")
    refused(source / "nowhere", "no such directory")


# ---- tensors --------------------------------------------------------------------------------------------------------


def test_missing_tensor(source: Path) -> None:
    edit_tensors(source, lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"))
    refused(source, r"1 tensors are missing: model\.layers\.1\.self_attn\.k_norm\.weight")


def test_untied_without_head(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tied=False)
    edit_tensors(source, lambda t: t.pop("lm_head.weight"))
    assert "tie_word_embeddings" in refused(source, r"lm_head\.weight is missing").hint
    edit_config(source, tie_word_embeddings=None)  # absent means false
    refused(source, r"lm_head\.weight is missing")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.2.mlp.up_proj.weight",  # one layer more than the config has
        "model.layers.0.self_attn.o_proj.bias",  # a Qwen3 without attention_bias
        "visual.patch_embed.weight",
    ],
)
def test_tensor_without_a_place(source: Path, name: str) -> None:
    edit_tensors(source, lambda t: t.update({name: torch.zeros(3)}))
    refused(source, f"1 tensors have no place in the model: {name}")


def test_wrong_prefix_names_both_sides(source: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"base_model.{name}"] = tensors.pop(name)

    edit_tensors(source, rename)
    error = refused(source, "24 tensors are missing")
    assert "base_model.model" in error.why


def test_wrong_shape(source: Path) -> None:
    edit_tensors(source, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(40, 32)}))
    refused(source, r"model\.layers\.0\.mlp\.down_proj\.weight is \[40, 32\], expected \[32, 40\]")


def test_embedding_and_config_of_different_sizes(source: Path) -> None:
    edit_config(source, vocab_size=9999)
    assert "vocab_size" in refused(source, r"embed_tokens\.weight is .* expected \[9999, 32\]").hint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(source: Path, value: float) -> None:
    edit_tensors(source, lambda t: t["model.layers.1.mlp.gate_proj.weight"][3, 5].fill_(value))
    refused(source, r"model\.layers\.1\.mlp\.gate_proj\.weight: contains NaN or infinity")


def test_weights_too_large_for_float16(source: Path) -> None:
    edit_tensors(source, lambda t: t["model.norm.weight"][3].fill_(70000.0))
    error = refused(source, r"model\.norm\.weight: holds 70000, more than float16", dtype="float16")
    assert "bfloat16" in error.hint


def test_quantised_tensors(source: Path) -> None:
    def quantise(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    edit_tensors(source, quantise)
    refused(source, r"up_proj\.weight holds I8 numbers")


def test_embeddings_that_were_never_trained(source: Path) -> None:
    """An untouched resize leaves all new rows alike."""
    from token_support import byte_level, table_of

    ids = table_of(byte_level()).token_ids[1].tolist()
    edit_tensors(source, lambda t: t["model.embed_tokens.weight"].__setitem__(ids, torch.full((32,), 0.25)))
    refused(source, "level 2: the embeddings of all 12 semantic-ID tokens are equal")


def test_embedding_with_fewer_rows_than_tokens(tmp_path: Path) -> None:
    from token_support import byte_level

    rows = byte_level().get_vocab_size() - 1
    source = make_checkpoint(tmp_path / "source", vocab_size=rows)
    refused(source, rf"token <c_9> has id {rows}, but the embedding has {rows} rows")


@pytest.mark.parametrize("change", [{"content": ""}, {"content": "<a_1>"}, {"id": 9999}])
def test_tokenizer_whose_added_tokens_would_be_renumbered(source: Path, change: dict[str, Any]) -> None:
    """The package drops the entry and gives every token behind it the id of its neighbour."""
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    next(entry for entry in tokenizer["added_tokens"] if entry["content"] == "<a_0>").update(change)
    path.write_text(json.dumps(tokenizer))
    refused(source, "tokenizer.json: gives the token .* the id")


def test_end_token_that_is_no_token(source: Path) -> None:
    (source / "tokenizer_config.json").write_text('{"eos_token": "zzz"}')
    refused(source, "has no token zzz, although it is named as eos_token", score_suffix="eos")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_json_nested_too_deeply(source: Path, name: str) -> None:
    (source / name).write_text("[" * 100_000)
    refused(source, f"{name}: cannot read")


# ---- architectures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported"),
        ({"architectures": ["Qwen3Model"]}, "Qwen3Model is not supported"),
        ({"architectures": None}, "model_type 'qwen3'. is not supported"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "not supported"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "mixture of experts"),
        ({"num_experts": 8}, "has experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised .gptq"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "sliding window of 64"),
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            "sliding window of 32",
        ),
        ({"layer_types": 5}, "layer_types must be a list of names, not 5"),
        ({"num_hidden_layers": 10**9}, "describes 1000000000 layers, the weights are"),
        ({"vocab_size": 10**30}, "vocab_size is 1000000000000000000000000000000, but no model"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is .*, but no model"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "rotary scaling 'linear'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling says 'yarn', rope_parameters says 'default'",
        ),
        ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, "llama3 rotary scaling lacks 'factor'"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta must be a positive number"),
        ({"rope_parameters": None, "rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 query heads for 3 key-value heads of size .* are impossible"),
    ],
)
def test_what_xgr_does_not_compute(source: Path, changes: dict[str, Any], said: str) -> None:
    if changes.get("rope_parameters"):
        changes = {**changes, "rope_parameters": {k: v for k, v in changes["rope_parameters"].items() if v is not None}}
    edit_config(source, **changes)
    refused(source, said)


def test_windows_beyond_the_last_layer_are_off(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    edit_config(source, layer_types=None, use_sliding_window=True, sliding_window=32, max_window_layers=2)
    assert convert(ConvertOptions(source, tmp_path / "out")).status == "written"


def test_no_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    assert "--token-offsets" in refused(source, "has no tokenizer").hint


def test_fresh_never_deletes_files_of_others(tmp_path: Path) -> None:
    """What ``--fresh`` replaces is the model directory, not notes kept beside the weights."""
    source, out = make_checkpoint(tmp_path / "source"), tmp_path / "out"
    convert(ConvertOptions(source, out))
    (out / "notes").mkdir()
    with pytest.raises(OutputExistsError, match="did not write there: notes"):
        convert(ConvertOptions(source, out, dtype="bfloat16", fresh=True))
    assert (out / "notes").is_dir()


def test_failure_leaves_the_old_model_alone(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    old = convert(ConvertOptions(source, tmp_path / "out")).model
    edit_tensors(source, lambda t: t["model.norm.weight"][0].fill_(float("nan")))
    with pytest.raises(CheckpointError, match="NaN"):
        convert(ConvertOptions(source, tmp_path / "out", fresh=True))
    old.verify_weights()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_float64_is_narrowed_to_float32(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    tensors = {name: tensor.double() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert convert(ConvertOptions(source, tmp_path / "out")).model.spec.dtype == "float32"

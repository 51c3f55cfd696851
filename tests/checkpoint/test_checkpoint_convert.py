"""Conversion of Qwen and Llama checkpoints: what is stored, prompt, tokens, contract, and parity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import (
    LLAMA3_ROPE,
    all_tensors,
    edit_config,
    edit_tensors,
    make_checkpoint,
    one_sid_vocabulary,
    options,
    shards_of,
)
from safetensors.torch import load_file

from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.checkpoint.names import HF_DECODER
from xgr_engine.checkpoint.options import ConvertOptions, describe
from xgr_engine.errors import InputError, UsageError
from xgr_engine.models.spec import RopeSpec

MODELS: dict[str, dict[str, Any]] = {
    "qwen2 tied": {"family": "qwen2", "tied": True},
    "qwen2 untied sharded": {"family": "qwen2", "tied": False, "shard_size": "20KB"},
    "qwen3 tied sharded": {"family": "qwen3", "tied": True, "shard_size": "20KB"},
    "qwen3 untied": {"family": "qwen3", "tied": False},
    "qwen3 with biases": {"family": "qwen3", "tied": True, "attention_bias": True},
    "llama untied": {"family": "llama", "tied": False},
    "llama tied, llama3 rope": {"family": "llama", "tied": True, "rope_parameters": LLAMA3_ROPE},
    "llama with all biases": {"family": "llama", "tied": False, "attention_bias": True, "mlp_bias": True},
    "qwen3 bfloat16": {"family": "qwen3", "tied": True, "dtype": torch.bfloat16, "shard_size": "20KB"},
}


@pytest.mark.parametrize("name", MODELS)
def test_converted_model_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **MODELS[name])
    assert (len(shards_of(source)) > 3) == ("shard_size" in MODELS[name])
    report = convert(options(source, verify=True))
    assert report.status == "written"
    assert report.parity is not None
    assert report.parity.max_difference < 1e-4
    assert report.parity.same_best_token
    assert report.warnings == ()
    assert report.model.spec.tied is MODELS[name]["tied"]


@pytest.mark.parametrize("name", ["qwen2 untied sharded", "qwen3 bfloat16", "llama with all biases"])
def test_every_tensor_arrives_unchanged_under_its_own_name(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **MODELS[name])
    model = convert(options(source)).model
    theirs, ours = all_tensors(source), load_file(model.weights_path)
    assert {HF_DECODER.to_foreign(name) for name in ours} == set(theirs)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == model.spec.tensor_shapes()
    for own, tensor in ours.items():
        foreign = HF_DECODER.to_foreign(own)
        assert foreign is not None
        assert HF_DECODER.to_xgr(foreign) == own
        assert torch.equal(tensor, theirs[foreign])
        assert str(tensor.dtype) == f"torch.{model.spec.dtype}"


def test_spec_says_what_the_config_says(tmp_path: Path) -> None:
    source = make_checkpoint(
        tmp_path / "source", "llama", tied=False, rope_parameters=LLAMA3_ROPE, rms_norm_eps=3e-5, head_dim=24
    )
    spec = convert(options(source)).model.spec
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("llama", 2, 4, 2, 24)
    assert (spec.hidden_size, spec.intermediate_size, spec.max_context, spec.rms_eps) == (32, 40, 512, 3e-5)
    assert spec.rope == RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 64)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm, spec.dtype) == (False,) * 4 + ("float32",)


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_config_of_transformers_4(kind: str, tmp_path: Path) -> None:
    """torch_dtype, rope_theta and rope_scaling in place of dtype and rope_parameters."""
    source = make_checkpoint(tmp_path / "source", "llama", rope_parameters=LLAMA3_ROPE)
    new = convert(options(source, out=tmp_path / "new")).model.spec
    scaling = {**LLAMA3_ROPE, kind: "llama3"}
    scaling = {key: value for key, value in scaling.items() if key not in {"rope_theta", "rope_type", "type"} - {kind}}
    edit_config(
        source, dtype=None, torch_dtype="float32", rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling
    )
    report = convert(options(source, out=tmp_path / "old"))
    assert report.model.spec == new
    assert report.warnings == ()


def test_rope_theta_alone_and_head_dim_of_hidden_over_heads(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    edit_config(source, rope_parameters=None, rope_theta=12345.0, head_dim=None, layer_types=None)
    # As Qwen2.5 ships: the window's size stands there, and it is off.
    edit_config(source, sliding_window=128, use_sliding_window=False, max_window_layers=1)
    spec = convert(options(source)).model.spec
    assert spec.rope == RopeSpec(12345.0)
    assert spec.head_dim == 8
    assert spec.qkv_bias
    assert not spec.o_bias


def test_tied_embeddings_with_lm_head_weight_absent(tmp_path: Path) -> None:
    """Case: tied embeddings, lm_head.weight absent: tied."""
    source = make_checkpoint(tmp_path / "source", tied=True)
    assert "lm_head.weight" not in all_tensors(source)
    model = convert(options(source)).model
    assert model.spec.tied
    assert "head.weight" not in load_file(model.weights_path)


def test_stored_copy_of_a_tied_head_is_left_out(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tied=True)
    edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    report = convert(options(source))
    assert report.model.spec.tied
    assert report.skipped == ("lm_head.weight",)
    assert report.warnings == ()


def test_stored_head_that_differs_is_used_and_reported(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tied=True)
    edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    report = convert(options(source, verify=True))
    assert not report.model.spec.tied
    tensors = load_file(report.model.weights_path)
    assert torch.equal(tensors["head.weight"], tensors["embed.weight"] * 2)
    assert "a different one, which is used" in report.warnings[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", shard_size="20KB")
    model = convert(options(source, dtype=dtype, verify=True)).model
    assert model.spec.dtype == dtype
    theirs = all_tensors(source)
    for name, tensor in load_file(model.weights_path).items():
        assert torch.equal(tensor, theirs[HF_DECODER.to_foreign(name) or ""].to(getattr(torch, dtype)))


def test_dtype_of_the_weights_counts_more_than_the_configs(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    edit_config(source, dtype="float32")
    report = convert(options(source))
    assert report.model.spec.dtype == "bfloat16"
    assert "config.json says float32" in report.warnings[0]


def test_rotary_tables_in_the_file_are_known_and_left_out(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama")
    edit_tensors(source, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert convert(options(source)).skipped == ("model.layers.1.self_attn.rotary_emb.inv_freq",)


def test_each_shard_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: two shards and more; each is opened once."""
    import xgr_engine.checkpoint.hf_source as hf_source

    source = make_checkpoint(tmp_path / "source", shard_size="20KB")
    opened: list[str] = []
    real = hf_source.safe_open

    def counting(path: Path, **more: Any) -> Any:
        opened.append(Path(path).name)
        return real(path, **more)

    monkeypatch.setattr(hf_source, "safe_open", counting)
    convert(options(source))
    assert sorted(opened) == [shard.name for shard in shards_of(source)]


def test_stale_index_beside_a_single_file(tmp_path: Path) -> None:
    """Some trainers leave the index of an earlier save behind: the single file counts if shards are gone."""
    source = make_checkpoint(tmp_path / "source")
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}})
    )
    assert convert(options(source)).status == "written"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc for the peak of resident memory")
def test_peak_memory_is_about_a_shard_and_not_the_model(tmp_path: Path) -> None:
    """A model of over 100 MB in shards of 6 MB: conversion may not take much more than a few shards."""
    source = make_checkpoint(
        tmp_path / "source", "llama", num_hidden_layers=28, hidden_size=256, intermediate_size=1280, shard_size="6MB"
    )
    size = sum(shard.stat().st_size for shard in shards_of(source))
    assert size > 100e6
    code = f"""
import re
from pathlib import Path
import torch
from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.options import ConvertOptions
def read(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
torch.isfinite(torch.ones(1 << 20).to(torch.bfloat16)).all()
before = read("VmRSS")
convert(ConvertOptions(Path({str(source)!r}), Path({str(tmp_path / "out")!r}), dtype="bfloat16"))
print(read("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < size * 0.4


def test_everything_a_run_needs_comes_back_from_the_directory(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    template = tmp_path / "mine.j2"
    template.write_text("Seen: {{ history }}. Next:")
    report = convert(
        options(source, prompt=str(template), score_suffix="eos"), one_sid_vocabulary(4, 11, 0, content_hash="h1")
    )
    model = load_model_dir(report.model.path)
    assert model.fingerprint == report.model.fingerprint
    assert model.prompt.name == "mine.j2"
    assert model.contract.suffix_text == "<|im_end|>"
    assert [len(codes) for codes in model.table.codes] == [5, 12, 12]
    assert model.vocab_checked == {"path": str(Path("vocab").absolute()), "content_hash": "h1"}
    assert model.tokenizer_path == model.path / "tokenizer.json"
    assert set(model.source["files"]) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    renderer = model.renderer()
    assert renderer.max_tokens == 512 - 3 - 1
    prompt = renderer.render([[(1, 2, 3)]])[0].token_ids.tolist()
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    assert prompt == tokenizer.encode("Seen: <a_1><b_2><c_3>. Next:").ids
    model.verify_weights()
    json.dumps(describe(report))


def test_tokenizer_without_c_255_is_an_error_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: tokenizer without <c_255>: error that names the token, before any weight is read."""
    import xgr_engine.checkpoint.convert as module

    source = make_checkpoint(tmp_path / "source")
    monkeypatch.setattr(module, "hash_source", lambda *_: pytest.fail("work has begun"))
    with pytest.raises(InputError, match="no token for <c_255>"):
        convert(options(source), one_sid_vocabulary(1, 2, 255))
    assert not (tmp_path / "out").exists()


def test_offsets_do_not_overrule_a_tokenizer_that_names_the_tokens(tmp_path: Path) -> None:
    """A token id is read from the tokenizer, never computed, where there is one."""
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(InputError, match="the tokenizer has semantic-ID tokens such as <a_0>"):
        convert(options(source, token_offsets=(4, 24, 44)))
    assert not (tmp_path / "out").exists()


def test_offsets_serve_checkpoints_without_tokenizer(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", vocab_size=64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    model = convert(options(source, token_offsets=(4, 24, 44), verify=True), one_sid_vocabulary(3, 19, 19)).model
    assert model.tokenizer_path is None
    assert [len(codes) for codes in model.table.codes] == [20, 20, 20]
    assert model.renderer().render([[(1, 2, 3)]])[0].token_ids.tolist() == [5, 26, 47]
    with pytest.raises(InputError, match="no token for code 20"):
        convert(options(source, token_offsets=(4, 24, 44), fresh=True), one_sid_vocabulary(3, 19, 20))
    with pytest.raises(UsageError, match="levels 1 and 2 both begin at token 4"):
        convert(options(source, token_offsets=(4, 4, 44), out=tmp_path / "o1"))
    with pytest.raises(UsageError, match="sids-only"):
        convert(options(source, token_offsets=(4, 24, 44), out=tmp_path / "o2", prompt="lc-rec"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "fp8"}, "--dtype fp8 is not available yet"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"sid_tokens": "<a_{}>", "token_offsets": (1,)}, "exclude each other"),
        ({"verify_prompts": Path("p")}, "--prompts is for --verify"),
        ({"out": Path("source")}, "must not be the checkpoint"),
        ({"out": Path("source/out")}, "must not be the checkpoint"),
    ],
)
def test_bad_options(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ConvertOptions(**{"source": Path("source"), "out": Path("out"), **more})


def test_verify_on_given_prompts(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    (tmp_path / "p.txt").write_text("Items <a_1><b_2><c_3> next\n\n<a_4><b_0>\n")
    report = convert(options(source, verify=True, verify_prompts=tmp_path / "p.txt"))
    assert report.parity is not None
    assert report.parity.prompts == 2
    (tmp_path / "p.json").write_text(json.dumps([[3, 4, 5], "words", [7]]))
    again = convert(options(source, verify=True, verify_prompts=tmp_path / "p.json"))
    assert again.status == "unchanged"
    assert again.parity is not None
    assert again.parity.prompts == 3
    for name, text in (("p.json", "[[999999]]"), ("p.txt", ""), ("none.txt", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="--prompts"):
            convert(options(source, verify=True, verify_prompts=tmp_path / name))


def test_verify_that_fails_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name map (gate and up exchanged) is found, and the output is not put in place."""
    from xgr_engine.checkpoint.names import NameMap
    from xgr_engine.errors import XgrError

    pairs = dict(HF_DECODER.pairs)
    gate, up = "model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"
    pairs[gate], pairs[up] = pairs[up], pairs[gate]
    monkeypatch.setattr("xgr_engine.checkpoint.plan.names_of", lambda spec: NameMap(pairs))
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(XgrError, match="differs from transformers") as caught:
        convert(options(source, verify=True))
    assert caught.value.exit_code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.shared_data
def test_fixture_model(shared_data: Path, tmp_path: Path) -> None:
    report = convert(
        ConvertOptions(
            shared_data / "industrial" / "qwen3",
            tmp_path / "out",
            prompt="minionerec-eval",
            score_suffix="\\n",
            verify=True,
        )
    )
    model = report.model
    assert [len(codes) for codes in model.table.codes] == [48, 256, 256]
    assert (model.spec.tied, model.spec.dtype, model.contract.suffix_ids) == (True, "bfloat16", (201,))
    assert report.parity is not None
    assert report.parity.max_difference < 1e-4
    assert report.warnings == ()

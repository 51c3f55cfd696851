"""Model directories that were edited, damaged or made by another version."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.model_dir import ModelDir, fingerprint_of, load_model_dir
from xgr_engine.checkpoint.names import HF_DECODER, NameMap
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.errors import CheckpointError


@pytest.fixture
def model(tmp_path: Path) -> ModelDir:
    return convert(ConvertOptions(make_checkpoint(tmp_path / "source"), tmp_path / "out")).model


def edit(model: ModelDir, change: Callable[[dict[str, Any]], object], *, sign: bool = False) -> None:
    """Edit xgr.json; ``sign``: with the fingerprint that fits the new content."""
    path = model.path / "xgr.json"
    record = json.loads(path.read_text())
    change(record)
    if sign:
        record["fingerprint"] = fingerprint_of(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "sign", "said"),
    [
        (lambda r: r.update(schema_version=2), False, "schema version 2, but this xgr reads up to 1"),
        (lambda r: r.update(schema_version="1"), False, "schema version 1, but this xgr"),
        (lambda r: r.update(kind="vocab"), False, "does not describe a model"),
        (lambda r: r.update(colour="red"), False, "unknown or missing keys: colour"),
        (lambda r: r.pop("prompt"), False, "unknown or missing keys: prompt"),
        (lambda r: r["model"].update(rms_eps=1.0), False, "fingerprint does not fit"),
        (lambda r: r["model"].update(window=3), True, "model: unknown or missing window"),
        (lambda r: r["model"]["rope"].pop("theta"), True, "rope: unknown or missing theta"),
        (lambda r: r["model"].update(family="gpt2"), True, "family 'gpt2'"),
        (lambda r: r["model"].update(family="t5"), True, "model: unknown or missing gated, head_dim|start_token"),
        (lambda r: r["model"].update(dtype="fp8"), True, "dtype 'fp8'"),
        (lambda r: r["sid_tokens"][0]["codes"].pop(), True, "level 1"),
        (lambda r: r["contract"].pop("score_suffix"), True, "score_suffix"),
        (lambda r: r.update(weights={}), True, r"\"weights\.size\" is missing"),
    ],
)
def test_edited_metadata(model: ModelDir, change: Callable[[dict[str, Any]], object], sign: bool, said: str) -> None:
    edit(model, change, sign=sign)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model_dir(model.path)
    assert caught.value.exit_code == 2


def test_missing_and_cut_short_files(model: ModelDir) -> None:
    (model.path / "tokenizer.json").rename(model.path / "t")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_model_dir(model.path)
    (model.path / "t").rename(model.path / "tokenizer.json")
    model.weights_path.write_bytes(model.weights_path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes long, but conversion wrote"):
        load_model_dir(model.path)
    model.weights_path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_model_dir(model.path)
    (model.path / "xgr.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the file"):
        load_model_dir(model.path)


def test_not_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not an xgr model directory") as caught:
        load_model_dir(tmp_path / "nowhere")
    assert "no such directory" in caught.value.why
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match="a Hugging Face checkpoint") as caught:
        load_model_dir(source)
    assert "xgr convert" in caught.value.hint


@pytest.mark.parametrize("name", ["layers.1.attn.q_norm.weight", "embed.weight", "norm.weight"])
def test_flipped_bit_is_named(model: ModelDir, name: str) -> None:
    model.verify_weights()
    with model.weights_path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
    data = bytearray(model.weights_path.read_bytes())
    data[8 + length + (begin + end) // 2] ^= 1
    model.weights_path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"damaged: {name}\n"):
        load_model_dir(model.path).verify_weights()


@pytest.mark.parametrize("change", [(0, b"\1"), (7, b"\x7f"), (8, b"["), (b'"F32"', b'"I32"'), (b"[32,", b"[16,")])
def test_damaged_header(model: ModelDir, change: tuple[int | bytes, bytes]) -> None:
    """Types and shapes are not in the tensors' bytes, so the header has a checksum of its own."""
    where, new = change
    data = bytearray(model.weights_path.read_bytes())
    at = where if isinstance(where, int) else data.index(where)
    data[at : at + len(new)] = new
    model.weights_path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged: \(header\)"):
        load_model_dir(model.path).verify_weights()


def test_changed_tokenizer_is_named(model: ModelDir) -> None:
    file = model.path / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(CheckpointError, match=r"damaged: tokenizer\.json"):
        load_model_dir(model.path).verify_weights()


def test_weights_are_a_file_that_the_safetensors_package_reads(model: ModelDir) -> None:
    with safe_open(model.weights_path, framework="pt") as file:
        assert set(file.keys()) == set(model.spec.tensor_shapes())
        for name, shape in model.spec.tensor_shapes().items():
            assert tuple(file.get_slice(name).get_shape()) == shape


def test_opening_a_model_directory_does_not_load_torch(model: ModelDir) -> None:
    code = (
        "import sys; from xgr_engine.checkpoint.model_dir import load_model_dir; "
        f"load_model_dir({str(model.path)!r}).renderer(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


# ---- names ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(HF_DECODER.pairs)), st.integers(0, 10_000))
def test_names_map_both_ways(foreign: str, layer: int) -> None:
    name = foreign.replace("{i}", str(layer))
    own = HF_DECODER.to_xgr(name)
    assert own is not None
    assert "{i}" not in own
    assert HF_DECODER.to_foreign(own) == name


def test_no_two_foreign_names_share_one_of_ours() -> None:
    assert len(set(HF_DECODER.pairs.values())) == len(HF_DECODER.pairs)


def test_unknown_and_ignored_names() -> None:
    names = NameMap({"a.{i}.w": "x.{i}.w"}, ignored=("a.{i}.table",))
    assert names.to_xgr("a.3.v") is None
    assert names.to_xgr("a.03.w") is None
    assert names.to_xgr("a.{i}.w.1") is None
    assert names.ignores("a.12.table")
    assert not names.ignores("a.12.w")

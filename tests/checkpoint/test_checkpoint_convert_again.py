"""Conversion where there is something already: the same, another or an unusable model, or somebody's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_support import (
    edit_tensors,
    make_checkpoint,
    one_sid_vocabulary,
    options,
)

from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.model_dir import ModelDir, load_model_dir
from xgr_engine.errors import OutputExistsError


def _mark(model: ModelDir) -> int:
    return model.weights_path.stat().st_mtime_ns


def test_same_conversion_again_is_nothing_to_do(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    first = convert(options(source))
    again = convert(options(source), one_sid_vocabulary(1, 1, 1, content_hash="later"))
    assert again.status == "unchanged"
    assert _mark(again.model) == _mark(first.model)
    assert again.model.fingerprint == first.model.fingerprint
    assert again.model.vocab_checked is not None
    assert again.model.vocab_checked["content_hash"] == "later"


def test_other_files_or_options_are_refused_unless_fresh(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    first = convert(options(source))
    for more in ({"dtype": "bfloat16"}, {"prompt": "minionerec-eval"}, {"score_suffix": "eos"}):
        with pytest.raises(OutputExistsError, match="exists") as caught:
            convert(options(source, **more))
        assert caught.value.exit_code == 2
    edit_tensors(source, lambda t: t["model.norm.weight"].mul_(2))
    with pytest.raises(OutputExistsError, match="other files or options"):
        convert(options(source))
    assert load_model_dir(first.model.path).fingerprint == first.model.fingerprint
    fresh = convert(options(source, fresh=True))
    assert fresh.status == "written"
    assert fresh.model.fingerprint != first.model.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_unusable_model_directory_is_replaced_only_with_fresh(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    model = convert(options(source)).model
    model.weights_path.write_bytes(b"short")
    with pytest.raises(OutputExistsError, match="cannot be used"):
        convert(options(source))
    convert(options(source, fresh=True)).model.verify_weights()


def test_foreign_directory_is_never_replaced(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(OutputExistsError, match="not written by"):
            convert(options(source, fresh=fresh))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert convert(options(make_checkpoint(tmp_path / "source"))).status == "written"


def test_killed_run_leaves_the_old_model_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    model = convert(options(source)).model
    code = f"""
import os, signal
from pathlib import Path
import xgr_engine.checkpoint.convert as module
from xgr_engine.checkpoint.options import ConvertOptions
module._write_metadata = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
module.convert(ConvertOptions(Path({str(source)!r}), Path({str(model.path)!r}), dtype="bfloat16", fresh=True))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == -9
    load_model_dir(model.path).verify_weights()
    assert len(list(tmp_path.iterdir())) == 3  # source, out, and what the killed run left
    assert convert(options(source, dtype="bfloat16", fresh=True)).status == "written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_same_source_gives_the_same_bytes_and_fingerprint(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", shard_size="20KB")
    one = convert(options(source, out=tmp_path / "one")).model
    two = convert(options(source, out=tmp_path / "two")).model
    assert one.fingerprint == two.fingerprint
    assert one.weights_path.read_bytes() == two.weights_path.read_bytes()
    assert (one.path / "xgr.json").read_bytes() == (two.path / "xgr.json").read_bytes()

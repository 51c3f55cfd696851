"""``xgr convert`` as a command: paths, exit codes, JSON, and the vocabulary it checks."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import make_checkpoint

from xgr_cli import signals
from xgr_cli.main import run
from xgr_engine.checkpoint.hf_source import Shards

Convert = Callable[..., tuple[int, str, str]]


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Runs ``xgr convert source ARGUMENTS`` in a directory with a checkpoint: exit code, stdout, stderr."""
    make_checkpoint(tmp_path / "source")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["convert", "source", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def build_vocab(*rows: str) -> None:
    Path("catalog.csv").write_text("\n".join(["item_id,sid", *rows]) + "\n")
    assert run(["build-vocab", "catalog.csv", "--out", "vocab", "-q"]) == 0


def test_default_paths_and_a_second_run(convert: Convert) -> None:
    build_vocab("x,<a_1><b_2><c_3>", "y,<a_4><b_11><c_0>")
    code, out, _ = convert("--json")
    first: dict[str, Any] = json.loads(out)
    assert code == 0
    assert (first["schema_version"], first["status"], first["model"]) == (1, "written", "model")
    assert [level["spelling"] for level in first["sid_tokens"]] == ["<a_{}>", "<b_{}>", "<c_{}>"]
    assert first["vocab_checked"]["path"] == str(Path("vocab").absolute())
    code, out, _ = convert("--json")
    again = json.loads(out)
    assert code == 0
    assert (again["status"], again["fingerprint"]) == ("unchanged", first["fingerprint"])
    code, out, err = convert("--dtype", "bfloat16")
    assert code == 2
    assert out == ""
    assert "--fresh" in err
    assert convert("--dtype", "bfloat16", "--fresh", "-q")[0] == 0
    assert json.loads(Path("model/xgr.json").read_text())["model"]["dtype"] == "bfloat16"


def test_catalog_with_a_code_that_has_no_token(convert: Convert) -> None:
    """Case: tokenizer without <c_255>: exit 2, the token named, nothing written."""
    build_vocab("x,<a_1><b_2><c_3>", "y,<a_1><b_2><c_255>")
    code, out, err = convert()
    assert code == 2
    assert out == ""
    assert "<c_255>" in err
    assert not Path("model").exists()


def test_without_a_vocabulary(convert: Convert) -> None:
    code, out, err = convert("--prompt", "minionerec-eval", "--score-suffix", r"\n", "--verify")
    assert code == 0
    assert "warning: no vocabulary" in err
    assert "minionerec-eval" in out
    assert "of transformers" in out
    assert convert("--vocab", "nowhere")[0] == 2


def test_prompt_that_was_not_chosen_is_said(convert: Convert) -> None:
    assert "no --prompt: sids-only" in convert()[2]
    assert "no --prompt" not in convert("--prompt", "sids-only")[2]


def test_another_architecture_is_refused_with_a_next_step_and_no_note_on_the_prompt(convert: Convert) -> None:
    config = json.loads(Path("source/config.json").read_text())
    config |= {"architectures": ["BartForConditionalGeneration"], "model_type": "bart", "is_encoder_decoder": True}
    Path("source/config.json").write_text(json.dumps(config))
    code, out, err = convert()
    assert (code, out) == (2, "")
    assert "next: convert a checkpoint of one of these" in err
    assert "--prompt" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dtype", "fp8"),
        ("--prompt", "lcrec"),
        ("--token-offsets", "1,b"),
        ("--token-offsets", "1,2", "--sid-tokens", "<a_{}>"),
        ("--sid-tokens", "<a_1>"),
        ("--prompts", "p.txt"),
        ("--out", "source"),
    ],
)
def test_bad_usage_is_exit_2(convert: Convert, arguments: tuple[str, ...]) -> None:
    code, out, err = convert(*arguments)
    assert code == 2
    assert out == ""
    assert arguments[0] in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)])
def test_a_signal_that_safetensors_turns_into_an_error_ends_it_as_the_signal_does(
    convert: Convert, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """While safetensors reads, about every second signal becomes such an error of torch, which it calls."""

    def read(shards: Shards, name: str) -> None:
        try:
            signal.raise_signal(number)
        except (SystemExit, KeyboardInterrupt):
            raise ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'") from None

    monkeypatch.setattr(Shards, "read", read)
    monkeypatch.setattr(signals, "_raised", [])
    before = {one: signal.signal(one, kind) for one, kind in _AS_A_PROCESS_BEGINS.items()}
    try:
        signals.end_on_signals()
        ended, out, err = convert()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert (ended, out) == (code, "")
    assert "ValueError" not in err and "bug" not in err
    assert [path.name for path in Path.cwd().iterdir()] == ["source"]


_AS_A_PROCESS_BEGINS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}

"""FlashRec and vLLM through their adapters: checkpoint, process and pipe, with stand-ins of the packages behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from xgr_engine.bench.baselines.external import FlashRec, Foreign, Vllm
from xgr_engine.bench.foreign.packages import FLASHREC, VLLM, installed_packages
from xgr_engine.bench.foreign.process import Process, end_all, new_folder, visible
from xgr_engine.bench.geometries import Geometry
from xgr_engine.bench.machine import describe_machine
from xgr_engine.bench.measure import Budget, Samples, interleaved
from xgr_engine.bench.parity import judge
from xgr_engine.bench.report.tables import row_table
from xgr_engine.bench.row import Row
from xgr_engine.bench.workloads import BenchModel, Workload, random_weights, synthetic_catalog
from xgr_engine.errors import XgrError
from xgr_engine.options import SearchOptions

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins of the packages, on the CPU"),
    pytest.mark.timeout(300),
]

CODES, LEVELS = 7, 3
SMALL = Geometry("small", 2, 32, 4, 2, 16, 48, 11, tied=False, codes=CODES, levels=LEVELS, max_context=64)
LIMIT_OF_FLASHREC = (
    "it takes the best 2 W tokens of a level before it looks at the catalog: beams without a child among them are "
    "lost, so its lists may be short and may miss items that the definition finds"
)
VERSIONS = {"vllm": "0.33.0", "flashrec": "0.1.2"}


def trained(scale: float = 3.0) -> BenchModel:
    """Random weights under which a level's token is followed by one of the next level, as training teaches."""
    model = random_weights(SMALL, CODES, LEVELS, torch.device("cpu"))
    groups = [torch.arange(11), *(torch.from_numpy(ids.astype(np.int64)) for ids in model.table.token_ids)]
    for place, (here, following) in enumerate(pairwise(groups)):
        model.decoder.embed[here, place] += scale
        model.head[following, place] += scale
    return model


@pytest.fixture(scope="module")
def model() -> BenchModel:
    return trained()


@pytest.fixture(scope="module")
def untrained() -> BenchModel:
    """Text and other levels' tokens are as likely as the right ones."""
    return trained(0.0)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-ins installed, for this process and for those that it starts; contenders run on this machine."""
    for name, version in VERSIONS.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    fakes = Path(__file__).parent / "fakes"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fakes), str(tmp_path)]))
    monkeypatch.syspath_prepend(tmp_path)
    for contender in (FlashRec, Vllm):
        monkeypatch.setattr(contender, "devices", ("cpu",))
        monkeypatch.setattr(contender, "dtypes", ("float32",))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def workload(model: BenchModel, items: int, beam: int, over: str = "vocab") -> Workload:
    search = SearchOptions(beam=beam, top_k=beam, score_over=over, collisions="first")  # type: ignore[arg-type]
    prompts = tuple(np.random.default_rng(seed).integers(0, 11, 5 + seed).astype(np.int32) for seed in range(6))
    return Workload(model, synthetic_catalog(items, CODES, LEVELS), search, 10, 2, 0, prompts)


def measured(contender: str, asked: Workload) -> dict:
    row = Row(asked, [contender], Budget(0.2, 2), lambda text: None).measure()
    return row["contenders"][0]


def one_answer(contender: Foreign, asked: Workload):
    """What is wrong with the answer to a batch, and the answer."""
    assert contender.available(asked) is None
    contender.prepare(asked)
    try:
        batch = asked.batch(0)
        answer = getattr(contender, "run_scored", contender.run)(batch)
        assert contender.own_seconds is not None and contender.own_seconds > 0
        return judge(asked, batch, {contender.name: answer}).parity[contender.name], answer
    finally:
        contender.release()


# ---- vLLM -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("packages")
def test_vllm_in_a_row(model: BenchModel) -> None:
    """Every code is an item and the model knows the levels: free search finds what the constrained one does. Latency
    and memory are those of its process; its prefix cache never remembers a prompt (the stand-in would complain)."""
    one = measured("vllm", workload(model, CODES**LEVELS, 6))
    assert one["status"] == "ok", one
    assert one["parity"]["marks"] == []
    assert one["parity"]["overlap"] == one["parity"]["top1"] == 1.0
    assert one["latency_ms"]["samples"] == 2
    assert one["host_peak_bytes"] > one["host_own_bytes"] > 0
    assert any("pool" in note for note in one["notes"])
    assert any("no catalog" in note for note in one["notes"])


@pytest.mark.usefixtures("packages")
def test_vllm_knows_no_catalog(model: BenchModel) -> None:
    """Free vocabulary: what is no item is marked, not dropped."""
    parity, answer = one_answer(Vllm(), workload(model, 90, 6))
    assert parity.invalid > 0
    assert any("invalid" in mark for mark in parity.marks)
    assert [len(codes) for codes in answer.codes] == [6, 6]


@pytest.mark.usefixtures("packages")
def test_vllm_at_its_limits(model: BenchModel) -> None:
    """The best 2 W tokens are the whole vocabulary, and the longest prompt fills the model's context."""
    asked = workload(model, CODES**LEVELS, 16)
    longest = SMALL.max_context - LEVELS
    prompts = tuple(np.random.default_rng(seed).integers(0, 11, longest - seed).astype(np.int32) for seed in range(2))
    parity, _ = one_answer(Vllm(), replace(asked, prompts=prompts, context=longest))
    assert parity.marks == []


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("fault", "mark"), [("scores", "wrong scores"), ("best", "missing"), ("short", "invalid")], ids=lambda text: text
)
def test_wrong_answers_of_vllm_are_marked(
    model: BenchModel, monkeypatch: pytest.MonkeyPatch, fault: str, mark: str
) -> None:
    monkeypatch.setenv("FAKE_FAULT", fault)
    parity, _ = one_answer(Vllm(), workload(model, CODES**LEVELS, 6))
    assert any(mark in found for found in parity.marks)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("start", "failed", "Unknown architecture"),
        ("die", "failed", "Segmentation fault"),
        ("pool", "out of memory", ""),
        ("small pool", "out of memory", ""),
        ("memory", "out of memory", ""),
    ],
)
def test_an_engine_that_fails_is_listed(
    model: BenchModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, status: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_FAULT", fault)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    started, start = [], subprocess.Popen

    def recorded(*args, **more):
        started.append(start(*args, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    one = measured("vllm", workload(model, 90, 3))
    assert one["status"] == status, one
    assert reason in one["reason"]
    assert not list(folder.iterdir()), "no checkpoint is left behind"
    assert started and all(process.poll() is not None for process in started), "no process is left behind"


# ---- FlashRec -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("packages")
def test_flashrec_in_a_row(untrained: BenchModel) -> None:
    """A wide enough beam loses nothing to the cut at 2 W; scores over a level are the definition's."""
    one = measured("flashrec", workload(untrained, 90, 6, "level"))
    assert one["status"] == "ok", one
    assert one["parity"]["marks"] == []
    assert one["parity"]["overlap"] == 1.0
    assert one["notes"] == [LIMIT_OF_FLASHREC]


@pytest.mark.usefixtures("packages")
def test_flashrec_loses_beams_before_it_looks_at_the_catalog(untrained: BenchModel) -> None:
    asked = workload(untrained, 12, 1, "level")
    parity, answer = one_answer(FlashRec(), asked)
    assert parity.marks, "the best 2 of 7 codes hold too few items"
    assert parity.invalid == 0
    assert all(np.isfinite(scores).all() for scores in answer.scores)
    row = Row(asked, ["flashrec"], Budget(0.02, 2), lambda text: None).measure()
    notes = row_table(row).notes
    assert any(note.startswith("flashrec WRONG: ") for note in notes)
    assert f"flashrec: {LIMIT_OF_FLASHREC}" in notes, "whoever reads the table or the page is told why"


@pytest.mark.usefixtures("packages")
def test_flashrec_scores_a_level_whatever_is_asked(untrained: BenchModel) -> None:
    """It runs, is compared like everybody, and says why its scores are others."""
    contender = FlashRec()
    parity, _ = one_answer(contender, workload(untrained, 90, 6, "vocab"))
    assert parity.wrong_scores > 0
    assert "--score-over level" in contender.notes[1]


@pytest.mark.usefixtures("packages")
def test_what_flashrec_made_do_with_is_said(untrained: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls back on PyTorch in silence; a row's reader must know."""
    monkeypatch.setenv("FAKE_FAULT", "plain")
    notes = measured("flashrec", workload(untrained, 90, 6, "level"))["notes"]
    assert len(notes) == 5
    assert all(note.startswith("FlashRec ran without ") for note in notes[1:])
    assert "sgl-kernel" in notes[1]


@pytest.mark.usefixtures("packages")
def test_flashrec_keeps_its_largest_wave(untrained: BenchModel) -> None:
    contender = FlashRec()
    parity, answer = one_answer(contender, replace(workload(untrained, 90, 3, "level"), users=18))
    assert parity.marks == []
    assert len(answer.codes) == 18
    assert "16 prompts at a time" in contender.notes[1]


@pytest.mark.usefixtures("packages")
def test_wrong_answers_of_flashrec_are_marked(untrained: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "best")
    parity, _ = one_answer(FlashRec(), workload(untrained, 90, 6, "level"))
    assert parity.missing > 0


@pytest.mark.usefixtures("packages")
def test_tokens_in_any_order(untrained: BenchModel) -> None:
    """SID tokens that are no run of ids, and codes with gaps, reach the engine as what they are."""
    ids = [np.array([27, 12, 19, 30, 11, 22, 16], np.int32), *untrained.table.token_ids[1:]]
    ids[1] = np.array([13, 14, 15, 17, 18, 20, 21], np.int32)
    ids[2] = np.array([23, 24, 25, 26, 28, 29, 31], np.int32)
    table = type(untrained.table).from_levels([np.arange(CODES)] * LEVELS, ids)
    parity, _ = one_answer(FlashRec(), workload(replace(untrained, table=table), 90, 6, "level"))
    assert parity.marks == []


# ---- what cannot run ------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said(model: BenchModel, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = workload(model, 90, 6)
    assert installed_packages() == VERSIONS
    assert describe_machine(torch.device("cpu"))["versions"]["vllm"] == "0.33.0"
    assert "--score-over vocab" in (Vllm().available(workload(model, 90, 6, "level")) or "")
    assert Vllm().available(workload(model, 90, 16)) is None
    assert "at least 2 W tokens: it has 32, and W is 17" in (Vllm().available(workload(model, 90, 17)) or "")
    assert "at least W codes" in (FlashRec().available(workload(model, 90, 8)) or "")
    other = replace(model.decoder.spec, family="llama", qk_norm=False)
    llama = replace(model, decoder=type(model.decoder)(other, *(getattr(model.decoder, n) for n in _PARTS)))
    assert "Qwen3" in (FlashRec().available(replace(asked, model=llama)) or "")
    assert Vllm().available(replace(asked, model=llama)) is None
    suffix = replace(asked, model=replace(model, score_suffix=(3,)))
    assert "suffix" in (Vllm().available(suffix) or "")
    monkeypatch.setattr(Vllm, "dtypes", ("bfloat16",))
    assert "weights are float32" in (Vllm().available(asked) or "")
    (packages / "vllm-0.33.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.6.2\n")
    assert VLLM.wanted in (Vllm().available(asked) or "")
    monkeypatch.setenv(FLASHREC.variable, str(packages / "python"))
    reason = FlashRec().available(asked) or ""
    assert "pip install flashrec" in reason and FLASHREC.variable in reason


_PARTS = ("embed", "norm", "layers", "ops")


def test_another_interpreter_is_asked(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may live in an environment of its own."""
    link = packages / "python"
    link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    link.chmod(0o755)
    monkeypatch.setenv(VLLM.variable, str(link))
    assert VLLM.python == str(link)
    assert VLLM.installed() == "0.33.0"
    assert VLLM.missing() is None


def test_an_engine_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import time\nprint('compiling')\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(XgrError, match="no answer in 3 s"):
        Process(sys.executable, "vllm", {}, start_s=3.0)


def test_the_time_limit_ends_an_engine_that_starts(
    model: BenchModel, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may take minutes to start; the limit of the run is seconds. The others keep their figures."""
    hanging = tmp_path / "hanging" / "vllm"
    hanging.mkdir(parents=True)
    (hanging / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hanging.parent), str(packages)]))
    asked = workload(model, 90, 3)
    row = Row(asked, ["xgr", "vllm"], Budget(0.02, 2), lambda text: None)
    ready = row._warm

    def warm(contender, found) -> None:
        ready(contender, found)
        row.budget = replace(row.budget, deadline=time.monotonic() + 2.0)

    monkeypatch.setattr(row, "_warm", warm)
    begin = time.monotonic()
    first, second = row.measure()["contenders"]
    assert time.monotonic() - begin < 60.0
    assert first["status"] == "ok"
    assert (second["status"], second["reason"]) == ("not run", "the time limit passed while it started")


def test_what_an_engine_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own children too, and the checkpoint, wherever the run was stopped."""
    (tmp_path / "vllm").mkdir()
    child = tmp_path / "child"
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import pathlib, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '600'])\npathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = new_folder()

    class Interrupted(BaseException):
        pass

    def interrupted(self: Process, seconds: float) -> bytes:
        while not (child.exists() and child.read_text()):
            time.sleep(0.05)
        raise Interrupted

    monkeypatch.setattr(Process, "_read_line", interrupted)
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        Process(sys.executable, "vllm", {})
    assert time.monotonic() - begin < 15.0, "nobody waits for it to end by itself"
    end_all()
    assert not folder.exists()
    state = Path("/proc") / child.read_text() / "stat"
    assert not state.exists() or ") Z" in state.read_text()


def test_an_engine_sees_our_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible(0), visible(2)] == ["0", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5a")
    assert [visible(0), visible(1)] == ["3", "GPU-5a"]


def test_a_run_with_a_clock_of_its_own_is_believed() -> None:
    samples = {"own": Samples(), "ours": Samples()}
    ticks = iter(range(100))
    interleaved({"own": lambda number: 0.25, "ours": lambda number: None}, samples, 1e9, 2, lambda: float(next(ticks)))
    assert samples["own"].seconds == [0.25, 0.25]
    assert samples["ours"].seconds == [1.0, 1.0]

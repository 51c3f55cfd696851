"""The formula that plans memory: gate and up products count where they are stored, and nowhere else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from job_support import make_model, make_vocabulary

from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.workloads import synthetic_catalog
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.job.engine import Device, plan_memory
from xgr_engine.kernels import launch
from xgr_engine.kernels.hopper import covers
from xgr_engine.models.decoder_only import GPU_ROWS
from xgr_engine.options import SearchOptions
from xgr_engine.xschedule.memory import cost_model

STORED = launch.FEW_SWIGLU_ROWS


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)


@pytest.mark.parametrize("geometry", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"])
@pytest.mark.parametrize("tokens", [1, 200, 256, 257, 3000, 24_000])
def test_what_a_fused_kernel_stores_is_covered(geometry: str, tokens: int) -> None:
    """Less than without it, and never less than keys, values and the tensors of a prefill that live at once."""
    spec = find_geometry(geometry).spec(8192, 3, "bfloat16")
    trie = synthetic_catalog(1000, 8192, 3, 0).trie
    options = SearchOptions(beam=128, top_k=50)
    whole = cost_model(spec, trie, options, 0, 2, gpu=True)
    fused = cost_model(spec, trie, options, 0, 2, gpu=True, gate_up_rows=STORED)
    inner = 2 * spec.intermediate_size * 2
    assert whole.of_batch(tokens, 4) - fused.of_batch(tokens, 4) == inner * (tokens - STORED)
    hidden, heads, dim = spec.hidden_size, spec.num_heads, spec.head_dim
    block = min(tokens, GPU_ROWS)
    # residual, delta, and of a block of rows: normed input, output projection, activation, gate and up where stored
    feed_forward = tokens * (2 * hidden + heads * dim) + block * (2 * hidden + spec.intermediate_size)
    stored = min(tokens, STORED) * 2 * spec.intermediate_size
    attention = tokens * (2 * hidden + heads * dim) + block * (hidden + (heads + 2 * spec.num_kv_heads) * dim)
    kv = 2 * spec.num_layers * spec.num_kv_heads * dim * tokens
    assert fused.fixed + fused.per_token * tokens >= 2 * (kv + max(feed_forward + stored, attention))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("hidden", "width"), [(64, 48), (64, 44), (60, 48), (16, 24)])
def test_the_plan_knows_what_the_kernel_covers(on_hopper: None, dtype: torch.dtype, hidden: int, width: int) -> None:
    place = torch.device("cpu")
    covered = covers(torch.zeros(300, hidden, dtype=dtype), torch.zeros(2 * width, hidden, dtype=dtype))
    assert launch.gate_up_rows(place, dtype, hidden, width, bias=False) == (STORED if covered else None)
    assert launch.gate_up_rows(place, dtype, hidden, width, bias=True) is None


def test_other_devices_store_everything() -> None:
    assert launch.gate_up_rows(torch.device("cpu"), torch.bfloat16, 64, 48, bias=False) is None


def test_a_plan_for_hopper_leaves_gate_and_up_out(on_hopper: None, tmp_path: Path) -> None:
    vocabulary, model = load_vocabulary(make_vocabulary(tmp_path / "v")), load_model_dir(make_model(tmp_path / "m"))
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, dtype="bfloat16"))
    search, gpu = SearchOptions(beam=40, top_k=10), Device("cuda:0", "a Hopper GPU", 10**9)

    def plan(device: Device, mlp_bias: bool = False) -> tuple[int, int]:
        changed = dataclasses.replace(model, spec=dataclasses.replace(model.spec, mlp_bias=mlp_bias))
        cost = plan_memory(changed, vocabulary, search, device, None).cost
        return cost.per_token, cost.fixed

    inner = 2 * 24 * 2
    (fused, fixed), (whole, nothing) = plan(gpu), plan(gpu, mlp_bias=True)
    assert (whole - fused, fixed, nothing) == (inner, inner * STORED, 0)
    assert plan(Device("cpu", "cpu"))[1] == 0

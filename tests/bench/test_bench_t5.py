"""T5 models in the benchmark: transformers beside the engine, the definition, counts of work, and who cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bench_support import CPU, judged, tiny_catalog
from job_support import OFFSETS, VOCAB_SIZE, make_vocabulary

from xgr_engine.bench import workloads
from xgr_engine.bench.baselines.base import REGISTRY, make_contender
from xgr_engine.bench.baselines.hf_t5 import t5_config_fields, t5_tensors
from xgr_engine.bench.baselines.hf_weights import transformers_model
from xgr_engine.bench.choices import choose_options
from xgr_engine.bench.cost import decode_work, kv_cache_bytes, prefill_work, rows_a_level
from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.options import BenchWishes
from xgr_engine.bench.parity import judge
from xgr_engine.bench.report.page import page
from xgr_engine.bench.run import BenchCaller, run_bench
from xgr_engine.bench.workloads import BenchModel, Workload
from xgr_engine.checkpoint.convert import convert
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.models.encoder_decoder import EncoderDecoder
from xgr_engine.models.spec import EncoderDecoderSpec
from xgr_engine.options import SearchOptions
from xgr_engine.tokens.table import SidTokenTable

# heads x head_dim is not the hidden size, and the decoder is deeper than the encoder
SPEC = EncoderDecoderSpec(
    family="t5",
    vocab_size=VOCAB_SIZE,
    hidden_size=24,
    num_layers=3,
    num_encoder_layers=2,
    num_heads=3,
    head_dim=6,
    intermediate_size=20,
    rms_eps=1e-6,
    num_buckets=8,
    max_distance=20,
    gated=False,
    start_token=1,
    max_context=128,
    tied=True,
    scaled_output=True,
)
VARIANTS = {
    "relu, tied": SPEC,
    "gated, untied": replace(SPEC, gated=True, tied=False, scaled_output=False),
    "gated, tied, not scaled": replace(SPEC, gated=True, scaled_output=False),
}
FOR_DECODER_ONLY = ("paged", "paper", "cascade", "flashrec", "vllm", "all-off")


def t5_workload(monkeypatch: pytest.MonkeyPatch, spec: EncoderDecoderSpec = SPEC, **changes: object) -> Workload:
    """Weights large enough for every prompt to have a list of its own; 90 items of 3 x 7 codes."""
    monkeypatch.setattr(workloads, "_WEIGHT_DEVIATION", 0.4)
    decoder, head = workloads.random_model(spec, CPU, 0)
    codes = np.arange(7, dtype=np.int32)
    table = SidTokenTable.from_levels([codes] * 3, [codes + first for first in OFFSETS])
    search = SearchOptions(beam=9, top_k=9, collisions="first")
    workload = Workload(BenchModel("tiny t5", decoder, head, table), tiny_catalog(), search, context=13, users=3)
    return replace(workload, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in FOR_DECODER_ONLY])
def test_contender_agrees_with_the_definition(
    name: str, spec: EncoderDecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answer, _ = judged(name, t5_workload(monkeypatch, spec))
    assert len({tuple(map(tuple, codes.tolist())) for codes in answer.codes}) == 3  # the prompt decides


@pytest.mark.parametrize("name", ["hf", "hf-fast"])
def test_one_beam_is_scored_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search = SearchOptions(beam=1, top_k=1, collisions="first")
    judged(name, t5_workload(monkeypatch, search=search))


def test_transformers_gives_the_engines_lists_for_prompts_of_several_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    generator = np.random.default_rng(3)
    prompts = tuple(generator.integers(0, VOCAB_SIZE, length, dtype=np.int32) for length in (1, 30, 7))
    workload = t5_workload(monkeypatch, prompts=prompts, context=30)
    answers = []
    for name in ("xgr", "hf", "hf-fast"):
        contender = make_contender(name)
        contender.prepare(workload)
        answers.append([codes.tolist() for codes in contender.run(workload.batch(0)).codes])
    assert answers[0] == answers[1] == answers[2]


def test_transformers_shares_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    model = t5_workload(monkeypatch).model
    assert isinstance(model.decoder, EncoderDecoder)
    ours = {tensor.untyped_storage().data_ptr() for _, tensor in t5_tensors(model.decoder, model.head)}
    theirs = dict(transformers_model(model).named_parameters())
    assert {tensor.untyped_storage().data_ptr() for tensor in theirs.values()} == ours
    stored = {tensor.data_ptr(): tensor for tensor in theirs.values()}  # a tied head is the embedding
    assert model.bytes == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("name", FOR_DECODER_ONLY)
def test_a_contender_with_another_attention_says_that_it_computes_decoder_only_models(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = make_contender(name).available(t5_workload(monkeypatch))
    assert reason is not None and "computes decoder-only models" in reason


def test_half_precision_is_judged_by_plain_torch_in_that_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "compute_dtype", lambda stored, device: torch.bfloat16)
    workload = t5_workload(monkeypatch)
    assert workload.model.dtype == "bfloat16"
    contender = make_contender("xgr")
    contender.prepare(workload)
    batch = workload.batch(0)
    judged = judge(workload, batch, {"xgr": contender.run(batch)})
    assert judged.parity["xgr"].marks == []
    assert judged.facts["measured_noise"] > 1e-3


def _products(workload: Workload) -> tuple[int, int, int]:
    """Multiplications, one by one: of a prompt's linears, of a decoder row's, of a (query, key) pair of one layer."""
    prompt = row = 0
    for name, shape in SPEC.tensor_shapes().items():
        if len(shape) == 2 and "bias" not in name and name != "embed.weight":
            by_prompt = name.startswith("encoder") or ".cross.k." in name or ".cross.v." in name
            prompt, row = (prompt + shape[0] * shape[1], row) if by_prompt else (prompt, row + shape[0] * shape[1])
    return prompt, row, 2 * SPEC.num_heads * SPEC.head_dim


def test_work_is_what_counting_one_by_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = t5_workload(monkeypatch)
    by_prompt, by_row, pair = _products(workload)
    prefill = head = levels = 0
    for _user in range(3):
        prefill += by_row  # the start token
        for _token in range(13):
            prefill += by_prompt + SPEC.num_encoder_layers * 13 * pair + SPEC.num_layers * pair
        prefill += SPEC.num_layers * pair  # the start token and itself
        for depth, rows in enumerate(rows_a_level(workload)):
            for _row in range(rows):
                head += VOCAB_SIZE * SPEC.hidden_size
                if depth:
                    levels += by_row + SPEC.num_layers * pair * (13 + 1 + depth)
    assert prefill_work(workload, 3).flops == 2 * prefill
    assert decode_work(workload, 3).flops == 2 * (head + levels)
    assert prefill_work(replace(workload, shared_prefix=6), 3).flops == 2 * prefill  # an encoder shares nothing


def test_bytes_are_weights_once_and_the_engines_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = t5_workload(monkeypatch)
    by_prompt, by_row, _ = _products(workload)
    token = 2 * SPEC.num_layers * SPEC.num_heads * SPEC.head_dim
    rows = rows_a_level(workload)
    assert prefill_work(workload, 3).bytes == 4 * (by_prompt + by_row + 3 * (13 + 1) * token)
    levels = sum(by_row + 3 * (13 + 1 + depth * rows[depth]) * token for depth in (1, 2))
    assert decode_work(workload, 3).bytes == 4 * (levels + 3 * VOCAB_SIZE * SPEC.hidden_size)
    cache = workload.model.decoder.new_cache(3 * 13, 3, sum(rows[1:]))
    held = sum(tensor.nbytes for tensor in (cache.prompt_k, cache.prompt_v, cache.generated_k, cache.generated_v))
    assert kv_cache_bytes(workload, 3) == held


def test_the_geometry_is_tigers() -> None:
    spec = find_geometry("t5-tiger").spec(256, 4, "bfloat16")
    assert isinstance(spec, EncoderDecoderSpec)
    assert (spec.num_encoder_layers, spec.num_layers, spec.hidden_size, spec.intermediate_size) == (4, 4, 128, 1024)
    assert (spec.num_heads, spec.head_dim, spec.vocab_size, spec.start_token) == (6, 64, 1026, 0)
    assert spec.tied and spec.scaled_output and not spec.gated and spec.dtype == "bfloat16"


def test_a_geometrys_own_context_holds_where_nothing_else_is_said() -> None:
    def contexts(**wishes: str) -> tuple[int, ...]:
        return choose_options(CPU, BenchWishes(**wishes)).contexts  # type: ignore[arg-type]

    assert contexts(geometry="t5-tiger") == (80,)
    assert contexts(geometry="t5-tiger", context="40,60") == (40, 60)
    assert contexts(geometry="t5-tiger", preset="quick") == (64, 128)
    assert contexts(geometry="t5-tiger,quick") == contexts(geometry="quick") == (64,)


def test_a_whole_run_of_t5_tiger() -> None:
    pytest.importorskip("transformers")
    wishes = BenchWishes(
        geometry="t5-tiger",
        items="3000",
        context="40",
        users="2",
        beam="16",
        baselines="hf,hf-fast,paged,paper,cascade,flashrec,vllm",
        ablations=True,
        online=True,
        budget_s=0.02,
    )
    options = replace(choose_options(CPU, wishes), online_requests=5, online_trial_s=0.05, constraint=True)
    record = json.loads(json.dumps(run_bench(replace(options, online_contenders=("xgr", "paged")), CPU, BenchCaller())))
    (row,) = record["rows"]
    status = {one["name"]: one["status"] for one in row["contenders"]}
    assert {name for name, state in status.items() if state == "ok"} == {"xgr", "hf", "hf-fast"}
    assert {state for name, state in status.items() if name in FOR_DECODER_ONLY} == {"not run"}
    assert all(one["parity"]["marks"] == [] for one in row["contenders"] if one["status"] == "ok")
    parts = {entry["part"]: entry for entry in record["ablations"]["parts"]}
    assert parts["xBeam: constraint"]["status"] == parts["xBeam: early termination"]["status"] == "ok"
    assert "decoder-only" in parts["xAttention"]["reason"] and "encoder" in parts["shared prefix"]["reason"]
    assert [left["part"] for left in record["left_out"]] == ["attention"]
    assert "decoder-only" in record["left_out"][0]["reason"]
    assert [(one["contender"], one["status"]) for one in record["online"]] == [("xgr", "ok"), ("paged", "not run")]
    assert record["phases"]["ms"]["prefill"] > 0 and record["timeline"]["spans"]
    assert record["constraint"]["sizes"][0]["status"] == "ok"
    html = page(record)
    assert "t5-tiger" in html and "computes decoder-only models" in html


def test_a_converted_t5_with_real_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import save_file

    spec = replace(SPEC, start_token=0)
    model = t5_workload(monkeypatch, spec).model
    assert isinstance(model.decoder, EncoderDecoder)
    source = tmp_path / "checkpoint"
    source.mkdir()
    config = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "n_positions": spec.max_context}
    (source / "config.json").write_text(json.dumps({**config, **t5_config_fields(spec), "torch_dtype": "float32"}))
    stored = {name: tensor.clone() for name, tensor in t5_tensors(model.decoder, model.head) if "embed_" not in name}
    save_file(
        {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"}, source / "model.safetensors"
    )
    convert(ConvertOptions(source=source, out=tmp_path / "model", token_offsets=OFFSETS, prompt="sids-only"))
    histories = [[100 + item for item in range(length)] for length in (2, 5, 9)]
    pq.write_table(pa.table({"history": histories}), tmp_path / "users.parquet")
    wishes = BenchWishes(
        model=str(tmp_path / "model"),
        vocab=str(make_vocabulary(tmp_path / "vocab")),
        inputs=(str(tmp_path / "users.parquet"),),
        users="3",
        beam="8",
        top_k=8,
        baselines="hf,hf-fast",
        budget_s=0.02,
    )
    record = run_bench(choose_options(CPU, wishes), CPU, BenchCaller())
    (row,) = record["rows"]
    assert [(one["name"], one["status"], one["parity"]["marks"]) for one in row["contenders"]] == [
        (name, "ok", []) for name in ("xgr", "hf", "hf-fast")
    ]
    assert row["weight_bytes"] == model.bytes
    assert [left["part"] for left in record["left_out"]] == ["attention"]

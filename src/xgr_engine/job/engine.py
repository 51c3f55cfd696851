"""From a model directory to something that computes batches: device, weights, memory plan. Imports torch lazily."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.checkpoint.model_dir import ModelDir
from xgr_engine.errors import BackendUnavailableError, UsageError
from xgr_engine.models.spec import DTYPE_BYTES, EncoderDecoderSpec
from xgr_engine.options import SearchOptions
from xgr_engine.system import cpu_name, memory
from xgr_engine.xschedule.engines import Engine
from xgr_engine.xschedule.memory import CostModel, cost_model, default_budget, plan_limits
from xgr_engine.xschedule.scheduler import BatchLimits

Note = Callable[[str], None]


@dataclass(frozen=True)
class Device:
    """``name`` as torch spells it; ``label`` for people; free bytes of a GPU."""

    name: str
    label: str
    gpu_free: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes for a batch, where that number comes from, and the limits that follow."""

    budget: int
    source: str
    cost: CostModel
    limits: BatchLimits

    def to_json(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget,
            "budget_from": self.source,
            "weights_counted": False,
            "largest_batch_bytes": self.cost.of_batch(self.limits.tokens, self.limits.users),
            "cost_model": asdict(self.cost),
            "limits": {**asdict(self.limits), "users": self.limits.users},
        }


@dataclass(frozen=True)
class LoadedEngine:
    """What computes, and what the manifest says of it."""

    engine: Engine
    limits: BatchLimits
    description: dict[str, Any]


def resolve_device(wanted: str, note: Note = lambda text: None) -> Device:
    """``auto`` takes the first GPU, or says that there is none; a device asked for by name must be there.

    Raises:
        UsageError: no such kind of device.
        BackendUnavailableError: the named GPU cannot be used.
    """
    import torch

    if wanted == "cpu":
        return Device("cpu", cpu_name())
    if wanted == "auto":
        if not torch.cuda.is_available():
            note("no CUDA device: computing on the CPU")
            return Device("cpu", cpu_name())
        wanted = "cuda"
    kind, _, number = wanted.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise UsageError(f"--device {wanted}: must be auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"--device {wanted}: torch finds no CUDA device",
            why="torch was installed without CUDA" if torch.version.cuda is None else "driver or device missing",
            hint="run `xgr doctor`, or use --device cpu",
        )
    index = int(number or 0)
    if index >= torch.cuda.device_count():
        raise BackendUnavailableError(
            f"--device {wanted}: this machine has {torch.cuda.device_count()} CUDA device(s), counted from 0"
        )
    free, _ = torch.cuda.mem_get_info(index)
    return Device(f"cuda:{index}", torch.cuda.get_device_name(index), int(free))


def weight_bytes(model: ModelDir, device: Device) -> int:
    """Bytes of the weights on the device, from the size of the file and the compute dtype."""
    stored = model.weights_path.stat().st_size
    return int(stored * _itemsize(model, device) / DTYPE_BYTES[model.spec.dtype])


def _itemsize(model: ModelDir, device: Device) -> int:
    return DTYPE_BYTES["float32" if device.name == "cpu" else model.spec.dtype]


def plan_memory(
    model: ModelDir,
    vocabulary: Vocabulary,
    search: SearchOptions,
    device: Device,
    max_memory: int | None,
) -> MemoryPlan:
    """Batch limits from ``--max-memory``, or from the device.

    Raises:
        UsageError: one user does not fit.
    """
    suffix = len(model.contract.suffix_ids)
    longest_prompt = model.spec.max_context - model.table.levels - suffix
    gpu = device.gpu_free is not None
    stored, itemsize = _gate_up_rows(model, device), _itemsize(model, device)
    cost = cost_model(model.spec, vocabulary.trie, search, suffix, itemsize, gpu=gpu, gate_up_rows=stored)
    if max_memory is not None:
        budget, source = max_memory, "--max-memory"
    elif device.gpu_free is not None:
        budget, source = default_budget(device.gpu_free - weight_bytes(model, device), None), "free GPU memory"
    else:
        budget, source = default_budget(None, memory().available), "2 GiB, or half of the free memory if that is less"
    return MemoryPlan(budget, source, cost, plan_limits(cost, budget, longest_prompt, gpu))


def _gate_up_rows(model: ModelDir, device: Device) -> int | None:
    """``gate_up_rows`` of :func:`cost_model`, by the kernels that the model will run on."""
    if device.gpu_free is None or isinstance(model.spec, EncoderDecoderSpec):
        return None
    import torch

    from xgr_engine.kernels.launch import gate_up_rows
    from xgr_engine.models.ops import choose_ops

    place, spec = torch.device(device.name), model.spec
    if choose_ops(place).name != "triton":
        return None
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return gate_up_rows(place, dtype, spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)


def device_peak_bytes(device: str) -> int | None:
    """Largest memory that torch has held on a GPU so far; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return int(torch.cuda.max_memory_reserved(device))


@dataclass(frozen=True)
class LoadedWeights:
    """A model on its device, independent of catalog and search options."""

    model: Any
    head: Any
    device: Device


def load_weights(model: ModelDir, device: Device, threads: int | None = None) -> LoadedWeights:
    """Reads ``model.safetensors`` onto the device; sets torch's CPU threads if asked to."""
    import torch

    from xgr_engine.models.loading import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    return LoadedWeights(*load_model(model.spec, model.weights_path, device.name), device)


def build_engine(
    weights: LoadedWeights, model: ModelDir, vocabulary: Vocabulary, search: SearchOptions, plan: MemoryPlan
) -> LoadedEngine:
    """Binds a catalog and search options to loaded weights."""
    import torch

    from xgr_engine.recommender import Recommender

    engine = Recommender(
        weights.model,
        weights.head,
        vocabulary.trie,
        model.table,
        search,
        score_suffix=model.contract.suffix_ids,
        lanes=plan.limits.lanes,
    )
    description = {
        "device": weights.device.name,
        "device_name": weights.device.label,
        "dtype": str(weights.head.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "implementation": engine.implementation,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if weights.device.gpu_free is not None else None,
        "memory_plan": plan.to_json(),
    }
    return LoadedEngine(engine, plan.limits, description)


def load_engine(
    model: ModelDir,
    vocabulary: Vocabulary,
    search: SearchOptions,
    device: Device,
    plan: MemoryPlan,
    threads: int | None = None,
) -> LoadedEngine:
    """:func:`load_weights`, then :func:`build_engine`; buffers of the largest planned batch are allocated at once."""
    loaded = build_engine(load_weights(model, device, threads), model, vocabulary, search, plan)
    loaded.engine.reserve(plan.limits.tokens, plan.limits.users)
    return loaded

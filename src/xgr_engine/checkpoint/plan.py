"""Check a checkpoint's tensors against its config before anything is written: names, shapes, types, tied head."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from xgr_engine.checkpoint.hf_config import HfConfig
from xgr_engine.checkpoint.hf_source import Shards
from xgr_engine.checkpoint.names import NameMap, names_of
from xgr_engine.errors import CheckpointError
from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec

# safetensors' dtype -> ours, for the dtypes that can be stored (float64 is narrowed).
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
_SHOWN = 5
_HEAD, _EMBED = "head.weight", "embed.weight"
# transformers 5 ties every T5 and takes false as "do not scale"; true alone would scale the output.
_KEEP_SCALE = ", and scale_decoder_outputs to false, which is how transformers 5 reads this file"


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    Attributes:
        spec: complete, with the dtype to store and whether the head is the embedding.
        ours: foreign tensor name -> xgr name, for every tensor of the model.
        skipped: foreign names that are left out: computed tables, and stored copies of the embedding.
        warnings: what the user should know.
    """

    spec: AnySpec
    ours: dict[str, str]
    skipped: tuple[str, ...]
    warnings: tuple[str, ...]


def make_plan(config: HfConfig, shards: Shards, dtype: str | None, source: Path) -> Plan:
    """Match the tensors of a checkpoint to its config.

    Args:
        dtype: to store; None for the source's own.
        source: the checkpoint's directory, for messages.

    Raises:
        CheckpointError: a tensor is missing, unknown or of the wrong shape, or has a dtype that cannot be used.
    """
    names = names_of(config.spec)
    stand_ins, skipped = _settle_copies(shards, names, source)
    skipped += [name for name in shards.tensors if names.ignores(name)]
    found = {name: names.to_xgr(stand_ins.get(name, name)) for name in shards.tensors if name not in skipped}
    spec, left_out, warnings = _settle_head(config.spec, shards, found, names, source)
    skipped += left_out
    ours = {name: own for name, own in found.items() if own is not None and name not in skipped}
    _check_complete(spec, ours, [name for name, own in found.items() if own is None], source, names)
    _check_shapes(spec, ours, shards, source)
    stored = _stored_dtype(ours, shards, source)
    _check_range(spec, stored, dtype, source)
    if config.dtype is not None and config.dtype != stored:
        warnings.append(f"config.json says {config.dtype}, but the weights are {stored}, which is what counts")
    return Plan(replace(spec, dtype=dtype or stored), ours, tuple(skipped), tuple(warnings))


def _settle_copies(shards: Shards, names: NameMap, source: Path) -> tuple[dict[str, str], list[str]]:
    """For tensors that a file may hold under several names: which name stands in for the usual one (its name -> the
    usual name), and which equal copies are left out."""
    stand_ins: dict[str, str] = {}
    skipped: list[str] = []
    holders = {usual: usual for usual in names.copies.values() if usual in shards.tensors}
    for name, usual in names.copies.items():
        if name not in shards.tensors:
            continue
        holder = holders.setdefault(usual, name)
        if holder == name:
            stand_ins[name] = usual
        elif _same(shards, holder, name):
            skipped.append(name)
        else:
            raise CheckpointError(
                f"{source}: {holder} and {name} are different",
                why="encoder and decoder of the model read one embedding",
                hint="save the model again with the library that trained it; one of the two tensors is left over",
            )
    return stand_ins, skipped


def _settle_head(
    spec: AnySpec, shards: Shards, found: dict[str, str | None], names: NameMap, source: Path
) -> tuple[AnySpec, list[str], list[str]]:
    """Whether the output head is the embedding: the spec, names to leave out, warnings. A stored head overrules the
    config's flag."""
    head = names.to_foreign(_HEAD) or _HEAD
    if head not in shards.tensors:
        if not spec.tied:
            absent = "" if isinstance(spec, EncoderDecoderSpec) else " (or absent, which means false)"
            raise CheckpointError(
                f"{source}: {head} is missing, and config.json does not tie it to the embedding",
                why=f"tie_word_embeddings is false{absent}",
                hint="if the model was trained with tied embeddings, set tie_word_embeddings to true in config.json"
                + (_KEEP_SCALE if isinstance(spec, EncoderDecoderSpec) and not spec.scaled_output else ""),
            )
        return spec, [], []
    if not spec.tied:
        return spec, [], []
    embed = next((name for name, own in found.items() if own == _EMBED), None)
    if embed is not None and _same(shards, head, embed):
        return spec, [head], []
    warning = f"config.json ties {head} to the embedding, but the file holds a different one, which is used"
    return replace(spec, tied=False), [], [warning]


def _same(shards: Shards, one: str, other: str) -> bool:
    import torch

    if shards.tensors[one].dtype != shards.tensors[other].dtype:
        return False
    return torch.equal(shards.read(one), shards.read(other))


def _check_complete(spec: AnySpec, ours: dict[str, str], unknown: list[str], source: Path, names: NameMap) -> None:
    held = len(ours) + len(unknown)
    layers = spec.num_layers + (spec.num_encoder_layers if isinstance(spec, EncoderDecoderSpec) else 0)
    if layers > held:  # listing what each of a billion layers lacks would take for ever
        raise CheckpointError(
            f"{source}: config.json describes {layers} layers, the weights are {held} tensors",
            hint="use the config.json that was saved together with the weights",
        )
    wanted = spec.tensor_shapes()
    missing = sorted(names.to_foreign(name) or name for name in set(wanted) - set(ours.values()))
    surplus = sorted([*unknown, *(foreign for foreign, own in ours.items() if own not in wanted)])
    if missing:
        raise CheckpointError(
            f"{source}: {len(missing)} tensors are missing: {_some(missing)}",
            why=f"config.json describes {spec.num_layers} layers of {spec.family}"
            + (f"; there are also {len(surplus)} tensors it does not explain: {_some(surplus)}" if surplus else ""),
            hint="copy the checkpoint again, or find the config.json that belongs to it",
        )
    if surplus:
        raise CheckpointError(
            f"{source}: {len(surplus)} tensors have no place in the model: {_some(surplus)}",
            why=f"config.json describes a {spec.family} of {spec.num_layers} layers, which has no such tensors, "
            "and leaving weights out would change what it computes",
            hint="save the plain model without adapters, heads or vision parts",
        )


def _check_shapes(spec: AnySpec, ours: dict[str, str], shards: Shards, source: Path) -> None:
    wanted = spec.tensor_shapes()
    wrong = [
        f"{name} is {list(shards.tensors[name].shape)}, expected {list(wanted[own])}"
        for name, own in ours.items()
        if shards.tensors[name].shape != wanted[own]
    ]
    if wrong:
        raise CheckpointError(
            f"{source}: {len(wrong)} tensors have another shape than config.json says: {_some(wrong, '; ')}",
            hint="find the config.json that belongs to these weights (vocab_size after added tokens, head_dim)",
        )


def _stored_dtype(ours: dict[str, str], shards: Shards, source: Path) -> str:
    """The type of most of the weights."""
    sizes: Counter[str] = Counter()
    for name in ours:
        info = shards.tensors[name]
        if info.dtype not in _FLOATS:
            raise CheckpointError(
                f"{source}: {name} holds {info.dtype} numbers",
                why="the weights are quantised or packed; xgr reads float32, bfloat16 and float16",
                hint="convert the unquantised checkpoint, or dequantise it first",
            )
        sizes[_FLOATS[info.dtype]] += math.prod(info.shape) * _BYTES[info.dtype]
    return sizes.most_common(1)[0][0]


def _check_range(spec: AnySpec, stored: str, dtype: str | None, source: Path) -> None:
    """Refuse float16, asked for or else stored, for a T5, whose activations it cannot hold."""
    if not isinstance(spec, EncoderDecoderSpec) or (dtype or stored) != "float16":
        return
    raise CheckpointError(
        f"{source}: a T5 cannot be stored in float16"
        + (": --dtype float16" if dtype else ", as these weights are, and compute in it"),
        why="its activations grow beyond 65504, the largest float16, and become infinite",
        hint="give --dtype bfloat16 or --dtype float32",
    )


def _some(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:_SHOWN]) + (f"{separator}..." if len(names) > _SHOWN else "")

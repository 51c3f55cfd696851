"""A Hugging Face checkpoint directory: which files it is made of, and its tensors, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from xgr_engine.errors import CheckpointError
from xgr_engine.files import file_sha256, parse_json
from xgr_engine.tokens.tokenizer_files import COMPANION_FILES, TOKENIZER_FILE

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp")


@dataclass(frozen=True)
class TensorInfo:
    """The file that holds a tensor, its shape, and its dtype as safetensors spells it, such as ``BF16``."""

    shard: str
    shape: tuple[int, ...]
    dtype: str


def read_config(source: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory.

    Raises:
        CheckpointError: the directory or its config is missing or unreadable, or it holds an adapter alone.
    """
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: no such directory",
            why="a checkpoint is a directory with config.json and *.safetensors, as transformers saves it",
        )
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        if (source / name).is_file():
            raise CheckpointError(
                f"{source}: holds a LoRA adapter ({name})",
                why="an adapter is a difference to another checkpoint, and xgr needs the whole model",
                hint="merge it first: PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(...)",
            )
    path = source / CONFIG_FILE
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}: has no {CONFIG_FILE}", hint="give the directory of the model") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the file", why=str(error)) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold one JSON object")
    return config


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a checkpoint.

    Attributes:
        shards: their names, in order.
        weight_map: tensor -> shard, from the index; None without an index.
    """

    shards: tuple[str, ...]
    weight_map: Mapping[str, str] | None


def find_weights(source: Path, model_class: str) -> WeightFiles:
    """The shards of an index if all of them exist, else the single file (a stale index may lie beside it).

    Args:
        model_class: the class of transformers that loads and saves such a checkpoint; for messages.

    Raises:
        CheckpointError: there is neither; the message lists what is missing.
    """
    index_path, single = source / INDEX_FILE, source / SINGLE_FILE
    if index_path.is_file():
        try:
            weight_map = parse_json(index_path.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
            outside = [shard for shard in shards if Path(shard).name != shard]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path}: cannot read the index", why=repr(error)) from error
        if outside:
            raise CheckpointError(f"{index_path}: names a file outside its directory: {outside[0]}")
        missing = [shard for shard in shards if not (source / shard).is_file()]
        if not missing:
            return WeightFiles(tuple(shards), weight_map)
        if not single.is_file():
            raise CheckpointError(
                f"{source}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}",
                why=f"{INDEX_FILE} names them",
                hint="copy the missing files, or download the checkpoint again",
            )
    if single.is_file():
        return WeightFiles((SINGLE_FILE,), None)
    pickled = sorted(path.name for pattern in _PICKLED for path in source.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{source}: the weights are pickled ({', '.join(pickled[:3])})",
            why="reading a pickle runs code that it contains; xgr reads safetensors only",
            hint=f'save it again with transformers: {model_class}.from_pretrained("{source}").save_pretrained(...)',
        )
    raise CheckpointError(f"{source}: has no weights", why=f"looked for {INDEX_FILE} and {SINGLE_FILE}")


class Shards:
    """The tensors of a checkpoint, as a context manager. Every shard is opened once, read once, and closed.

    Attributes:
        tensors: name -> :class:`TensorInfo`, of all shards.
    """

    def __init__(self, source: Path, files: WeightFiles) -> None:
        self._source = source
        self._files = files
        self._stacks: dict[str, ExitStack] = {}
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def __enter__(self) -> Shards:
        """Open all shards (their bytes are not read yet) and check them against the index.

        Raises:
            CheckpointError: a shard is not a safetensors file, a tensor is in two shards, or the index places one in a
                shard that lacks it.
        """
        try:
            for shard in self._files.shards:
                self._open_shard(shard)
            self._check_index()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for shard in list(self._open):
            self._close_shard(shard)

    def read(self, name: str) -> Tensor:
        """One tensor. :meth:`stream` must not have gone past its shard."""
        tensor: Tensor = self._open[self.tensors[name].shard].get_tensor(name)
        return tensor

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, shard after shard; a shard is closed after its last tensor."""
        for shard in self._files.shards:
            for name in sorted(name for name, info in self.tensors.items() if info.shard == shard):
                yield name, self.read(name)
            self._close_shard(shard)

    def _open_shard(self, shard: str) -> None:
        stack = ExitStack()
        try:
            file = stack.enter_context(safe_open(self._source / shard, framework="pt", device="cpu"))
            self._stacks[shard], self._open[shard] = stack, file
            for name in file.keys():  # noqa: SIM118 - the handle is not a mapping
                view = file.get_slice(name)
                if name in self.tensors:
                    raise CheckpointError(
                        f"{self._source}: the tensor {name} is in {self.tensors[name].shard} and in {shard}",
                        hint="remove the files that belong to another save of the model",
                    )
                self.tensors[name] = TensorInfo(shard, tuple(view.get_shape()), str(view.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._source / shard}: is not a complete safetensors file",
                why=str(error),
                hint="copy the file again; compare the sizes to see whether it was cut short",
            ) from error

    def _close_shard(self, shard: str) -> None:
        self._open.pop(shard, None)
        stack = self._stacks.pop(shard, None)
        if stack is not None:
            stack.close()

    def _check_index(self) -> None:
        absent = [
            f"{name} (in {shard})"
            for name, shard in (self._files.weight_map or {}).items()
            if name not in self.tensors or self.tensors[name].shard != shard
        ]
        if absent:
            raise CheckpointError(
                f"{self._source}: {INDEX_FILE} names {len(absent)} tensors that its shards do not hold: "
                f"{', '.join(absent[:5])}",
                hint="index and shards belong to different saves; copy the checkpoint again",
            )


def hash_source(source: Path, shards: tuple[str, ...]) -> dict[str, str]:
    """Name -> sha256 of every file that conversion reads."""
    names = [CONFIG_FILE, *shards, TOKENIZER_FILE, *COMPANION_FILES]
    return {name: file_sha256(source / name) for name in names if (source / name).is_file()}

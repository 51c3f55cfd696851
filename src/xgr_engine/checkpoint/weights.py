"""Write and check ``model.safetensors``: laid out from the spec, filled tensor by tensor, a checksum for each."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from xgr_engine.errors import CheckpointError
from xgr_engine.models.spec import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BLOCK = 1 << 22
HEADER = "(header)"  # stands for the file's list of tensors among the checksums


class StreamingWriter:
    """A safetensors file whose tensors arrive in any order, each written to its place at once.

    The writer of the safetensors package needs the whole model in memory; this one needs one tensor at a time.

    Attributes:
        checksums: name -> sha256 of the bytes written, for each tensor so far, and for ``HEADER``.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in shapes.items():
            end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._places = {name: tuple(header[name]["data_offsets"]) for name in shapes}
        self._start = 8 + len(text)
        self.checksums: dict[str, str] = {HEADER: hashlib.sha256(text).hexdigest()}
        self.size = self._start + offset
        self._file: IO[bytes] = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self.size)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor (already in the file's dtype and shape) in its place."""
        import torch

        begin, end = self._places[name]
        data: memoryview[int] = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if len(data) != end - begin or name in self.checksums:
            raise AssertionError(f"{name}: {len(data)} bytes for {end - begin}, or written twice")
        self.checksums[name] = hashlib.sha256(data).hexdigest()
        self._file.seek(self._start + begin)
        self._file.write(data)

    def close(self) -> None:
        """Flush to disk. The caller makes sure that every tensor was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        self._file.close()


def verify_checksums(path: Path, checksums: Mapping[str, str]) -> list[str]:
    """Names of the tensors of ``path`` whose bytes are not those that were written; empty if all are.

    If the header has changed, ``HEADER`` is the only name: without it the tensors cannot be found.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(min(length, path.stat().st_size))
            if hashlib.sha256(header).hexdigest() != checksums.get(HEADER):
                return [HEADER]
            places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name in checksums}
            wrong = []
            for name, (begin, end) in places.items():
                file.seek(8 + length + begin)
                if _hash(file, end - begin) != checksums[name]:
                    wrong.append(name)
            return wrong
    except (OSError, struct.error) as error:
        raise CheckpointError(
            f"{path}: cannot be read", why=str(error), hint="run `xgr convert --fresh` again, and check the disk"
        ) from error


def _hash(file: IO[bytes], size: int) -> str:
    digest = hashlib.sha256()
    while size > 0:
        block = file.read(min(size, _BLOCK))
        if not block:
            break  # cut short: the digest cannot match
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()

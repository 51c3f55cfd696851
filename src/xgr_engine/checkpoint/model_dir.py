"""The xgr model directory: ``xgr.json``, ``model.safetensors``, tokenizer files. Written by ``convert``, read by all.

``xgr.json`` (schema version 1)::

    {"schema_version": 1, "kind": "model", "xgr_version": "...",
     "model": {ModelSpec or EncoderDecoderSpec fields},
     "contract": {"score_suffix": [token ids], "score_suffix_text": "\\n"},
     "sid_tokens": [{"template": "<a_{}>" | null, "codes": [...], "token_ids": [...]}, ... one per level],
     "prompt": {"name": "...", "template": "...", "bos_ids": [...], "eos_ids": [...] (only if there are any)},
     "weights": {"size": bytes, "tensors": {name, or "(header)": sha256 of its bytes}},
     "tokenizer": {file name: sha256},
     "vocab_checked": {"path": "...", "content_hash": "..."} | null,
     "source": {"path": "...", "files": {name: sha256}, "request": sha256 over the files and the options},
     "fingerprint": sha256 over everything above that changes results}

The fingerprint covers model, contract, SID tokens, prompt, weights and tokenizer, not where they came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgr_engine.checkpoint.weights import verify_checksums
from xgr_engine.errors import CheckpointError
from xgr_engine.files import file_sha256, misfit, parse_json
from xgr_engine.models.spec import AnySpec, spec_from_json
from xgr_engine.tokens.contract import ScoreContract
from xgr_engine.tokens.prompt import PromptRenderer, PromptSpec
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.tokens.tokenizer_files import TOKENIZER_FILE

SCHEMA_VERSION = 1
KIND = "model"
METADATA_FILE = "xgr.json"
WEIGHTS_FILE = "model.safetensors"

_KEYS = {
    *("schema_version", "kind", "xgr_version", "model", "contract", "sid_tokens", "prompt", "weights", "tokenizer"),
    *("vocab_checked", "source", "fingerprint"),
}
# What the rooms that read the parts do not check themselves; see xgr_engine.files.misfit.
_SHAPE: dict[str, Any] = {
    "model": dict,
    "contract": {"score_suffix": [int], "score_suffix_text": str},
    "sid_tokens": [{"template": (None, str), "codes": list, "token_ids": list}],
    "prompt": {"name": str, "template": str, "bos_ids": [int]},
    "weights": {"size": int, "tensors": {str: str}},
    "tokenizer": {str: str},
    "vocab_checked": (None, {"path": str, "content_hash": str}),
    "source": {"path": str, "files": {str: str}, "request": str},
    "fingerprint": str,
    "xgr_version": str,
}
_FINGERPRINTED = ("model", "contract", "sid_tokens", "prompt", "weights", "tokenizer")
_AGAIN = "run `xgr convert` again"
_AFRESH = "run `xgr convert --fresh` again"


@dataclass(frozen=True, eq=False)
class ModelDir:
    """A converted model, weights unread.

    Attributes:
        path: the directory.
        spec: sizes and switches.
        table: its semantic-ID tokens.
        prompt: how it wants its prompt.
        contract: what else belongs to a score.
        fingerprint: changes with everything that changes results.
        weights_path: its ``model.safetensors``.
        tokenizer_path: its ``tokenizer.json``; None for a model whose tokens are plain numbers.
        vocab_checked: ``path`` and ``content_hash`` of the vocabulary that conversion checked, if any.
        source: ``path``, ``files`` and ``request`` of the checkpoint it came from.
        xgr_version: of the conversion.
        checksums: sha256 of every tensor and tokenizer file.
    """

    path: Path
    spec: AnySpec
    table: SidTokenTable
    prompt: PromptSpec
    contract: ScoreContract
    fingerprint: str
    weights_path: Path
    tokenizer_path: Path | None
    vocab_checked: Mapping[str, str] | None
    source: Mapping[str, Any]
    xgr_version: str
    checksums: Mapping[str, Mapping[str, str]]

    def renderer(self) -> PromptRenderer:
        """Renders histories as prompts for this model, with room left for the SID and the score suffix."""
        return PromptRenderer(
            self.prompt,
            self.tokenizer_path,
            self.table,
            self.spec.max_context,
            reserve=self.table.levels + len(self.contract.suffix_ids),
            vocab_size=self.spec.vocab_size,
        )

    def verify_weights(self) -> None:
        """Read all weights and tokenizer files and compare them with the checksums of conversion.

        Raises:
            CheckpointError: some bytes are not those that were written; the message names the tensors or files.
        """
        wrong = verify_checksums(self.weights_path, self.checksums["tensors"])
        wrong += [
            name for name, digest in self.checksums["tokenizer"].items() if file_sha256(self.path / name) != digest
        ]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"{self.path}: damaged: {', '.join(wrong[:5])}{more}",
                why="the bytes differ from those that conversion wrote",
                hint=f"{_AFRESH}, and check the disk",
            )


def load_model_dir(path: str | Path) -> ModelDir:
    """Open a model directory. Reads ``xgr.json`` and file sizes; :meth:`ModelDir.verify_weights` reads the weights.

    Raises:
        CheckpointError: it is not a model directory, or one of a newer xgr, or a file is missing, cut short or edited.
    """
    path = Path(path)
    record = read_metadata(path)
    try:
        model = _parse(path, record)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path / METADATA_FILE}: is not a valid description of a model", why=str(error) or repr(error), hint=_AGAIN
        ) from error
    for file in (model.weights_path, *(path / name for name in model.checksums["tokenizer"])):
        if not file.is_file():
            raise CheckpointError(f"{path}: {file.name} is missing", hint=_AFRESH)
    size = model.weights_path.stat().st_size
    if size != record["weights"]["size"]:
        raise CheckpointError(
            f"{model.weights_path}: is {size:,} bytes long, but conversion wrote {record['weights']['size']:,}",
            why="the file was cut short or replaced",
            hint=f"copy it again, or {_AFRESH}",
        )
    return model


def read_metadata(path: Path) -> dict[str, Any]:
    """The content of ``xgr.json``, with its keys and schema version checked.

    Raises:
        CheckpointError: see :func:`load_model_dir`.
    """
    file = path / METADATA_FILE
    if not file.is_file():
        foreign = " (a Hugging Face checkpoint?)" if (path / "config.json").is_file() else ""
        raise CheckpointError(
            f"{path}: is not an xgr model directory{foreign}",
            why=f"there is no {METADATA_FILE} in it" if path.is_dir() else "there is no such directory",
            hint="make one with `xgr convert CHECKPOINT --vocab VOCAB --out MODEL`",
        )
    try:
        record = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot read the file", why=str(error), hint=_AGAIN) from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise CheckpointError(f"{file}: does not describe a model", hint="give a directory that `xgr convert` wrote")
    version = record.get("schema_version")
    if not isinstance(version, int) or version < 1 or version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{file}: has schema version {version}, but this xgr reads up to {SCHEMA_VERSION}",
            why=f"it was written by xgr {record.get('xgr_version', '?')}",
            hint="update xgr, or convert the checkpoint with this version",
        )
    if wrong := sorted(_KEYS ^ set(record)):
        raise CheckpointError(f"{file}: unknown or missing keys: {', '.join(wrong)}", hint=_AGAIN)
    return record


def fingerprint_of(record: Mapping[str, Any]) -> str:
    """The fingerprint of the content of ``xgr.json``."""
    return canonical_hash({key: record[key] for key in _FINGERPRINTED})


def canonical_hash(value: object) -> str:
    """sha256 over JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _parse(path: Path, record: Mapping[str, Any]) -> ModelDir:
    if wrong := misfit(record, _SHAPE):
        raise ValueError(f'"{wrong}" is missing or has the wrong type')
    if fingerprint_of(record) != record["fingerprint"]:
        raise ValueError("its fingerprint does not fit its content: the file was edited or damaged")
    tokenizer_files = dict(record["tokenizer"])
    return ModelDir(
        path=path,
        spec=spec_from_json(record["model"]),
        table=SidTokenTable.from_json(record["sid_tokens"]),
        prompt=PromptSpec.from_json(record["prompt"]),
        contract=ScoreContract.from_json(record["contract"]),
        fingerprint=str(record["fingerprint"]),
        weights_path=path / WEIGHTS_FILE,
        tokenizer_path=path / TOKENIZER_FILE if TOKENIZER_FILE in tokenizer_files else None,
        vocab_checked=record["vocab_checked"],
        source=record["source"],
        xgr_version=str(record["xgr_version"]),
        checksums={"tensors": dict(record["weights"]["tensors"]), "tokenizer": tokenizer_files},
    )

"""The tokenizer of a Hugging Face checkpoint: ``tokenizer.json`` and the older files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from xgr_engine.errors import CheckpointError
from xgr_engine.files import parse_json

TOKENIZER_FILE = "tokenizer.json"
# Copied beside the converted model; only TOKENIZER_FILE is read by xgr after that.
COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Without tokenizer.json, these are not enough to prove that a token is one id.
_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", *COMPANION_FILES)


@dataclass(frozen=True)
class SourceTokenizer:
    """A tokenizer and the two special tokens that prompts and score contracts may name.

    Attributes:
        tokenizer: with truncation and padding off, which a trainer may have saved.
        path: its ``tokenizer.json``.
        bos_token, eos_token: as the tokenizer's configuration names them, None where it names none.
    """

    tokenizer: Tokenizer
    path: Path
    bos_token: str | None
    eos_token: str | None


def load_tokenizer(path: Path) -> Tokenizer:
    """Read one ``tokenizer.json`` with truncation and padding off.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(f"{path}: cannot read the tokenizer", why=str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def open_source_tokenizer(source: Path) -> SourceTokenizer | None:
    """The tokenizer of the checkpoint directory ``source``; None if it has no tokenizer files at all.

    Raises:
        CheckpointError: there are files of a tokenizer but no ``tokenizer.json``, a file cannot be read, or two files
            give an added token different ids.
    """
    path = source / TOKENIZER_FILE
    if not path.is_file():
        others = [name for name in _SLOW_FILES if (source / name).is_file()]
        if not others:
            return None
        raise CheckpointError(
            f"{source}: there is {', '.join(others)} but no {TOKENIZER_FILE}",
            why="every semantic-ID token is proven to be one id by encoding it, and that needs the whole tokenizer",
            hint=f'write it with transformers: AutoTokenizer.from_pretrained("{source}").save_pretrained("{source}")',
        )
    tokenizer = load_tokenizer(path)
    _check_numbers(path, tokenizer)
    _check_companions(source, tokenizer)
    return SourceTokenizer(
        tokenizer=tokenizer,
        path=path,
        bos_token=_special_token(source, "bos_token"),
        eos_token=_special_token(source, "eos_token"),
    )


def _check_numbers(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse added tokens that are read with another id than the file gives. The tokenizers package numbers them in
    order, whatever the file says, so that after a gap each would have its neighbour's id."""
    for entry in _read_json(path).get("added_tokens") or []:
        text, number, known = entry["content"], entry["id"], tokenizer.token_to_id(entry["content"])
        if known != number:
            raise CheckpointError(
                f"{path}: gives the token {text!r} the id {number}, and it is "
                + ("no token" if known is None else f"read as {known}"),
                why="its added tokens repeat, are empty, are out of order or skip an id, so all later ids shift",
                hint="use the tokenizer.json that was saved together with the model",
            )


def _check_companions(source: Path, tokenizer: Tokenizer) -> None:
    """``added_tokens.json`` and ``added_tokens_decoder`` may lack tokens, as stale copies do, but not contradict."""
    for origin, added in (
        ("added_tokens.json", _read_json(source / "added_tokens.json")),
        ("tokenizer_config.json (added_tokens_decoder)", _decoder_tokens(source / "tokenizer_config.json")),
    ):
        for text, number in added.items():
            known = tokenizer.token_to_id(text)
            if known != number:
                says = f"id {known}" if known is not None else "no such token"
                raise CheckpointError(
                    f"{source}: two files disagree about the token {text}",
                    why=f"{TOKENIZER_FILE}: {says}; {origin}: id {number}",
                    hint="keep the files of the tokenizer that the model was trained with; a copy from the base "
                    "model may have been left over",
                )


def _decoder_tokens(path: Path) -> dict[str, int]:
    """Text -> id of ``added_tokens_decoder``, where the file has it."""
    added = _read_json(path).get("added_tokens_decoder") or {}
    try:
        return {entry["content"]: int(number) for number, entry in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: added_tokens_decoder must give each id an object with the token's content",
            why=repr(error),
            hint="copy the file again, or remove it: tokenizer.json holds the tokens",
        ) from error


def _special_token(source: Path, name: str) -> str | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = _read_json(source / file)
        if name in settings:
            value = settings[name]
            text = value.get("content") if isinstance(value, Mapping) else value
            return str(text) if text else None
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the file", why=str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold one JSON object, not {type(value).__name__}")
    return value

"""What belongs to a score besides the semantic ID: the tokens that the model writes after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xgr_engine.errors import CheckpointError, UsageError
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.tokens.tokenizer_files import SourceTokenizer

_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}
_PROBED = 16  # tokens of each level after which the suffix is tried


@dataclass(frozen=True)
class ScoreContract:
    """Tokens scored after every SID, in order; none by default.

    Attributes:
        suffix_ids: their ids.
        suffix_text: the text that they stand for, for human readers.
    """

    suffix_ids: tuple[int, ...] = ()
    suffix_text: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"score_suffix": list(self.suffix_ids), "score_suffix_text": self.suffix_text}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ScoreContract:
        return cls(tuple(int(token) for token in value["score_suffix"]), str(value["score_suffix_text"]))


def make_score_contract(suffix: str, source: SourceTokenizer | None, table: SidTokenTable) -> ScoreContract:
    """The contract for ``--score-suffix``: a text (``\\n`` may be written as backslash and n), or ``eos``.

    Raises:
        UsageError: there is a suffix but no tokenizer.
        CheckpointError: ``eos`` is given but the tokenizer names none, or the text's ids depend on the SID before it
            or do not spell it.
    """
    if not suffix:
        return ScoreContract()
    if source is None:
        raise UsageError(
            f"--score-suffix {suffix!r}: the checkpoint has no tokenizer, so the suffix cannot be tokenised"
        )
    if suffix == "eos":
        if source.eos_token is None:
            raise CheckpointError(
                f"--score-suffix eos: {source.path.parent} names no eos_token",
                hint="give the token itself, such as --score-suffix '<|im_end|>'",
            )
        text = source.eos_token
        if source.tokenizer.token_to_id(text) is None:  # spelled with other tokens it would be a text, not an end
            raise CheckpointError(
                f"--score-suffix eos: {source.path} has no token {text}, although it is named as eos_token",
                hint="give the token itself, such as --score-suffix '<|im_end|>'",
            )
    else:
        text = re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], suffix)
    return ScoreContract(_suffix_ids(text, source, table), text)


def _suffix_ids(text: str, source: SourceTokenizer, table: SidTokenTable) -> tuple[int, ...]:
    """Ids of ``text`` as the model wrote it in training, after a semantic-ID token."""
    found: set[tuple[int, ...]] = set()
    for level, texts in enumerate(table.texts):
        for token_text, token_id in list(zip(texts, table.token_ids[level].tolist(), strict=False))[:_PROBED]:
            ids = source.tokenizer.encode(token_text + text, add_special_tokens=False).ids
            found.add(tuple(ids[1:]) if ids[:1] == [token_id] else ())
    # Decoders in the style of SentencePiece may put a blank before the first word.
    decoded = {source.tokenizer.decode(list(ids), skip_special_tokens=False).lstrip(" ") for ids in found}
    if len(found) != 1 or not all(found) or decoded != {text.lstrip(" ")}:
        raise CheckpointError(
            f"--score-suffix {text!r}: the tokenizer reads it as {sorted(found)} after semantic-ID tokens",
            why="a suffix must have the same ids after every SID, and those ids must spell it",
            hint="use the text that followed the SID in training, such as '\\n' or eos",
        )
    return found.pop()

"""History -> the token ids that the model reads, rendered from a template and cut to the context by whole items.

Semantic-ID tokens split a text wherever they occur, so most prompts need no tokenizer at run time: the fixed pieces are
tokenised once, next to such tokens, and the history's ids are put between them. The renderer checks on samples that
this equals tokenising the whole text, and does the latter where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from xgr_engine.errors import CheckpointError, HistoryError, UsageError
from xgr_engine.tokens.pieces import Pieces, prove_pieces
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.tokens.templates import PromptTemplate, parse_template, read_template
from xgr_engine.tokens.tokenizer_files import SourceTokenizer, load_tokenizer

Sid = tuple[int, ...]
IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class PromptSpec:
    """How a model wants its prompt; part of ``xgr.json``.

    Attributes:
        name: of the preset, or of the template file.
        template: the Jinja text with its settings (see :mod:`xgr_engine.tokens.templates`).
        bos_ids, eos_ids: token ids before and after every prompt, found at conversion by the template's ``bos`` and
            ``eos`` rules.
    """

    name: str
    template: str
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """``eos_ids`` is written only if there are any: other models keep the fingerprint that they had without it."""
        value = {"name": self.name, "template": self.template, "bos_ids": list(self.bos_ids)}
        return {**value, "eos_ids": list(self.eos_ids)} if self.eos_ids else value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PromptSpec:
        bos, eos = (tuple(int(token) for token in ids) for ids in (value["bos_ids"], value.get("eos_ids", ())))
        return cls(str(value["name"]), str(value["template"]), bos, eos)


@dataclass(frozen=True)
class RenderedPrompt:
    """``token_ids`` [T] int32, and how many of the oldest items were dropped to fit the context."""

    token_ids: IntArray
    dropped: int


def make_prompt_spec(
    choice: str, source: SourceTokenizer | None, table: SidTokenTable, end_token: int | None = None
) -> PromptSpec:
    """The prompt of a checkpoint, from a preset's name or a template file.

    Args:
        end_token: the checkpoint's, for templates that ask for it; None: not known.

    Raises:
        UsageError: there is no such preset or file, or the template is broken.
        CheckpointError: a token of the template's ``single_tokens`` is not one id of this tokenizer, or the template
            asks for an end token that is not known or is a semantic-ID token.
    """
    name, text = read_template(choice)
    template = parse_template(name, text)
    eos_ids = (_end_token(name, end_token, table),) if template.eos == "eos-token" else ()
    if source is None:
        return PromptSpec(name, text, eos_ids=eos_ids)
    for token in template.single_tokens:
        ids = source.tokenizer.encode(token, add_special_tokens=False).ids
        if len(ids) != 1 or source.tokenizer.token_to_id(token) != ids[0]:
            raise CheckpointError(
                f"prompt {name}: the tokenizer has no token {token}; it would be cut into {len(ids)} pieces",
                hint="this prompt belongs to another kind of model; choose the one this checkpoint was trained with",
            )
    return PromptSpec(name, text, _bos_ids(template.bos, source, table), eos_ids)


def tokenizer_end_token(source: SourceTokenizer) -> int | None:
    """The id of the end token that the tokenizer's configuration names; None if it names none, or none that exists."""
    known: int | None = None if source.eos_token is None else source.tokenizer.token_to_id(source.eos_token)
    return known


def _end_token(prompt: str, end_token: int | None, table: SidTokenTable) -> int:
    if end_token is None:
        raise CheckpointError(
            f"prompt {prompt}: ends with the end token, but neither the tokenizer nor config.json names one",
            hint="give its id: --end-token 1 is what T5 has by default",
        )
    for level, ids in enumerate(table.token_ids):
        at = np.flatnonzero(ids == end_token)
        if len(at):
            code = int(table.codes[level][at[0]])
            raise CheckpointError(
                f"prompt {prompt}: the end token {end_token} is also the token of {table.spell(level, code)}, "
                f"level {level + 1}",
                why="the model would take the end of the history for an item",
                hint="give the right one with --end-token ID"
                + ("" if table.templates else ", or check the offsets of --token-offsets"),
            )
    return end_token


def _bos_ids(rule: str, source: SourceTokenizer, table: SidTokenTable) -> tuple[int, ...]:
    if rule == "tokenizer":
        # What the tokenizer puts before a text. What it may put after it does not belong before an answer.
        probe = table.texts[0][0] if table.templates else ""
        ids = source.tokenizer.encode(probe, add_special_tokens=True).ids
        plain = source.tokenizer.encode(probe, add_special_tokens=False).ids
        start = next((at for at in range(len(ids)) if ids[at : at + len(plain)] == plain), 0)
        return tuple(ids[:start])
    if rule == "bos-token" and source.bos_token is not None:
        token_id = source.tokenizer.token_to_id(source.bos_token)
        if token_id is None:
            raise CheckpointError(f"{source.path}: has no token {source.bos_token}, which is named as bos_token")
        return (token_id,)
    return ()


class PromptRenderer:
    """Renders histories for one model.

    Args:
        spec: the model's prompt.
        tokenizer_file: its ``tokenizer.json``; None for a model whose tokens are plain numbers.
        table: its semantic-ID tokens.
        max_context: positions that the model has.
        reserve: positions to keep for what comes after the prompt; None: one per level of the table.
        vocab_size: rows of the model's embedding; complete prompts with other ids are refused. None: not checked.

    Attributes:
        max_tokens: length of the longest prompt that is rendered.
        places_ids: whether the history's ids are put between fixed pieces; if not, whole prompts are tokenised.

    Raises:
        UsageError: the template needs a tokenizer and there is none, or it is longer than the context by itself.
    """

    def __init__(
        self,
        spec: PromptSpec,
        tokenizer_file: Path | None,
        table: SidTokenTable,
        max_context: int,
        reserve: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.spec = spec
        self.table = table
        self.max_tokens = max_context - (table.levels if reserve is None else reserve)
        self._vocab_size = vocab_size
        self._template: PromptTemplate = parse_template(spec.name, spec.template)
        self._tokenizer: Tokenizer | None = None if tokenizer_file is None else load_tokenizer(tokenizer_file)
        self._ids = [
            dict(zip(codes.tolist(), ids.tolist(), strict=True))
            for codes, ids in zip(table.codes, table.token_ids, strict=True)
        ]
        self._texts = [
            dict(zip(codes.tolist(), texts, strict=True)) if texts else {}
            for codes, texts in zip(table.codes, table.texts, strict=True)
        ]
        self._pieces: Pieces | None = self._find_pieces()
        self.places_ids = self._pieces is not None
        self._empty = self._tokenise(()) if self._pieces is None else self._pieces.empty
        if len(self._empty) > self.max_tokens:
            raise UsageError(
                f"prompt {spec.name}: the template alone is {len(self._empty)} tokens long, but the model has room for "
                f"{self.max_tokens}"
            )

    # ---- rendering --------------------------------------------------------------------------------------------------

    def render(self, histories: Sequence[Sequence[Sid]]) -> list[RenderedPrompt]:
        """Prompts of histories, each a list of SIDs (tuples of codes), oldest item first.

        Raises:
            HistoryError: a code for which the model has no token (see :meth:`knows`).
        """
        return [self._render_one(history) for history in histories]

    def render_codes(self, codes: IntArray, offsets: NDArray[np.int64]) -> list[RenderedPrompt]:
        """:meth:`render` for n histories given as arrays, which is faster where ``places_ids``.

        Args:
            codes: [e, L] the SIDs of all histories back to back, -1 after the end of a SID.
            offsets: [n + 1]; history r is ``codes[offsets[r] : offsets[r + 1]]``.
        """
        if self._pieces is not None:
            try:
                placed = self._pieces.place_all(codes, offsets, self.table, self.max_tokens)
                return [RenderedPrompt(ids, dropped) for ids, dropped in placed]
            except KeyError:
                pass  # one by one, so that the message names the SID
        sids = [tuple(code for code in sid if code >= 0) for sid in codes.tolist()]
        return self.render([sids[first:stop] for first, stop in pairwise(offsets.tolist())])

    def encode_ready(self, prompt: str | Sequence[int]) -> IntArray:
        """Token ids of a prompt that is already complete.

        Args:
            prompt: ids, or text, which is tokenised as one piece and gets the model's BOS and end tokens unless it has
                them. An empty prompt stays empty.

        Raises:
            HistoryError: the prompt is too long, is text for a model without tokenizer, or has an id that the model
                does not have.
        """
        if len(prompt) == 0:
            return np.empty(0, np.int32)
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise HistoryError("the prompt is text, but the model has no tokenizer", hint="give token ids")
            ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
            bos, eos = list(self.spec.bos_ids), list(self.spec.eos_ids)
            ids = ids if ids[: len(bos)] == bos else bos + ids
            ids = ids if ids[len(ids) - len(eos) :] == eos else ids + eos
        else:
            ids = [int(token) for token in prompt]
        if min(ids) < 0 or (self._vocab_size is not None and max(ids) >= self._vocab_size):
            bad = next(token for token in ids if token < 0 or token >= (self._vocab_size or token + 1))
            raise HistoryError(f"the prompt holds the token id {bad}, which the model does not have")
        if len(ids) > self.max_tokens:
            raise HistoryError(f"the prompt is {len(ids)} tokens long, but the model has room for {self.max_tokens}")
        return np.asarray(ids, np.int32)

    def knows(self, sid: Sid) -> bool:
        """Whether the model has a token for every code of ``sid``."""
        return len(sid) <= len(self._ids) and all(code in self._ids[level] for level, code in enumerate(sid))

    def shared_prefix(self) -> IntArray:
        """Token ids that every rendered prompt begins with; complete prompts (:meth:`encode_ready`) need not."""
        if self._pieces is not None:
            return np.asarray(self._pieces.shared_prefix(), np.int32)
        fixed = self._template.fixed_head
        ids = self._tokenizer.encode(fixed, add_special_tokens=False).ids if fixed and self._tokenizer else []
        return np.asarray([*self.spec.bos_ids, *ids], np.int32)

    # ---- how --------------------------------------------------------------------------------------------------------

    def _render_one(self, history: Sequence[Sid]) -> RenderedPrompt:
        if not history:
            return RenderedPrompt(np.asarray(self._empty, np.int32), 0)
        try:
            if self._pieces is not None:
                ids, dropped = self._pieces.place(history, self._ids, self.max_tokens)
            else:
                ids, dropped = self._tokenise_fitting(history)
        except (KeyError, IndexError):
            raise self._unknown(history) from None
        return RenderedPrompt(np.asarray(ids, np.int32), dropped)

    def _unknown(self, history: Sequence[Sid]) -> HistoryError:
        sid = next(sid for sid in history if not self.knows(sid))
        level = next((at for at, code in enumerate(sid[: self.table.levels]) if code not in self._ids[at]), None)
        if level is None:
            return HistoryError(f"the SID {sid} has {len(sid)} codes, but the model has {self.table.levels} levels")
        return HistoryError(f"level {level + 1}: the model has no token for {self.table.spell(level, sid[level])}")

    def _tokenise(self, history: Sequence[Sid]) -> list[int]:
        """Ids of the whole rendered text, part by part."""
        if self._tokenizer is None:
            raise UsageError(
                f"prompt {self.spec.name}: contains words, but the model has no tokenizer to read them",
                hint="convert it with `--prompt sids-only`, a T5 with `--prompt tiger`",
            )
        ids = list(self.spec.bos_ids)
        for part in self._template.parts([self._item_text(sid) for sid in history]):
            ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return [*ids, *self.spec.eos_ids]

    def _tokenise_fitting(self, history: Sequence[Sid]) -> tuple[list[int], int]:
        """:meth:`_tokenise` with as few of the oldest items dropped as possible, by bisection."""
        ids = self._tokenise(history)
        if len(ids) <= self.max_tokens:
            return ids, 0
        low, high = 0, len(history) - 1  # items kept
        while low < high:
            middle = (low + high + 1) // 2
            fits = len(self._tokenise(history[-middle:])) <= self.max_tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return self._tokenise(history[len(history) - low :]), len(history) - low

    def _item_text(self, sid: Sid) -> str:
        """The tokens of ``sid`` as text, ``<a_1><b_2>``; KeyError or IndexError if the model has no such token."""
        return "".join([self._texts[level][code] for level, code in enumerate(sid)])

    def _find_pieces(self) -> Pieces | None:
        if not self._template.one_history:
            return None
        if self._tokenizer is None:
            parts = self._template.parts_around_history()
            if any(text for part in parts for text in part) or self._template.join(["", ""]):
                self._tokenise(())  # raises: there is no tokenizer for the words
            return Pieces.of_plain_ids(self.spec.bos_ids, self.spec.eos_ids)
        pieces = Pieces.of_template(self._template, self._tokenizer, self.table, self.spec.bos_ids, self.spec.eos_ids)
        if pieces is None or not prove_pieces(pieces, self._tokenise, self.table, self._ids):
            return None
        return pieces

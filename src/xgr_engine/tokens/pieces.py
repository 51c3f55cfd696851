"""The fixed pieces of a prompt, tokenised once, and the history's ids placed between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.tokens.templates import PromptTemplate

Sid = tuple[int, ...]
IntArray = NDArray[np.int32]

_PROBE_LENGTHS = (1, 2, 3, 7, 33)


@dataclass(frozen=True)
class Pieces:
    """A prompt is the token ids ``head``, the items with ``between`` them, and ``tail``; without items, ``empty``."""

    head: list[int]
    between: list[int]
    tail: list[int]
    empty: list[int]

    @classmethod
    def of_plain_ids(cls, bos_ids: Sequence[int], eos_ids: Sequence[int]) -> Pieces:
        """For models without a tokenizer: nothing but the items."""
        return cls(head=list(bos_ids), between=[], tail=list(eos_ids), empty=[*bos_ids, *eos_ids])

    @classmethod
    def of_template(
        cls,
        template: PromptTemplate,
        tokenizer: Tokenizer,
        table: SidTokenTable,
        bos_ids: Sequence[int],
        eos_ids: Sequence[int],
    ) -> Pieces | None:
        """Tokenise the fixed pieces in place, next to a semantic-ID token. None where they cannot be told apart."""
        if not _tokens_split_text(tokenizer, table):
            return None

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        mark_text, mark = table.texts[0][0], int(table.token_ids[0][0])
        parts = template.parts_around_history()
        at = next(number for number, part in enumerate(parts) if len(part) == 2)
        before, after = parts[at]
        head = encode(before + template.item_prefix + mark_text)
        between = encode(mark_text + template.item_suffix + template.joiner + template.item_prefix + mark_text)
        tail = encode(mark_text + template.item_suffix + after)
        if head[-1:] != [mark] or tail[:1] != [mark] or between[:1] != [mark] or between[-1:] != [mark]:
            return None
        lead = [*bos_ids, *(token for (text,) in parts[:at] for token in encode(text))]
        rest = [*(token for (text,) in parts[at + 1 :] for token in encode(text)), *eos_ids]
        return cls(
            head=lead + head[:-1],
            between=between[1:-1],
            tail=tail[1:] + rest,
            empty=lead + encode(before + after) + rest,
        )

    def place(self, history: Sequence[Sid], ids: Sequence[Mapping[int, int]], max_tokens: int) -> tuple[list[int], int]:
        """The prompt of a history of at least one item, and how many oldest items were dropped to fit.

        Args:
            ids: per level, code -> token id.

        Raises:
            KeyError, IndexError: a code, or a level, is missing from ``ids``.
        """
        between = self.between
        body: list[int] = []
        starts = []  # where each item begins in body
        for sid in history:
            starts.append(len(body))
            for level, code in enumerate(sid):
                body.append(ids[level][code])
            body += between
        end = len(body) - len(between)
        room = max_tokens - len(self.head) - len(self.tail)
        dropped = next((number for number, start in enumerate(starts) if end - start <= room), len(starts))
        if dropped == len(starts):
            return self.empty, dropped
        return self.head + body[starts[dropped] : end] + self.tail, dropped

    def place_all(
        self, codes: IntArray, offsets: NDArray[np.int64], table: SidTokenTable, max_tokens: int
    ) -> list[tuple[IntArray, int]]:
        """:meth:`place` for n histories at once, by array operations.

        Args:
            codes: [e, L] the SIDs of all histories back to back, -1 after the end of a SID.
            offsets: [n + 1]; history r is ``codes[offsets[r] : offsets[r + 1]]``.

        Raises:
            KeyError: a code for which the table has no token.
        """
        items, levels = codes.shape
        inside = codes >= 0
        block = np.empty((items, levels + len(self.between)), np.int32)
        block[:, levels:] = self.between
        for level in range(levels):
            here = np.flatnonzero(inside[:, level])
            known = level < table.levels
            column = table.columns(level, codes[here, level]) if known else np.full(len(here), -1)
            if len(column) and column.min() < 0:
                raise KeyError(level)
            if known:
                block[here, level] = table.token_ids[level][column]
        keep = np.concatenate([inside, np.ones((items, len(self.between)), bool)], axis=1)
        flat = block.reshape(-1) if inside.all() else block[keep]
        start = np.concatenate([[0], np.cumsum(keep.sum(1))])
        head, tail, empty = (np.asarray(part, np.int32) for part in (self.head, self.tail, self.empty))
        room = max_tokens - len(head) - len(tail)
        placed = []
        for first, stop in pairwise(offsets.tolist()):
            end = int(start[stop]) - len(self.between)
            # the first item, by start, from which on everything fits
            kept = first + int(np.searchsorted(start[first:stop], end - room))
            if kept == stop:
                placed.append((empty, stop - first))
            else:
                placed.append((np.concatenate([head, flat[start[kept] : end], tail]), kept - first))
        return placed

    def shared_prefix(self) -> list[int]:
        """What prompts with items and the one without have in common at the beginning."""
        same = 0
        while same < min(len(self.head), len(self.empty)) and self.head[same] == self.empty[same]:
            same += 1
        return self.head[:same]


def prove_pieces(
    pieces: Pieces,
    tokenise: Callable[[Sequence[Sid]], list[int]],
    table: SidTokenTable,
    ids: Sequence[Mapping[int, int]],
) -> bool:
    """Whether placing ids gives what tokenising the whole text gives, for an empty history and for random ones."""
    rng = np.random.default_rng(0)
    if tokenise(()) != pieces.empty:
        return False
    for length in _PROBE_LENGTHS:
        history = [
            tuple(int(rng.choice(table.codes[level])) for level in range(rng.integers(1, table.levels + 1)))
            for _ in range(length)
        ]
        if tokenise(history) != pieces.place(history, ids, max_tokens=1 << 60)[0]:
            return False
    return True


def _tokens_split_text(tokenizer: Tokenizer, table: SidTokenTable) -> bool:
    """Whether all semantic-ID tokens are added tokens with equal settings, which split a text wherever they occur."""
    added = tokenizer.get_added_tokens_decoder()
    kinds = set()
    for level in table.token_ids:
        for token_id in level.tolist():
            token = added.get(token_id)
            if token is None or token.single_word:
                return False
            kinds.add((token.lstrip, token.rstrip, token.normalized))
    return len(kinds) == 1

"""Which model token stands for which code of which level. Read from the tokenizer by ``convert``, never guessed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import InputError


@dataclass(frozen=True)
class SidTokenTable:
    """Per level: the codes that have a token (ascending) and that token's id and text.

    Attributes:
        codes: ``codes[d]`` int32 [C_d], strictly ascending.
        token_ids: ``token_ids[d]`` int32 [C_d].
        texts: ``texts[d]``: the token as the tokenizer spells it, such as ``<a_12>``.
    """

    codes: tuple[NDArray[np.int32], ...]
    token_ids: tuple[NDArray[np.int32], ...]
    texts: tuple[tuple[str, ...], ...]

    @property
    def levels(self) -> int:
        return len(self.codes)

    def columns(self, level: int, codes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Position in ``token_ids[level]`` of each code, -1 where the model has no token for it."""
        known = self.codes[level]
        if len(known) == 0:
            return np.full(len(codes), -1, np.int32)
        at = np.searchsorted(known, codes).clip(max=len(known) - 1)
        return np.where(known[at] == codes, at, -1).astype(np.int32)

    def bind(self, trie: ItemTrie) -> tuple[NDArray[np.int32], ...]:
        """Column of every trie node in its level's head slice: ``[d][n_{d+1}]`` int32.

        Raises:
            InputError: the catalog has more levels than the model, or a code without a token (named).
        """
        if trie.levels > self.levels:
            raise InputError(
                f"the catalog has SIDs of {trie.levels} codes, the model has tokens for {self.levels} levels",
                hint="convert the checkpoint that was trained on this catalog",
            )
        bound = []
        for level, codes in enumerate(trie.codes):
            columns = self.columns(level, codes)
            if len(columns) and columns.min() < 0:
                missing = np.unique(codes[columns < 0])
                shown = ", ".join(str(code) for code in missing[:5])
                raise InputError(
                    f"level {level + 1}: the model has no token for code {shown}"
                    + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
                    why="the catalog holds codes that the tokenizer of this checkpoint does not know",
                    hint="use the catalog the model was trained on, or convert a checkpoint that has these tokens",
                )
            bound.append(columns)
        return tuple(bound)

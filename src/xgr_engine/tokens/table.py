"""Which model token stands for which code of which level: read from the tokenizer by ``convert``, never guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import InputError

_SHOWN = 5  # missing tokens named in a message


class SpelledCatalog(Protocol):
    """A trie and how the catalog spells its tokens, None for bare codes; ``catalog.vocabulary.Vocabulary`` is one."""

    @property
    def trie(self) -> ItemTrie: ...
    @property
    def sid_templates(self) -> tuple[str, ...] | None: ...


@dataclass(frozen=True, eq=False)
class SidTokenTable:
    """Per level: the codes that have a token (ascending) and that token's id and text.

    Attributes:
        codes: ``codes[d]`` int32 [C_d], strictly ascending.
        token_ids: ``token_ids[d]`` int32 [C_d].
        texts: ``texts[d]``: the tokens as the tokenizer spells them, such as ``<a_12>``; empty where the checkpoint has
            no tokenizer and tokens are plain numbers.
        templates: per level, the spelling with ``{}`` for the code, such as ``<a_{}>``; empty where ``texts`` are.
    """

    codes: tuple[NDArray[np.int32], ...]
    token_ids: tuple[NDArray[np.int32], ...]
    texts: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...] = ()

    @classmethod
    def from_levels(
        cls,
        codes: Sequence[Sequence[int] | NDArray[np.int32]],
        token_ids: Sequence[Sequence[int] | NDArray[np.int32]],
        templates: Sequence[str] = (),
    ) -> SidTokenTable:
        """A table whose texts follow from ``templates`` (none: tokens without a spelling)."""
        return cls(
            codes=tuple(np.asarray(level, np.int32) for level in codes),
            token_ids=tuple(np.asarray(level, np.int32) for level in token_ids),
            texts=tuple(
                tuple(template.replace("{}", str(int(code))) for code in level)
                for template, level in zip(templates, codes, strict=True)
            )
            if templates
            else tuple(() for _ in codes),
            templates=tuple(templates),
        )

    def to_json(self) -> list[dict[str, Any]]:
        """One object per level; ``template`` is null where tokens have no spelling."""
        templates: Sequence[str | None] = self.templates or [None] * self.levels
        return [
            {"template": template, "codes": codes.tolist(), "token_ids": ids.tolist()}
            for template, codes, ids in zip(templates, self.codes, self.token_ids, strict=True)
        ]

    @classmethod
    def from_json(cls, levels: Sequence[Mapping[str, Any]]) -> SidTokenTable:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError, KeyError, TypeError: not what ``to_json`` writes; the message says what.
        """
        templates = [level["template"] for level in levels]
        if len({template is None for template in templates}) > 1:
            raise ValueError("some levels have a template and others do not")
        table = cls.from_levels(
            [level["codes"] for level in levels],
            [level["token_ids"] for level in levels],
            templates if templates and templates[0] is not None else (),
        )
        for number, (codes, ids) in enumerate(zip(table.codes, table.token_ids, strict=True), 1):
            if codes.ndim != 1 or codes.shape != ids.shape:
                raise ValueError(f"level {number}: {codes.shape} codes for {ids.shape} token ids")
            if len(codes) == 0 or (np.diff(codes) <= 0).any() or codes[0] < 0 or ids.min() < 0:
                raise ValueError(f"level {number}: codes must be ascending, and neither they nor token ids negative")
        return table

    @property
    def levels(self) -> int:
        return len(self.codes)

    @property
    def max_token_id(self) -> int:
        """The highest token id in use; the embedding must have more rows than that."""
        return max(int(ids.max()) for ids in self.token_ids)

    def columns(self, level: int, codes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Position in ``token_ids[level]`` of each code, -1 where the model has no token for it."""
        known = self.codes[level]
        if len(known) == 0:
            return np.full(len(codes), -1, np.int32)
        at = np.searchsorted(known, codes).clip(max=len(known) - 1)
        return np.where(known[at] == codes, at, -1).astype(np.int32)

    def spell(self, level: int, code: int) -> str:
        """The name of a code's token in messages, whether or not it exists: ``<c_255>``, or ``code 255``."""
        return self.templates[level].replace("{}", str(code)) if self.templates else f"code {code}"

    def bind_catalog(self, catalog: SpelledCatalog) -> tuple[NDArray[np.int32], ...]:
        """:meth:`bind` of a catalog's trie, where the catalog spells its tokens as the model does, or has bare codes.

        Raises:
            InputError: as :meth:`bind`, or a level spelled in another way.
        """
        columns = self.bind(catalog.trie)
        for level, (theirs, ours) in enumerate(zip(catalog.sid_templates or (), self.templates, strict=False), 1):
            if theirs != ours:
                raise InputError(
                    f"level {level}: the catalog's tokens are spelled {theirs}, the model's {ours}",
                    why="codes of another kind of token need not mean the same items",
                    hint="use the catalog the model was trained on; if only the spelling differs, build the vocabulary "
                    "from bare codes, such as [12, 3, 7]",
                )
        return columns

    def bind(self, trie: ItemTrie) -> tuple[NDArray[np.int32], ...]:
        """Column of every trie node in its level's head slice: ``[d][n_{d+1}]`` int32.

        Raises:
            InputError: the catalog has more levels than the model, or a code without a token; the message names it.
        """
        if trie.levels > self.levels:
            raise InputError(
                f"the catalog has SIDs of {trie.levels} codes, but the model has tokens for {self.levels} levels",
                hint="convert the checkpoint that was trained on this catalog"
                + ("" if self.templates else ", with one offset a level in --token-offsets"),
            )
        bound = []
        for level, codes in enumerate(trie.codes):
            columns = self.columns(level, codes)
            if len(columns) and columns.min() < 0:
                missing = np.unique(codes[columns < 0])
                shown = ", ".join(self.spell(level, int(code)) for code in missing[:_SHOWN])
                more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
                raise InputError(
                    f"level {level + 1}: the model has no token for {shown}{more}",
                    why="the catalog holds codes that the tokenizer of this checkpoint does not know"
                    if self.templates
                    else f"with these --token-offsets, the level's codes go from {self.codes[level][0]} to "
                    f"{self.codes[level][-1]}: up to the next higher offset, the end token, or the end of the "
                    "vocabulary",
                    hint="use the catalog the model was trained on, or convert a checkpoint that has these tokens"
                    if self.templates
                    else "use the catalog the model was trained on, or convert it with the right offsets",
                )
            bound.append(columns)
        return tuple(bound)

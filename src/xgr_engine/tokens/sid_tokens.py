"""Find the semantic-ID tokens of a checkpoint: in its tokenizer, or by offsets where it has none.

Spellings that are recognised: ``<a_12>`` and ``<s_a_12>`` (the letter is the level), ``<C0_12>`` (the number is).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import CheckpointError, UsageError
from xgr_engine.tokens.table import SidTokenTable

_NUMBER = r"(0|[1-9]\d{0,8})"
# Name of a spelling -> pattern with the groups level, code; the level is a letter or a number.
_SPELLINGS = {
    "<a_{}>": re.compile(rf"<([a-z])_{_NUMBER}>"),
    "<s_a_{}>": re.compile(rf"<s_([a-z])_{_NUMBER}>"),
    "<C0_{}>": re.compile(rf"<C(\d)_{_NUMBER}>"),
}
_OWN_SPELLING = "name the tokens with --sid-tokens, such as '<a_{}><b_{}><c_{}>'"


def sid_token_table(tokenizer: Tokenizer, template: str | None = None) -> SidTokenTable:
    """Every semantic-ID token that ``tokenizer`` has, whether or not the current catalog uses it.

    Args:
        template: one spelling per level, ``<a_{}><b_{}><c_{}>``; None: the known spellings are tried.

    Raises:
        CheckpointError: there are no such tokens, or tokens of two spellings, or a level is missing between others, or
            the tokenizer encodes a token as something other than its id.
        UsageError: ``template`` cannot be split into levels.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    templates = split_template(template) if template is not None else _find_templates(vocabulary)
    codes, ids = [], []
    for number, level_template in enumerate(templates, 1):
        pattern = re.compile(re.escape(level_template).replace(re.escape("{}"), _NUMBER))
        found = sorted(
            (int(match[1]), token_id)
            for text, token_id in vocabulary.items()
            if (match := pattern.fullmatch(text)) is not None
        )
        if not found:
            raise CheckpointError(
                f"level {number}: the tokenizer has no token spelled {level_template}",
                hint="check the spelling in --sid-tokens" if template is not None else _OWN_SPELLING,
            )
        codes.append([code for code, _ in found])
        ids.append([token_id for _, token_id in found])
    table = SidTokenTable.from_levels(codes, ids, templates)
    _prove_single_ids(tokenizer, table)
    return table


def known_sid_token(tokenizer: Tokenizer) -> str | None:
    """A token of ``tokenizer`` in one of the known spellings, or None."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return min(
        (text for text in vocabulary if any(pattern.fullmatch(text) for pattern in _SPELLINGS.values())), default=None
    )


def offset_token_table(offsets: Sequence[int], vocab_size: int, special: Sequence[int] = ()) -> SidTokenTable:
    """Tokens of a checkpoint without tokenizer: ``token = offset + code``.

    A level's codes reach up to the next higher offset; those of the last level up to the first special token after its
    offset, or the end of the model's vocabulary. So the table says what the model has, and not what the current catalog
    uses.

    Args:
        special: ids that are not codes, such as the end token. Only those after the highest offset count: one before it
            would leave a hole in a level, a sign that the offsets or the token are wrong.

    Raises:
        UsageError: there is no offset, or one outside the model's vocabulary.
    """
    if not offsets:
        raise UsageError("--token-offsets: give one offset a level, such as 2,258,514,770")
    for number, offset in enumerate(offsets, 1):
        if not 0 <= offset < vocab_size:
            raise UsageError(
                f"--token-offsets: level {number} starts at token {offset}, the model has tokens 0 to {vocab_size - 1}"
            )
    last = min((token for token in special if max(offsets) < token < vocab_size), default=vocab_size)
    ends = [min((other for other in offsets if other > offset), default=last) for offset in offsets]
    return SidTokenTable.from_levels(
        [range(end - offset) for offset, end in zip(offsets, ends, strict=True)],
        [range(offset, end) for offset, end in zip(offsets, ends, strict=True)],
    )


def check_level_offsets(offsets: Sequence[int], trie: ItemTrie | None) -> None:
    """Refuses two levels with the same offset, unless the catalog shows that they share no code.

    A token would stand for a code of either level. That is right only where every level has codes of its own (0 to 255,
    256 to 511, ...), so that one offset serves all.

    Args:
        trie: that of the catalog; None if it is not known.

    Raises:
        UsageError: two levels begin at the same token, and share codes or may do so.
    """
    for second, offset in enumerate(offsets):
        first = offsets.index(offset)
        if first == second:
            continue
        shared = None
        if trie is not None:
            if second >= trie.levels:
                continue
            common = np.intersect1d(trie.codes[first], trie.codes[second])
            if not len(common):
                continue
            shared = f": code {int(common[0])} of either is token {offset + int(common[0])}"
        raise UsageError(
            f"--token-offsets: levels {first + 1} and {second + 1} both begin at token {offset}{shared or ''}",
            why="one token would stand for a code of either level"
            if shared
            else "unless the levels share no code, one token would stand for a code of either",
            hint="give each level its own offset, such as 2,258,514,770"
            + ("" if shared else "; if every level has codes of its own, name the catalog with --vocab"),
        )


def split_template(template: str) -> tuple[str, ...]:
    """``<a_{}><b_{}>`` -> (``<a_{}>``, ``<b_{}>``). Levels may also be separated by commas or blanks.

    Raises:
        UsageError: a level without ``{}`` or with several, or two equal ones.
    """
    pieces = [piece for piece in re.split(r"[,\s]+|(?<=>)(?=<)", template) if piece]
    if not pieces or any(piece.count("{}") != 1 for piece in pieces) or len(set(pieces)) != len(pieces):
        raise UsageError(
            f"--sid-tokens {template!r}: needs a different spelling for each level, each with one {{}} for the code",
            hint="such as '<a_{}><b_{}><c_{}>'; if the tokens have no < >, put commas between the levels",
        )
    return tuple(pieces)


def _find_templates(vocabulary: dict[str, int]) -> tuple[str, ...]:
    found: dict[str, set[str]] = {}
    for text in vocabulary:
        for spelling, pattern in _SPELLINGS.items():
            if (match := pattern.fullmatch(text)) is not None:
                found.setdefault(spelling, set()).add(match[1])
    if len(found) != 1:
        listed = " and ".join(found) if found else ", ".join(_SPELLINGS)
        raise CheckpointError(
            f"the tokenizer has semantic-ID tokens of two spellings: {listed}"
            if found
            else "the tokenizer has no semantic-ID tokens",
            why="" if found else f"no token is spelled like {listed}",
            hint=_OWN_SPELLING + ("" if found else ", or convert the checkpoint that was trained on semantic IDs"),
        )
    spelling, levels = next(iter(found.items()))
    first = "0" if spelling.startswith("<C") else "a"
    names = sorted(levels)
    expected = [chr(ord(first) + at) for at in range(len(names))]
    if names != expected:
        raise CheckpointError(
            f"the tokenizer has {spelling} tokens for the levels {', '.join(names)}, "
            f"which are not consecutive from {first}",
            why="which letter stands for which level must not be guessed",
            hint=_OWN_SPELLING,
        )
    old = f"C{first}_" if first == "0" else f"{first}_"
    return tuple(spelling.replace(old, old.replace(first, name)) for name in names)


def _prove_single_ids(tokenizer: Tokenizer, table: SidTokenTable) -> None:
    """Encode every token. One that the tokenizer splits, or takes for another, would give wrong results in silence."""
    for level, texts in enumerate(table.texts):
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        for text, token_id, encoding in zip(texts, table.token_ids[level], encodings, strict=True):
            if encoding.ids != [int(token_id)]:
                raise CheckpointError(
                    f"the token {text} is id {token_id} in the vocabulary, but the tokenizer encodes it as "
                    f"{encoding.ids}",
                    why="a semantic-ID token must be exactly one id, or the model would read something else",
                    hint="add it with tokenizer.add_tokens and save the tokenizer the model was trained with",
                )

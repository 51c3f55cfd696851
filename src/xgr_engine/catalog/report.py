"""What a catalog looks like: counts, collisions, codes used, branching, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.distinct import distinct
from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import UsageError

# Below this share of used codes a level looks collapsed; tiny levels (a digit that tells collisions apart) never do.
_COLLAPSED_SHARE = 0.10
_SMALL_CODEBOOK = 16


@dataclass(frozen=True)
class LevelReport:
    """One level of the trie.

    Attributes:
        codebook_size: as declared, else the largest code + 1.
        codes_used: distinct codes.
        largest_code: the largest code.
        nodes: distinct prefixes that end at this level.
        branching_mean: mean number of children, over the prefixes of the level above that have any.
        branching_max: most children of one prefix.
    """

    codebook_size: int
    codes_used: int
    largest_code: int
    nodes: int
    branching_mean: float
    branching_max: int


@dataclass(frozen=True)
class CollisionReport:
    """SIDs that several items share: how many such SIDs, the items on them, and the most on one."""

    groups: int
    items: int
    largest: int


def level_reports(trie: ItemTrie, codebook: Sequence[int] | None) -> list[LevelReport]:
    """One report per level.

    Args:
        codebook: declared codes a level, or None.

    Raises:
        UsageError: ``codebook`` has another number of levels.
    """
    if codebook is not None and len(codebook) != trie.levels:
        raise UsageError(
            f"--codebook names {len(codebook)} levels, the catalog has {trie.levels}",
            hint="give one size per level, such as 256,256,256",
        )
    reports = []
    for depth, codes in enumerate(trie.codes):
        children = np.diff(trie.child_start[depth])
        inner = children[children > 0]
        largest = int(codes.max(initial=-1))
        reports.append(
            LevelReport(
                codebook_size=codebook[depth] if codebook is not None else largest + 1,
                codes_used=_distinct(codes, largest),
                largest_code=largest,
                nodes=len(codes),
                branching_mean=round(float(inner.mean()), 4) if len(inner) else 0.0,
                branching_max=int(inner.max(initial=0)),
            )
        )
    return reports


def collision_report(trie: ItemTrie) -> CollisionReport:
    """Items that share their SID with others."""
    sizes = np.diff(trie.item_start)
    shared = sizes[sizes > 1]
    return CollisionReport(len(shared), int(shared.sum()), int(sizes.max(initial=0)))


def structure_warnings(trie: ItemTrie, levels: Sequence[LevelReport]) -> list[str]:
    """Signs that the quantiser behind the semantic IDs went wrong."""
    warnings = []
    for number, level in enumerate(levels, 1):
        used, size = level.codes_used, level.codebook_size
        if size >= _SMALL_CODEBOOK and used < _COLLAPSED_SHARE * size:
            warnings.append(
                f"level {number} uses {used} of {size} codes ({used / size:.1%}): the codebook may have collapsed"
            )
        if level.largest_code >= size:
            outside = int(np.count_nonzero(trie.codes[number - 1] >= size))
            warnings.append(
                f"level {number}: {outside} prefixes hold a code outside the codebook of {size} "
                f"(largest {level.largest_code})"
            )
    if trie.levels and trie.num_leaves > 1:
        last = levels[-1]
        if last.codes_used == trie.num_items:
            warnings.append(
                f"level {trie.levels}: every item has a code of its own, so the level holds item numbers, not meaning"
            )
        elif trie.levels > 1 and last.branching_max == 1:
            warnings.append(f"level {trie.levels} decides nothing: no prefix has more than one code at it")
    return warnings


def _distinct(codes: NDArray[np.int32], largest: int) -> int:
    if largest < 4 * len(codes) + 1024:
        return int(np.count_nonzero(np.bincount(codes, minlength=1)))
    return len(distinct(codes))

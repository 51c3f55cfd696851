"""What may be recommended to whom, apart from each user's own exclusions: opened once, before anything is written.

Filters over the catalog (``--where``, ``--allow-items``, ``--deny-items``) choose items for all users: the search gets
the trie of what is left. ``--match`` divides these items by an attribute: the search gets a forest with one tree per
value, and each user's search starts at the root of their tree. Neither costs the search anything: a prefix with no
allowed item under it is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.ids import canonical, plain
from xgr_engine.catalog.trie import ItemForest, build_forest
from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import HistoryError, InputError, UsageError
from xgr_engine.job.filter_options import Diversify, FilterOptions, Match, parse_matches
from xgr_engine.job.input_formats import ListColumn, Rows
from xgr_engine.job.item_files import ItemList, read_item_list
from xgr_engine.job.where import check_attribute, where_mask

IntArray = NDArray[np.int32]
ALLOW, DENY = "--allow-items", "--deny-items"


@dataclass(frozen=True)
class Attribute:
    """The values of one attribute, numbered.

    Attributes:
        values: the canonical text of each distinct value.
        of_item: int32 [items] number of each item's value, -1 where it is null.
    """

    values: pa.Array
    of_item: IntArray

    @classmethod
    def of(cls, option: str, name: str, vocabulary: Vocabulary) -> Attribute:
        """
        Raises:
            UsageError: no such attribute, or one whose values cannot be compared (lists, structs).
        """
        check_attribute(option, name, vocabulary)
        column = vocabulary.columns([name]).column(name)
        try:
            texts = value_texts(column)
        except InputError as error:
            raise UsageError(
                f"{option}: the attribute {name!r} is {column.type}, whose values cannot be compared",
                hint="give the catalog a column with one number or text per item",
            ) from error
        encoded = pc.dictionary_encode(texts)
        numbers = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        return cls(encoded.dictionary, numbers.astype(np.int32))

    def numbers(self, texts: pa.Array) -> IntArray:
        """Number of each text, -1 where it is null or no item has it."""
        found = pc.index_in(texts, value_set=self.values, skip_nulls=True)
        numbers: IntArray = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int32)
        return numbers


def value_texts(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The text by which values of different types are compared: as item ids are, and booleans as true and false.

    Raises:
        InputError: values that have no such text (lists, structs).
    """
    values = plain(values)
    if pa.types.is_boolean(values.type):
        return values.cast(pa.large_string())
    return canonical(values)


def user_texts(column: ListColumn, name: str) -> pa.Array:
    """:func:`value_texts` of a column of the users' files.

    Raises:
        HistoryError: a list, an object or a mixture of these in it.
    """
    try:
        if isinstance(column, list):
            # JSON cells come one by one: a column may hold 5 in one line and "5" in another
            return pa.array([_cell_text(cell) for cell in column], pa.large_string())
        return value_texts(column) if len(column) else pa.array([], pa.large_string())
    except (InputError, pa.ArrowException, TypeError, UnicodeEncodeError) as error:
        raise HistoryError(
            f"column {name!r}: its values cannot be compared with an attribute of the catalog",
            why=error.what if isinstance(error, InputError) else str(error),
            hint="--match needs one number or text per user",
        ) from error


def _cell_text(cell: Any) -> str | None:
    """:func:`value_texts` of one cell. Whole numbers may be larger than any type of Arrow."""
    if cell is None:
        return None
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell)
    text: str | None = value_texts(pa.array([cell]))[0].as_py()
    return text


@dataclass(frozen=True)
class Matcher:
    """``--match``: the trees of the forest, and which one each user's items are in.

    Attributes:
        matches: attribute and user column of each rule.
        attributes: their values.
        tree_of_item: int32 [items], -1 for an item that is in no tree (filtered out, or null in an attribute).
        keys: ascending numbers of the combinations of values that items have; a tree's number is its place in here.
    """

    matches: tuple[Match, ...]
    attributes: tuple[Attribute, ...]
    tree_of_item: IntArray
    keys: NDArray[np.int64]

    @classmethod
    def of(cls, matches: tuple[Match, ...], allowed: NDArray[np.bool_], vocabulary: Vocabulary) -> Matcher:
        """
        Raises:
            UsageError: an attribute that the catalog lacks, or that cannot be compared.
        """
        attributes = tuple(Attribute.of("--match", match.attribute, vocabulary) for match in matches)
        if prod(len(attribute.values) for attribute in attributes) >= 2**63:
            raise UsageError("--match: the attributes have too many combinations of values", hint="match fewer of them")
        key = _combined(attributes, [attribute.of_item for attribute in attributes])
        inside = allowed & (key >= 0)
        keys, numbers = np.unique(key[inside], return_inverse=True)
        tree_of_item = np.full(len(allowed), -1, np.int32)
        tree_of_item[inside] = numbers
        return cls(matches, attributes, tree_of_item, keys)

    @property
    def no_tree(self) -> int:
        """Number of the tree without items, for users whose value no item has."""
        return len(self.keys)

    def trees_of(self, rows: Rows) -> IntArray:
        """[n] tree of each user.

        Raises:
            HistoryError: a user column that cannot be compared.
        """
        texts = [user_texts(rows.lists[match.user_col], match.user_col) for match in self.matches]
        pairs = zip(self.attributes, texts, strict=True)
        key = _combined(self.attributes, [attribute.numbers(text) for attribute, text in pairs])
        at = np.searchsorted(self.keys, key).clip(max=max(0, len(self.keys) - 1))
        known = key >= 0 if len(self.keys) else np.zeros(len(key), np.bool_)
        known[known] = self.keys[at[known]] == key[known]
        return np.where(known, at, self.no_tree).astype(np.int32)

    def forest(self, vocabulary: Vocabulary) -> ItemForest:
        """One tree a combination of values, and the tree without items."""
        rows = np.flatnonzero(self.tree_of_item >= 0).astype(np.int32)
        codes = vocabulary.sids()[0][vocabulary.leaf_of_row[rows]]
        return build_forest(codes, rows, self.tree_of_item[rows], len(self.keys) + 1)


def _combined(attributes: tuple[Attribute, ...], numbers: list[IntArray]) -> NDArray[np.int64]:
    """One number for each combination of values, -1 where one of them is missing."""
    key = np.zeros(len(numbers[0]), np.int64)
    missing = np.zeros(len(numbers[0]), np.bool_)
    for attribute, number in zip(attributes, numbers, strict=True):
        key = key * max(1, len(attribute.values)) + number
        missing |= number < 0
    return np.where(missing, -1, key)


@dataclass(frozen=True)
class ItemFilters:
    """All filters that are in force.

    Attributes:
        vocabulary: the whole catalog.
        allowed: bool [items] left by the filters over the catalog.
        matcher: ``--match``.
        cap: ``--diversify``.
        capped: its attribute.
        digests: option -> digest of the contents of its files, for the fingerprint.
        counts: items before and after each filter, for the manifest.
        notes: what to tell the user.
    """

    vocabulary: Vocabulary
    allowed: NDArray[np.bool_]
    matcher: Matcher | None = None
    cap: Diversify | None = None
    capped: Attribute | None = None
    digests: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def of_catalog(self) -> bool:
        """Whether a filter over the catalog is in force."""
        return "allowed" in self.counts

    @cached_property
    def searched(self) -> Vocabulary:
        """The catalog as the search sees it: with the trie, or the forest, of the allowed items.

        Only ``trie`` differs; leaves are numbered anew in it.
        """
        if self.matcher is not None:
            return replace(self.vocabulary, trie=self.matcher.forest(self.vocabulary))
        if self.of_catalog:
            return replace(self.vocabulary, trie=self.vocabulary.trie.restrict(self.allowed))
        return self.vocabulary


def open_filters(options: FilterOptions, match: tuple[str, ...], vocabulary: Vocabulary) -> ItemFilters:
    """Reads attributes and item files, and computes what is left of the catalog.

    Raises:
        UsageError: an expression or attribute that the catalog cannot answer, or nothing is left.
        InputError: an item file that is unreadable or empty.
    """
    files = {ALLOW: options.allow_items, DENY: options.deny_items}
    listed = {
        option: read_item_list(option, paths, options.items_col, vocabulary) for option, paths in files.items() if paths
    }
    return make_filters(options.where, listed, parse_matches(match), options.cap, vocabulary)


def make_filters(
    where: str | None,
    listed: Mapping[str, ItemList],
    matches: tuple[Match, ...],
    cap: Diversify | None,
    vocabulary: Vocabulary,
) -> ItemFilters:
    """What is left of the catalog.

    Args:
        listed: ``ALLOW`` and ``DENY`` -> the items that are named there.

    Raises:
        UsageError: an expression or attribute that the catalog cannot answer, or nothing is left.
    """
    allowed = np.ones(vocabulary.num_items, np.bool_)
    digests: dict[str, str] = {}
    counts: Counter[str] = Counter(items=vocabulary.num_items)
    if where is not None:
        allowed &= where_mask(where, vocabulary)
        counts["where"] = int(allowed.sum())
        _check_left("--where", allowed)
    for option, items in listed.items():
        name = option.strip("-").replace("-", "_")
        digests[f"contents of {option}"] = items.sha256
        counts[f"{name}_ids"], counts[f"{name}_unknown"] = items.ids, items.unknown
        mask = np.zeros(vocabulary.num_items, np.bool_)
        mask[items.rows] = True
        allowed &= mask if option == ALLOW else ~mask
        counts[name] = int(allowed.sum())
        _check_left(option, allowed)
    if where is not None or listed:
        counts["allowed"] = int(allowed.sum())
    matcher = Matcher.of(matches, allowed, vocabulary) if matches else None
    if matcher is not None:
        counts["match_values"] = len(matcher.keys)
        counts["match_items"] = int((matcher.tree_of_item >= 0).sum())
        _check_left("--match", matcher.tree_of_item >= 0)
    capped = None if cap is None else Attribute.of("--diversify", cap.attribute, vocabulary)
    return ItemFilters(vocabulary, allowed, matcher, cap, capped, digests, dict(counts), unknown_ids(listed))


def unknown_ids(listed: Mapping[str, ItemList]) -> tuple[str, ...]:
    """A note for each option with ids that are not in the catalog."""
    return tuple(
        f"{option}: {items.unknown} of {items.ids} ids are not in the catalog, such as {', '.join(items.examples)}"
        for option, items in listed.items()
        if items.unknown
    )


def _check_left(option: str, allowed: NDArray[np.bool_]) -> None:
    if not allowed.any():
        raise UsageError(
            f"{option} leaves none of the catalog's {len(allowed)} items",
            why="every user would get an empty list",
            hint="check the filter against the attributes that `xgr inspect` shows",
        )

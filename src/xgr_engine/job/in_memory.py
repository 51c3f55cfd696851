"""What a caller in Python has in memory, in the forms of the job: rows of users, and lists of items."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from xgr_engine.catalog.ids import canonical
from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import UsageError
from xgr_engine.job.filter_options import FilterOptions, Match
from xgr_engine.job.filters import ALLOW, DENY, ItemFilters, make_filters, unknown_ids
from xgr_engine.job.input_formats import ListColumn, Rows
from xgr_engine.job.item_files import ItemList
from xgr_engine.job.lists import read_lists

HISTORY, EXCLUDE = "history", "exclude"


def user_rows(
    histories: Sequence[Any],
    exclude: Sequence[Any] | None,
    match: Mapping[str, Sequence[Any]] | None,
    *,
    texts: bool,
) -> Rows:
    """Histories and each user's rules as rows with the columns ``HISTORY``, ``EXCLUDE`` and those of :func:`matches`.

    Args:
        texts: a history may be a text (a ready prompt).

    Raises:
        UsageError: not a sequence with an entry a user.
    """
    _check_sequence("histories", histories)
    columns: dict[str, ListColumn] = {HISTORY: _cells("histories", histories, texts=texts)}
    if exclude is not None:
        _check_users("exclude", exclude, "lists", len(histories))
        columns[EXCLUDE] = _cells("exclude", exclude, texts=False)
    for rule, values in zip(matches(match), (match or {}).values(), strict=True):
        _check_users(rule.user_col, values, "values", len(histories))
        columns[rule.user_col] = _texts_checked(rule.user_col, _plain(values))
    return Rows(pa.table({"user": np.arange(len(histories))}), columns, len(histories))


def matches(match: Mapping[str, Sequence[Any]] | None) -> tuple[Match, ...]:
    """A rule for each attribute; its user column is called as the caller would index it.

    Raises:
        UsageError: no mapping.
    """
    if match is None:
        return ()
    if not isinstance(match, Mapping):
        raise UsageError(
            f"match is a {type(match).__name__}, not a mapping from attributes to one value per user",
            hint='for example match={"country": ["AT", "DE"]} for two users',
        )
    return tuple(Match(str(attribute), f"match[{attribute!r}]") for attribute in match)


class FiltersInMemory:
    """The filters of the last call, so that equal ones are not computed again.

    Args:
        vocabulary: the catalog.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._last: tuple[object, ItemFilters] | None = None

    def open(
        self,
        where: str | None,
        allow_items: Sequence[Any] | None,
        deny_items: Sequence[Any] | None,
        rules: tuple[Match, ...],
        diversify: str | None,
    ) -> tuple[ItemFilters, bool]:
        """What is left of the catalog, and whether it was computed now.

        Raises:
            UsageError: an expression or attribute that the catalog cannot answer, no list of ids, or nothing is left.
        """
        options = FilterOptions(where=where, diversify=diversify)
        given = {ALLOW: ("allow_items", allow_items), DENY: ("deny_items", deny_items)}
        listed = {
            option: _item_list(name, ids, self._vocabulary) for option, (name, ids) in given.items() if ids is not None
        }
        key = (where, tuple((option, items.sha256) for option, items in listed.items()), rules, options.cap)
        if self._last is not None and self._last[0] == key:
            # other ids may name the same items, and be unknown in their own way
            return replace(self._last[1], notes=unknown_ids(listed)), False
        filters = make_filters(where, listed, rules, options.cap, self._vocabulary)
        self._last = (key, filters)
        return filters, True


def _item_list(name: str, ids: Sequence[Any], vocabulary: Vocabulary) -> ItemList:
    _check_sequence(name, ids)
    lists = read_lists([_texts_checked(name, _plain(ids))], name, None)
    if lists.faults:
        raise UsageError(f"{name}: {lists.faults[0][1].removeprefix(f'{name}: ')}", hint="give a list of item ids")
    items = ItemList.of(canonical(lists.values), "", vocabulary)
    return replace(items, sha256=hashlib.sha256(items.rows.tobytes()).hexdigest())


def _check_users(name: str, given: Any, what: str, users: int) -> None:
    _check_sequence(name, given)
    if len(given) != users:
        raise UsageError(f"{name} has {len(given)} {what} for {users} histories")


def _check_sequence(name: str, given: Any) -> None:
    """Raises UsageError unless ``given`` has a length and an order."""
    usable = hasattr(given, "__len__") and hasattr(given, "__iter__") and getattr(given, "ndim", 1) > 0
    if isinstance(given, str | bytes | Mapping) or not usable:
        raise UsageError(
            f"{name} is {'None' if given is None else f'a {type(given).__name__}'}, not a sequence",
            hint=f"give a list; for a generator, list({name})",
        )


def _cells(name: str, given: Any, *, texts: bool) -> list[Any]:
    cells = []
    for number, cell in enumerate(given):
        if isinstance(cell, str | bytes) and not (texts and isinstance(cell, str)):
            hint = 'give one list of ids per user; a ready prompt is text with history_format="prompt"'
            raise UsageError(f"{name}[{number}] is text, not a list", hint=hint)
        try:
            cells.append(_texts_checked(f"{name}[{number}]", cell if isinstance(cell, str) else _plain(cell)))
        except TypeError:
            raise UsageError(
                f"{name}[{number}] is a {type(cell).__name__}, not a list", hint="give one list of ids per user"
            ) from None
    return cells


def _texts_checked(name: str, cell: Any) -> Any:
    """``cell`` itself.

    Raises:
        UsageError: a text in it is no Unicode text, which happens to what was decoded with ``surrogateescape``.
    """
    for value in [cell] if isinstance(cell, str) else cell or ():
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"{name}: {value[:60]!a} is not valid text", why="half of a surrogate pair is not a character"
                ) from None
    return cell


def _plain(cell: Any) -> Any:
    """numpy arrays, pyarrow lists and other sequences as Python lists."""
    if cell is None or isinstance(cell, list):
        return cell
    if isinstance(cell, pa.Scalar):
        cell = cell.as_py()
        return cell if cell is None else list(cell)
    if hasattr(cell, "tolist"):
        return list(cell.tolist())
    return [value.as_py() if isinstance(value, pa.Scalar) else value for value in cell]

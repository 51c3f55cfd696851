"""Options that say which items may be recommended: filters over the catalog, rules per user, a cap per value."""

from __future__ import annotations

from dataclasses import dataclass

from xgr_engine.errors import UsageError
from xgr_engine.options import check_types

_MOST_DIGITS = 18


@dataclass(frozen=True)
class Match:
    """An item's ``attribute`` must equal the user's ``user_col``."""

    attribute: str
    user_col: str


@dataclass(frozen=True)
class Diversify:
    """At most ``most`` items of one value of ``attribute`` in a list."""

    attribute: str
    most: int


def parse_match(text: str) -> Match:
    """``country`` -> items whose country is the user's country; ``country=user_country`` names the user's column.

    Raises:
        UsageError: a name is missing.
    """
    attribute, equals, user_col = (part.strip() for part in text.partition("="))
    if not attribute or (equals and not user_col):
        raise UsageError(
            f"--match {text!r}: must be an attribute, or attribute=user-column",
            hint="for example --match country, or --match country=user_country",
        )
    return Match(attribute, user_col or attribute)


def parse_diversify(text: str) -> Diversify:
    """``brand=2`` -> at most two items of one brand.

    Raises:
        UsageError: no attribute, or no whole number from 1.
    """
    attribute, _, most = (part.strip() for part in text.rpartition("="))
    if not attribute or not most.isdecimal() or len(most) > _MOST_DIGITS or int(most) < 1:
        raise UsageError(
            f"--diversify {text!r}: must be attribute=max, with max a whole number from 1",
            hint="for example brand=2",
        )
    return Diversify(attribute, int(most))


def parse_matches(texts: tuple[str, ...]) -> tuple[Match, ...]:
    """Each of them parsed.

    Raises:
        UsageError: one is wrong, or two name the same attribute.
    """
    matches = tuple(parse_match(text) for text in texts)
    attributes = [match.attribute for match in matches]
    for attribute in attributes:
        if attributes.count(attribute) > 1:
            raise UsageError(f"--match names the attribute {attribute!r} twice", why="an item has one value of it")
    return matches


@dataclass(frozen=True)
class FilterOptions:
    """Which items of the catalog may be recommended at all, and how alike the items of a list may be.

    Attributes:
        where: SQL expression over catalog attributes, one boolean an item; null is false.
        allow_items: files of item ids: only these; deny_items: never these.
        items_col: the id column of such a file, where it is a table.
        diversify: ``attribute=max``: at most so many items of one value in a list.
    """

    where: str | None = None
    allow_items: tuple[str, ...] = ()
    deny_items: tuple[str, ...] = ()
    items_col: str = "item_id"
    diversify: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.where is not None and not self.where.strip():
            raise UsageError("--where is empty", hint="for example --where \"category = 'books' and in_stock\"")
        if self.diversify is not None:
            parse_diversify(self.diversify)

    @property
    def cap(self) -> Diversify | None:
        """``diversify``, parsed."""
        return None if self.diversify is None else parse_diversify(self.diversify)

"""Fields of a benchmark's record, read with the type that they must have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


class FieldError(ValueError):
    """A field is missing, or holds something else. The text names it."""


@dataclass(frozen=True)
class Field:
    """What stands at ``place`` of a record, such as ``rows[0].model``. Every reader raises FieldError."""

    value: Any
    place: str = ""

    def at(self, *names: str) -> Field:
        """The field under these names, one inside the other."""
        field = self
        for name in names:
            place = f"{field.place}.{name}" if field.place else name
            if not isinstance(field.value, dict):
                raise FieldError(f"{field.place or 'the record'} must be an object")
            if name not in field.value:
                raise FieldError(f"{place} is missing")
            field = Field(field.value[name], place)
        return field

    def has(self, name: str) -> bool:
        """Whether a field of that name is there and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def entries(self) -> list[Field]:
        """The entries of a list."""
        if not isinstance(self.value, list):
            raise self._wrong("a list")
        return [Field(entry, f"{self.place}[{at}]") for at, entry in enumerate(self.value)]

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self._wrong("a text")
        return self.value

    def whole(self) -> int:
        """An integer; true and false are none."""
        if type(self.value) is not int:
            raise self._wrong("a whole number")
        return self.value

    def number(self) -> float | None:
        """A number from 0 on; None for null, NaN and infinities."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self._wrong("a number")
        try:
            number = float(self.value)
        except OverflowError as error:
            raise FieldError(f"{self.place} is too large a number") from error
        if number < 0:
            raise self._wrong("a number from 0 on")
        return number if math.isfinite(number) else None

    def _wrong(self, wanted: str) -> FieldError:
        found = "null" if self.value is None else repr(self.value)
        return FieldError(f"{self.place} must be {wanted}, not {found if len(found) < 40 else found[:36] + ' ...'}")

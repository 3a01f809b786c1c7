"""Typed reading of the fields of a model's `config.json`: a value is the right type and in range, or named in an error.

Called by `hf_config`, `hf_rope` and the families. Pure; a reader owns nothing but a reference to the mapping it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from quire.errors import ModelError, nearest


class FieldReader:
    """Reads the fields of one JSON object; an absent field and a null are the same thing.

    Args:
        raw: the object.
        source: what error messages call it, as in "config.json".

    Raises:
        ModelError: from every method, for a missing field, a wrong type or a value out of range.
    """

    def __init__(self, raw: Mapping[str, object], source: str = "config.json") -> None:
        self.raw = raw
        self.source = source

    def has(self, name: str) -> bool:
        """True when the field is there and not null."""
        return self.raw.get(name) is not None

    def error(self, name: str, problem: str, hint: str) -> ModelError:
        """An error about field `name`."""
        return ModelError(f"{self.source}: {name} {problem}", hint=hint, field=name)

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high], or None when absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, value, "an integer")
        if not low <= value <= high:
            raise self._out_of_range(name, value, low, high)
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; required unless `default` is given."""
        value = self.optional_integer(name, low, high)
        if value is None:
            value = default
        if value is None:
            raise self._missing(name, f"an integer from {low} to {high}")
        return value

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        """A finite number in [low, high], or None when absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong_type(name, value, "a number")
        if not low <= value <= high:
            raise self._out_of_range(name, value, low, high)
        return float(value)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; required unless `default` is given."""
        value = self.optional_number(name, low, high)
        if value is None:
            value = default
        if value is None:
            raise self._missing(name, f"a number from {low:g} to {high:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong_type(name, value, "true or false")
        return value

    def text(self, name: str, choices: Collection[str], default: str) -> str:
        """A string, one of `choices`."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong_type(name, value, "a string")
        if value not in choices:
            close = nearest(value, choices)
            known = ", ".join(sorted(choices))
            raise self.error(
                name,
                f"is {value[:80]!r}, which is not a known value",
                f"did you mean {close!r}? known: {known}" if close else f"known: {known}",
            )
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong_type(name, value, "a list of strings")
        return tuple(value)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """An integer or a list of integers, each in [low, high]; empty when absent."""
        value = self.raw.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self._wrong_type(name, value, "an integer or a list of integers")
            if not low <= item <= high:
                raise self._out_of_range(name, item, low, high)
        return tuple(items)

    def numbers(self, name: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """A list of `count` numbers, each in [low, high]."""
        value = self.raw.get(name)
        if value is None:
            raise self._missing(name, f"a list of {count} numbers")
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong_type(name, value, f"a list of {count} numbers")
        return tuple(FieldReader({name: item}, self.source).number(name, low, high) for item in value)

    def optional_object(self, name: str) -> FieldReader | None:
        """A reader of a nested object, or None when absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong_type(name, value, "an object")
        return FieldReader(value, f"{self.source}: {name}")

    def _missing(self, name: str, expected: str) -> ModelError:
        return self.error(name, "is missing", f"add it: {expected}, as the model was trained with")

    def _wrong_type(self, name: str, value: object, expected: str) -> ModelError:
        return self.error(name, f"is {_shown(value)}", f"it must be {expected}")

    def _out_of_range(self, name: str, value: float, low: float, high: float) -> ModelError:
        return self.error(name, f"is {_shown(value)}", f"it must be from {low:g} to {high:g}")


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"

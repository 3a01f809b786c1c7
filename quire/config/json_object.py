"""Settings whose value is a JSON object: `parse_object` reads one, `errors_of` names the setting in what its parts say.

Used by `config` and by what reads such a setting again. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from quire.errors import ConfigError, QuireError, unknown_name
from quire.utils.checks import shown


def parse_object(
    name: str, text: str | None, known: Collection[str] | None = None, *, example: str = ""
) -> dict[str, Any]:
    """The object in the JSON `text` of setting `name`, {} for none; its keys are among `known`.

    Args:
        known: None = any key is.
        example: of such an object, for the hint.

    Raises:
        ConfigError: it is no object, or a key is unknown.
    """
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        hint = f"for example {example}" if example else 'write {"key": value}'
        raise ConfigError(f"{name}={shown(text)} is not a JSON object", hint=hint, field=name)
    for key in values if known is not None else ():
        if key not in (known or ()):
            raise unknown_name(f"key of {name}", key, known or (), field=name)
    return values


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """What is wrong with a key within is a `ConfigError` about setting `name`."""
    try:
        yield
    except QuireError as error:
        raise ConfigError(f"{name}: {error.message}", hint=error.hint, field=name) from None

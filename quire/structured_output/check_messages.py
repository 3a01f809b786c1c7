"""What crosses between a server and the process that checks large schemas: length-prefixed msgpack. Values only."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.core.wire import ErrorInfo


class CheckSetup(msgspec.Struct, frozen=True):
    """The engine's settings."""

    config: StructuredOutputsConfig


class CheckRequest(msgspec.Struct, frozen=True):
    """The fields of a `StructuredOutputsParams`, which the process makes itself, as that looks at all of them."""

    fields: dict[str, Any]


class CheckResult(msgspec.Struct, frozen=True):
    """The form with its library, or why there is none."""

    resolved: StructuredOutputsParams | None = None
    error: ErrorInfo | None = None

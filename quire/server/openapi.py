"""ApiDescription: what /openapi.json says of the routes, from the structs that their bodies are read into.

Filled by `app.make_app`; the document is made once, when it is first asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from quire.version import __version__

REF_TEMPLATE = "#/components/schemas/{name}"
ANSWERED = {"200": {"description": "Response"}}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        body: the struct of its JSON body; None = it has none.
    """

    path: str
    method: str
    summary: str
    body: type | None


class ApiDescription:
    """The routes of a server, in OpenAPI 3.1."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []

    def add(self, path: str, method: str, route: Callable[..., Any], body: type | None) -> None:
        """Describe a route by its docstring."""
        summary = (route.__doc__ or "").strip().partition("\n")[0]
        self._operations.append(Operation(path, method, summary, body))

    @cached_property
    def document(self) -> dict[str, Any]:
        """The whole description."""
        bodies = [one.body for one in self._operations if one.body is not None]
        schemas, components = msgspec.json.schema_components(bodies, ref_template=REF_TEMPLATE)
        schema_of = dict(zip(bodies, schemas, strict=True))
        paths: dict[str, dict[str, Any]] = {}
        for one in self._operations:
            path = re.sub(r"{(\w+):\w+}", r"{\1}", one.path)
            described: dict[str, Any] = {
                "summary": one.summary, "operationId": f"{one.method} {path}", "responses": ANSWERED,
            }  # fmt: skip
            names = re.findall(r"{(\w+)}", path)
            if names:
                described["parameters"] = [_parameter(name) for name in names]
            if one.body is not None:
                content = {"application/json": {"schema": schema_of[one.body]}}
                described["requestBody"] = {"required": True, "content": content}
            paths.setdefault(path, {})[one.method.lower()] = described
        return {
            "openapi": "3.1.0", "info": {"title": "Quire", "version": __version__}, "paths": paths,
            "components": {"schemas": components},
        }  # fmt: skip


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}

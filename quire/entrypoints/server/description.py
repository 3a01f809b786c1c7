"""What /openapi.json says of the API. Pure functions; the schemas are those of the requests' structs."""

from __future__ import annotations

import re
from typing import Any

import msgspec

REFERENCE = "#/components/schemas/{name}"


def request_body(body: type) -> dict[str, Any]:
    """The request body of a route."""
    schema = {"$ref": REFERENCE.format(name=body.__name__)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def schemas_of(bodies: list[type]) -> dict[str, Any]:
    """The schemas of requests and of their parts, by name."""
    return msgspec.json.schema_components(bodies, ref_template=REFERENCE)[1]


def path_parameters(path: str) -> list[dict[str, Any]]:
    """The parameters in a path."""
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", path)
    ]

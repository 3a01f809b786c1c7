"""What of a JSON Schema a grammar library honours, by what it declares (`Capabilities`).

Called when a request comes, to choose a library or to refuse the schema by the path of the keyword. Pure functions.
Annotations, which forbid nothing, pass everywhere.
"""

from __future__ import annotations

from typing import Any

from quire.structured_output.capabilities import Capabilities, Problem, Subschema
from quire.structured_output.schema.keywords import BY_TYPE, FORMATS, KEYWORDS, escaped, subschemas, types_of
from quire.structured_output.schema.references import find_cycle
from quire.structured_output.schema.regex import pattern_problem


def find_problem(schema: Any, library: Capabilities) -> Problem | None:
    """The first thing in `schema` that `library` would not honour; None when it honours all of it."""
    if not library.has_recursion and (reference := find_cycle(schema)) is not None:
        return Problem("/$ref", f"a circular reference ({reference[:80]}) is not supported")
    for place in subschemas(schema):
        problem = _check(place, library)
        if problem is None and library.check_subschema is not None:
            problem = library.check_subschema(place, schema)
        if problem is not None:
            return problem
    return None


def formats_of(schema: Any) -> set[str]:
    """Values of `format`, anywhere in a schema of right form."""
    found = (place.schema.get("format") for place in subschemas(schema) if isinstance(place.schema, dict))
    return {one for one in found if isinstance(one, str)}


def _check(place: Subschema, library: Capabilities) -> Problem | None:
    schema, path = place.schema, place.path
    if isinstance(schema, bool):
        if schema or place.parent in ("additionalProperties", "items", "unevaluatedProperties", "unevaluatedItems"):
            return None
        return None if library.combines_keywords else Problem(path, "false is not supported here")
    asserted = {one for one in schema if one in KEYWORDS and not _is_idle(one, schema[one])}
    for keyword in schema:
        if keyword == "$id" and not path:  # a name for the whole, to which references within it do not look
            continue
        if keyword in asserted and keyword not in library.keywords:
            return Problem(f"{path}/{escaped(keyword)}", f"{keyword} is not supported")
    found = _check_values(schema, asserted, library)
    if found is None and not library.combines_keywords:
        found = _check_siblings({**_meant(place), **schema}, asserted, library)
    return None if found is None else Problem(path + found.path, found.reason)


def _meant(place: Subschema) -> dict[str, Any]:
    """What the place of a schema says about it."""
    return {"type": "string"} if place.parent == "propertyNames" else {}


def _is_idle(keyword: str, value: Any) -> bool:
    """Whether the keyword forbids nothing with this value."""
    if keyword == "uniqueItems":
        return value is False
    if keyword in ("minItems", "minLength", "minProperties"):
        return bool(value == 0)
    if keyword in ("required", "dependentRequired", "dependentSchemas", "dependencies", "patternProperties"):
        return not value
    return keyword in ("unevaluatedItems", "unevaluatedProperties") and value is True


def _check_values(schema: dict[str, Any], asserted: set[str], library: Capabilities) -> Problem | None:
    """Values of keywords that a library does not honour."""
    if "pattern" in asserted and (reason := pattern_problem(schema["pattern"], library)) is not None:
        return Problem("/pattern", reason)
    if "format" in asserted and schema["format"] not in FORMATS:
        return Problem("/format", f"the format {schema['format'][:40]!r} is not supported")
    if "$ref" in asserted and not _is_honoured(schema["$ref"], library):
        return Problem("/$ref", "only references within the schema (#/...) are supported")
    if "minProperties" in asserted and not _is_closed(schema) and schema["minProperties"] > _num_required(schema):
        return Problem("/minProperties", "minProperties is not supported where additional property names may repeat")
    for keyword in ("patternProperties",):
        for pattern in schema.get(keyword, ()) if keyword in asserted else ():
            if (reason := pattern_problem(pattern, library)) is not None:
                return Problem(f"/{keyword}/{escaped(pattern)}", reason)
    return None


def _is_honoured(reference: str, library: Capabilities) -> bool:
    """Whether a reference is one within the schema, of a kind that `library` follows."""
    return reference == "#" or reference.startswith("#" if "$anchor" in library.keywords else "#/")


def _is_closed(schema: dict[str, Any]) -> bool:
    closed = schema.get("additionalProperties") is False or schema.get("unevaluatedProperties") is False
    return closed and not schema.get("patternProperties")


def _num_required(schema: dict[str, Any]) -> int:
    return len(set(schema.get("required", ())))


def _check_siblings(schema: dict[str, Any], asserted: set[str], library: Capabilities) -> Problem | None:
    """Keywords that a library honours only by themselves."""
    for alone in ("$ref", "const", "enum", "anyOf", "allOf"):
        if alone not in asserted:
            continue
        others = asserted - {alone}
        if alone in ("const", "enum") and others == {"type"}:
            values = schema["enum"] if alone == "enum" else [schema["const"]]
            if all(_has_type(value, schema["type"]) for value in values):
                return None
            return Problem(f"/{alone}", f"{alone} has a value of another type")
        if others:
            return Problem(f"/{escaped(alone)}", f"{alone} is supported only without {', '.join(sorted(others))}")
        if alone == "allOf" and len(schema["allOf"]) > 1:
            return Problem("/allOf", "allOf with several schemas is not supported")
        return None
    return _check_typed(schema, asserted, library)


def _check_typed(schema: dict[str, Any], asserted: set[str], library: Capabilities) -> Problem | None:
    types = set(types_of(schema))
    for kind, keywords in BY_TYPE.items():
        is_meant = bool(types & ({"number", "integer"} if kind == "number" else {kind}))
        for keyword in asserted & keywords:
            if not is_meant:
                return Problem(f"/{keyword}", f"{keyword} is supported only with the matching type")
    if "required" in asserted and not set(schema["required"]) <= set(schema.get("properties", ())):
        return Problem("/required", "a required property is not declared in properties")
    if "pattern" in asserted and asserted & {"minLength", "maxLength", "format"}:
        return Problem("/pattern", "pattern is supported only without minLength, maxLength and format")
    if "format" in asserted and asserted & {"minLength", "maxLength"}:
        return Problem("/format", "format is supported only without minLength and maxLength")
    if "items" in asserted and isinstance(schema["items"], list):
        return Problem("/items", "a list of schemas is supported only as prefixItems")
    for keyword in ("unevaluatedItems", "unevaluatedProperties"):
        if keyword in asserted and schema[keyword] is not False:
            return Problem(f"/{keyword}", f"{keyword} is supported only with false")
    if "propertyNames" in asserted and asserted & {"properties", "minProperties", "maxProperties"}:
        return Problem("/propertyNames", "propertyNames is supported only without properties")
    extra = schema.get("additionalProperties")
    if not library.has_open_properties and "properties" in asserted and extra not in (None, False):
        return Problem(
            "/additionalProperties", "additionalProperties together with properties is supported only as false"
        )
    return None


def _has_type(value: Any, types: str | list[str]) -> bool:
    """Whether a JSON value has one of `types`."""
    names = {
        bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",),
        dict: ("object",), type(None): ("null",),
    }[type(value)]  # fmt: skip
    return not set(names).isdisjoint([types] if isinstance(types, str) else types)

"""Random JSON schemas over the keywords of all drafts, and values that are nearly valid."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from quire.structured_output.schema.keywords import ANNOTATIONS, KEYWORDS, LISTS, MAPS, ONES
from tests.structured.keyword_cases import CASES

NAMES = ("a", "b", "key", "long name", 'q"uote', "é")
WORDS = ("x", "red", "two words", "", "ü", 'quo"te', "back\\slash")
PATTERNS = ("^[a-c]{1,4}$", "^\\d{3}-\\d{2}$", "^(x|yy)z?$", "^.{2,5}$", "^\\w+@\\w{2,3}$", "^[^x]{1,3}$", "b{1,2}")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration", "json-pointer")
NOTES: dict[str, Any] = {
    "title": "a", "description": "b", "$comment": "c", "default": None, "examples": ["d"], "x-note": [],
    "deprecated": True,
    "readOnly": True, "writeOnly": False, "contentEncoding": "base64", "contentMediaType": "text/plain",
    "contentSchema": {"type": "null"}, "example": "e", "$schema": "https://json-schema.org/draft/2020-12/schema",
}  # fmt: skip
# Forms that only older drafts know, and keywords that are not among the cases; all are to be refused.
ELSEWHERE: dict[str, list[Any]] = {
    "exclusiveMinimum of draft 4": [{"type": "integer", "minimum": 3, "exclusiveMinimum": True}],
    "id": [{"id": "x", "type": "integer"}],
    "divisibleBy": [{"type": "integer", "divisibleBy": 3}],
    "disallow": [{"disallow": "string"}],
    "extends": [{"type": "object", "extends": {"required": ["a"]}}],
    "required of draft 3": [{"type": "object", "properties": {"a": {"type": "null", "required": True}}}],
    "$recursiveRef": [{"type": "array", "items": {"$recursiveRef": "#"}, "$recursiveAnchor": True}],
    "$recursiveAnchor": [{"$recursiveAnchor": True, "type": "null"}],
    "$dynamicAnchor": [{"$dynamicAnchor": "x", "type": "null"}],
    "$id": [{"type": "array", "items": {"$id": "http://a.example/b", "type": "null"}}],
    "$vocabulary": [{"$vocabulary": {"http://a.example": True}, "type": "null"}],
    "then": [{"type": "object", "if": {"required": ["a"]}, "then": {"maxProperties": 1}, "else": False}],
    "else": [{"if": {"type": "string"}, "else": {"type": "integer"}}],
    "nullable": [{"type": "string", "maxLength": 2, "nullable": True}],
    "a word that is no keyword": [{"type": "string", "maxLenght": 3}],
}  # fmt: skip
ABOUT: dict[str, list[Any]] = {name: [schema for schema, _, _ in cases] for name, cases in CASES.items()} | ELSEWHERE


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose answers are short: texts, lists and numbers have bounds."""
    makers = [_string, _integer, _number, _plain, _enum]
    if depth > 0:
        makers += [_object, _object, _array, _array, _choice, _combined, _reference]
    schema: dict[str, Any] = rng.choice(makers)(rng, depth - 1)
    if rng.random() < 0.15:
        keyword = rng.choice(list(NOTES))
        schema[keyword] = NOTES[keyword]
    return schema


def schema_about(keyword: str, rng: random.Random) -> dict[str, Any]:
    """A schema in which `keyword` (of `ABOUT`) is somewhere."""
    about = copy.deepcopy(rng.choice(ABOUT[keyword]))
    place = rng.randrange(5)
    # Its references are to its own root.
    if place == 0 or not isinstance(about, dict) or "$ref" in json.dumps(about) or "$dynamicRef" in json.dumps(about):
        return about if isinstance(about, dict) else {"anyOf": [about]}
    if place == 1:
        return {"type": "object", "properties": {"v": about, "w": random_schema(rng, 0)}, "required": ["v"]}
    if place == 2:
        return {"type": "array", "items": about, "maxItems": 2}
    if place == 3:
        return {"anyOf": [about, {"type": "null"}]}
    return about | {"title": "t"}


def schemas(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """`count` schemas, each keyword of `ABOUT` in turn in two of five of them."""
    about = sorted(ABOUT)
    found = []
    for number in range(count):
        is_about = number % 5 < 2
        turn = number // 5 * 2 + number % 5
        found.append(schema_about(about[turn % len(about)], rng) if is_about else rooted(random_schema(rng)))
    return found


def keywords_of(schema: Any) -> Iterator[str]:
    """Every key that stands where a keyword does."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield keyword
        if keyword in MAPS and isinstance(value, dict):
            for item in value.values():
                yield from keywords_of(item)
        elif keyword in LISTS and isinstance(value, list):
            for item in value:
                yield from keywords_of(item)
        elif keyword in ONES:
            yield from keywords_of(value)


ALL_KEYWORDS = KEYWORDS | (ANNOTATIONS - {"discriminator"})
"""What a corpus is to contain."""


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randrange(4)
    return {"type": "string", "maxLength": low + rng.randrange(6)} | ({"minLength": low} if rng.random() < 0.5 else {})


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "integer", "multipleOf": rng.choice([2, 3, 5, 10])}
    low = rng.randrange(-1000, 1000)
    bounds = {
        rng.choice(["minimum", "exclusiveMinimum"]): low,
        rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randrange(2, 900),
    }
    return {"type": "integer", **(bounds if rng.random() < 0.8 else {})}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-50, 50), rng.randrange(3))
    return {"type": "number", "minimum": low, "maximum": round(low + rng.uniform(1, 90), rng.randrange(3))}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"const": rng.choice(WORDS)}]
    )


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"enum": rng.sample(["x", "red", "two words", "ü"], rng.randint(1, 4))}
    return {"enum": rng.sample([*WORDS, 1, -7, None, True, [1, "x"], {"k": None}], rng.randint(1, 4))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    required = [name for name in names if rng.random() < 0.6]
    if required:
        schema["required"] = required
    extra = rng.randrange(6)
    if extra == 0:
        schema["additionalProperties"] = False
    elif extra == 1:
        return {"type": "object", "additionalProperties": random_schema(rng, 0), "maxProperties": rng.randint(1, 3)}
    elif extra == 2:
        return {
            "type": "object",
            "patternProperties": {"^k[0-9]$": random_schema(rng, 0)},
            "additionalProperties": False,
        }
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    if rng.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [random_schema(rng, 0) for _ in range(rng.randint(1, 3))],
            "items": False,
        }
    schema = {"type": "array", "items": random_schema(rng, depth), "maxItems": low + rng.randrange(1, 4)}
    return schema | ({"minItems": low} if rng.random() < 0.5 else {})


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    keyword = rng.choice(["anyOf", "anyOf", "oneOf"])
    return {keyword: [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _combined(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(50)
    return rng.choice([
        {"allOf": [{"type": "integer"}, {"minimum": low}, {"maximum": low + 9}]},
        {"allOf": [{"type": "string", "maxLength": 6}, {"minLength": 2}]},
        {
            "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
            "allOf": [{"required": ["a"]}], "additionalProperties": False,
        },
    ])  # fmt: skip


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2, "$defs": {"one": random_schema(rng, 0)}}


def rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with the definitions of inner references at its root, each under a name of its own.

    They stand where older drafts have them in one schema of three.
    """
    definitions: dict[str, Any] = {}
    container = "definitions" if len(str(schema)) % 3 == 0 else "$defs"

    def walk(one: Any) -> Any:
        if isinstance(one, list):
            return [walk(item) for item in one]
        if not isinstance(one, dict):
            return one
        own = one.get("$defs", {}).get("one")
        inner = {key: walk(item) for key, item in one.items() if key != "$defs"}
        if own is not None:
            name = f"d{len(definitions)}"
            definitions[name] = None
            definitions[name] = walk(own)
            inner["items"] = {"$ref": f"#/{container}/{name}"}
        return inner

    walked: dict[str, Any] = walk(schema)
    return walked | ({container: definitions} if definitions else {})


# --- values ---

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 5, 1000, 1.5, -0.25, "", "a", "x", "abcdef", "2024-01-01", [], [None], [1, 1], ["a", 2, None],
    {}, {"a": 1}, {"a": None}, {"zzz": 1}, {"a": True, "b": None}, {"key": "x", "zzz": []},
)  # fmt: skip


def neighbours(value: Any, rng: random.Random, count: int) -> list[Any]:
    """Values that differ from `value` in one place."""
    return [_changed(copy.deepcopy(value), rng) for _ in range(count)]


def _changed(value: Any, rng: random.Random) -> Any:
    is_inner = rng.random() < 0.6
    if isinstance(value, dict) and value and is_inner:
        name = rng.choice(list(value))
        value[name] = _changed(value[name], rng)
        return value
    if isinstance(value, list) and value and is_inner:
        index = rng.randrange(len(value))
        value[index] = _changed(value[index], rng)
        return value
    if rng.random() < 0.3:
        return rng.choice(VALUES)
    if isinstance(value, bool) or value is None:
        return rng.choice(VALUES)
    if isinstance(value, int):
        return value + rng.choice([-1, 1, -7, 10, 1000, -1000])
    if isinstance(value, float):
        return value + rng.choice([-100.5, 0.5, 99.0])
    if isinstance(value, str):
        return rng.choice([value + "z", value + "aaaa", value[1:], value[:-1], "z" + value, value.upper()])
    if isinstance(value, list):
        return rng.choice([[*value, rng.choice(VALUES)], value[1:], value[:-1], value + value])
    return _changed_object(value, rng)


def _changed_object(value: dict[str, Any], rng: random.Random) -> Any:
    if value and rng.random() < 0.6:
        del value[rng.choice(list(value))]
    else:
        value[rng.choice(["zzz", *NAMES])] = rng.choice(VALUES)
    return value

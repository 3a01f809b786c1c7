"""What each keyword of JSON Schema forbids, by example: (schema, values that it allows, values that it forbids)."""

from __future__ import annotations

from typing import Any

Case = tuple[Any, list[Any], list[Any]]

OBJ = {"type": "object"}
CASES: dict[str, list[Case]] = {
    "type": [
        ({"type": "string"}, ["a"], [1, None, True, [], {}]),
        ({"type": "integer"}, [1, 0, -12], ["a", 1.5, True, None]),
        ({"type": "number"}, [1, 1.5, -0.25], ["a", True, None]),
        ({"type": "boolean"}, [True, False], ["a", 1, None]),
        ({"type": "null"}, [None], [0, "a", False]),
        ({"type": "array"}, [[]], [{}, "a", 1]),
        ({"type": "object"}, [{}], [[], "a", 1]),
        ({"type": ["string", "null"]}, ["a", None], [1, True, []]),
    ],
    "enum": [
        ({"enum": ["a", 2, None]}, ["a", 2, None], ["b", 3, True]),
        ({"type": "string", "enum": ["x", "y"]}, ["x", "y"], ["z", 1]),
        ({"enum": [{"k": [1]}]}, [{"k": [1]}], [{"k": [2]}, {}]),
    ],
    "const": [
        ({"const": "c"}, ["c"], ["d", 1]),
        ({"const": 5}, [5], [6, "5"]),
        ({"const": {"a": None}}, [{"a": None}], [{}]),
    ],
    "properties": [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{"a": 1}], [{"a": "x"}]),
        ({"properties": {"a": {"type": "integer"}}}, [{"a": 1}], [{"a": "x"}]),
    ],
    "required": [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]},
            [{"a": 1}, {"a": 1, "b": 2}],
            [{}, {"b": 1}],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]},
            [{"b": 1}, {"a": 1, "b": 2}],
            [{}, {"a": 1}],
        ),
        (
            {"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}},
            [{"z": 1}],
            [{}, {"y": 1}],
        ),
    ],
    "additionalProperties": [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
            [{"a": 1}],
            [{"b": 1}, {"a": 1, "b": 2}],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"b": 1}], [{"b": "x"}]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            [{"a": 1, "b": "x"}, {"a": 1}],
            [{"b": 1}, {"a": "x"}],
        ),
    ],
    "patternProperties": [
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
            [{"x1": 1}],
            [{"x1": "a"}, {"y": 1}],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^x": {"type": "integer"}},
                "additionalProperties": {"type": "string"},
            },
            [{"x1": 1}],
            [{"x1": "a"}, {"y": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {"xa": {"type": "string"}},
                "patternProperties": {"^x": {"maxLength": 2}},
                "additionalProperties": False,
            },
            [{"xa": "ab"}],
            [{"xa": "abc"}],
        ),
    ],
    "propertyNames": [
        (
            {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}},
            [{"ab": 1}],
            [{"d": 1}],
        ),
        (
            {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "integer"}},
            [{"ab": 1}],
            [{"abc": 1}],
        ),
    ],
    "minProperties": [
        (
            {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
            [{"a": 1, "b": 2}],
            [{}, {"a": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "minProperties": 1,
                "additionalProperties": False,
            },
            [{"a": 1}],
            [{}],
        ),
    ],
    "maxProperties": [
        (
            {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "integer"}},
            [{}, {"a": 1}],
            [{"a": 1, "b": 2}],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "maxProperties": 1},
            [{"a": 1}],
            [{"a": 1, "b": 2}],
        ),
    ],
    "dependentRequired": [
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "dependentRequired": {"a": ["b"]},
            },
            [{"a": 1, "b": 1}, {"b": 1}],
            [{"a": 1}],
        ),
    ],
    "dependentSchemas": [
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "dependentSchemas": {"a": {"required": ["b"]}},
            },
            [{"a": 1, "b": 1}, {"b": 1}],
            [{"a": 1}],
        ),
    ],
    "dependencies": [
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "dependencies": {"a": ["b"]},
            },
            [{"a": 1, "b": 1}],
            [{"a": 1}],
        ),
    ],
    "unevaluatedProperties": [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
            [{"a": 1}],
            [{"b": 1}],
        ),
    ],
    "items": [
        ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, "a"]]),
        ({"items": {"type": "integer"}}, [[1]], [["a"]]),
    ],
    "prefixItems": [
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
            [[1, "a"]],
            [["a"], [1, 2], [1, "a", 3]],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
            [[1, "a"]],
            [["a"], [1, 2]],
        ),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1}, [[1]], [["a"], []]),
    ],
    "additionalItems": [
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [[1]], [["a"], [1, 2]]),
    ],
    "unevaluatedItems": [
        ({"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, [[1]], [[1, 2], ["a"]])
    ],
    "minItems": [({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]])],
    "maxItems": [
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [[], [1]], [[1, 2]]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, [[]], [[1]]),
        ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    ],
    "uniqueItems": [({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2]], [[1, 1]])],
    "contains": [({"type": "array", "contains": {"const": 1}}, [[1]], [[], [2]])],
    "minContains": [({"type": "array", "contains": {"const": 1}, "minContains": 2}, [[1, 1]], [[1]])],
    "maxContains": [({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1]], [[1, 1]])],
    "minLength": [
        ({"type": "string", "minLength": 3}, ["abc", "abcd"], ["", "ab"]),
        ({"type": "string", "minLength": 2}, ["éé", "a\n"], ["é", "\n"]),
    ],
    "maxLength": [
        ({"type": "string", "maxLength": 2}, ["", "ab", "éé", "\n\t"], ["abc"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "ab"], ["", "abc"]),
        ({"type": "object", "properties": {"p": {"type": "string", "maxLength": 1}}}, [{"p": "é"}], [{"p": "ab"}]),
    ],
    "pattern": [
        ({"type": "string", "pattern": "^[a-c]{2,3}$"}, ["ab", "abc"], ["a", "abcd", "xy"]),
        ({"type": "string", "pattern": "^\\d{3}-\\w+$"}, ["123-ab"], ["12-ab", "123-"]),
        ({"type": "string", "pattern": "b"}, ["b"], ["a", ""]),
        ({"type": "string", "pattern": "^a|b$"}, ["a"], ["cc"]),
        ({"type": "string", "pattern": "^[^x]+$"}, ["a"], ["x", ""]),
        ({"type": "string", "pattern": "^a.c$"}, ["abc"], ["ac", "abbc"]),
        ({"type": "string", "pattern": "^[ab]+$", "maxLength": 3}, ["ab"], ["abab", "c"]),
        ({"type": "string", "pattern": "^[ab]+$", "minLength": 3}, ["abab"], ["a", "ab"]),
    ],
    "format": [
        ({"type": "string", "format": "date"}, ["2024-02-28"], ["x", "2024-13-01", "2024-1-1"]),
        ({"type": "string", "format": "time"}, ["10:20:30Z"], ["x", "25:00:00Z"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-28T10:20:30Z"], ["x", "2024-02-28"]),
        ({"type": "string", "format": "email"}, ["a@b.cd"], ["x", "@"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["x", "123"]),
        ({"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["x", "1.2.3", "256.1.1.1"]),
        ({"type": "string", "format": "ipv6"}, ["::1"], ["x", "12345::"]),
        ({"type": "string", "format": "hostname"}, ["a.example"], ["-a", "a b"]),
        ({"type": "string", "format": "uri"}, ["http://a.example/b"], ["x y", "/a"]),
        ({"type": "string", "format": "duration"}, ["P1D"], ["x", "P"]),
        ({"type": "string", "format": "regex"}, ["a"], ["("]),
        ({"type": "string", "format": "json-pointer"}, ["/a"], ["a"]),
    ],
    "minimum": [
        ({"type": "integer", "minimum": 10}, [10, 125], [9, -5, 0]),
        ({"type": "number", "minimum": 1.5}, [1.5, 2], [1, 1.4, -2]),
        ({"type": "integer", "minimum": -3}, [-3, 0, 7], [-4, -10]),
    ],
    "maximum": [
        ({"type": "integer", "maximum": 10}, [10, -125, 3], [11, 100]),
        ({"type": "number", "maximum": 1.5}, [1.5, -2], [2, 1.6]),
        ({"type": "integer", "minimum": 3, "maximum": 17}, [3, 9, 17], [2, 18, 170]),
    ],
    "exclusiveMinimum": [
        ({"type": "integer", "exclusiveMinimum": 10}, [11], [10, 9]),
        ({"type": "number", "exclusiveMinimum": 0}, [0.5], [0, -1]),
    ],
    "exclusiveMaximum": [
        ({"type": "integer", "exclusiveMaximum": 10}, [9], [10, 11]),
        ({"type": "number", "exclusiveMaximum": 0}, [-0.5], [0, 1]),
    ],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 3}, [3, 9], [4, 10]),
        ({"type": "number", "multipleOf": 0.5}, [0.5, 1], [0.3]),
    ],
    "anyOf": [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a", True]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 5}]}, ["a", 6], ["ab", 4]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            [{"a": 1}],
            [{}, {"a": "x"}],
        ),
        ({"type": "string", "anyOf": [{"minLength": 3}, {"maxLength": 1}]}, ["abc", "a"], ["ab", 1]),
    ],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
        ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]}, [11, -1], [5]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [1.5], [1]),
    ],
    "allOf": [
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, [5], [4, "a"]),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
                ]
            },
            [{"a": 1, "b": "x"}],
            [{"a": 1}, {"b": "x"}],
        ),
        ({"allOf": [{"type": "string", "maxLength": 2}]}, ["ab"], ["abc", 1]),
    ],
    "not": [({"not": {"type": "string"}}, [1], ["a"]), ({"type": "integer", "not": {"const": 5}}, [4], [5])],
    "if": [
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "if": {"required": ["a"]},
                "then": {"required": ["b"]},
            },
            [{"a": 1, "b": 1}],
            [{"a": 1}],
        ),
    ],
    "$ref": [
        ({"$defs": {"p": {"type": "integer"}}, "$ref": "#/$defs/p"}, [1], ["a"]),
        (
            {"definitions": {"p": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/definitions/p"}},
            [[1]],
            [["a"]],
        ),
        (
            {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            },
            [{"v": 1, "next": {"v": 2, "next": None}}],
            [{"v": 1, "next": {"v": "a", "next": None}}, {"v": 1, "next": 3}],
        ),
        ({"$defs": {"p": {"type": "integer"}}, "$ref": "#/$defs/p", "minimum": 5}, [5], [4, "a"]),
    ],
    "$dynamicRef": [({"$defs": {"p": {"$dynamicAnchor": "p", "type": "integer"}}, "$dynamicRef": "#p"}, [1], ["a"])],
    "$anchor": [({"$defs": {"p": {"$anchor": "p", "type": "integer"}}, "$ref": "#p"}, [1], ["a"])],
    "contentEncoding": [({"type": "string", "contentEncoding": "base64"}, ["YQ=="], [1])],
    "without type": [
        ({"minLength": 3}, ["abc"], ["ab"]),
        ({"minimum": 3}, [3], [2]),
        ({"maxItems": 1}, [[1]], [[1, 2]]),
        ({"required": ["a"]}, [{"a": 1}], [{}]),
        ({"pattern": "^a$"}, ["a"], ["b"]),
    ],
    "beside enum": [({"enum": ["a", "bb", 3], "type": "string", "maxLength": 1}, ["a"], ["bb", 3])],
    "beside const": [({"const": "abc", "maxLength": 1}, [], ["abc"])],
    "number list of types": [({"type": ["integer", "string"], "minimum": 5, "maxLength": 2}, [5, "ab"], [4, "abc"])],
    "boolean schema": [
        ({"type": "object", "properties": {"a": True, "b": False}}, [{"a": 1}], [{"b": 1}]),
        ({"type": "array", "items": False}, [[]], [[1]]),
    ],
}

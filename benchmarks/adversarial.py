"""Forms of answers that are dear to compile: written by someone who means harm, or does not know better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def nested_one_of(number: int) -> dict[str, Any]:
    """Choices of choices, three wide and nine deep: 20 000 ways."""
    schema: dict[str, Any] = {"type": "integer", "minimum": number}
    for depth in range(9):
        options = [{"type": "object", "properties": {f"k{depth}{i}": schema}} for i in range(3)]
        schema = {"oneOf": options} if depth > 6 else {"anyOf": options[:2]}
    return {"json": schema}


def huge_enum(number: int) -> dict[str, Any]:
    """100 000 values."""
    return {"json": {"enum": [f"{value:x}" for value in range(number, number + 100_000)]}}


def huge_choice(number: int) -> dict[str, Any]:
    """60 000 texts."""
    return {"choice": [f"{value:x}" for value in range(number, number + 60_000)]}


def nested_repeats(number: int) -> dict[str, Any]:
    """A hundred million states where each is counted."""
    return {"regex": f"x{number}(a{{1,10000}}){{1,10000}}"}


def exponential_regex(number: int) -> dict[str, Any]:
    """Patterns over which backtracking takes exponential time."""
    return {"regex": f"x{number}((a+)+|(a|aa)+)+b"}


def subset_regex(number: int) -> dict[str, Any]:
    """Its smallest deterministic automaton has 2^40 states."""
    return {"regex": f"x{number}(a|b)*a(a|b){{40}}"}


def wide_regex(number: int) -> dict[str, Any]:
    """Alternatives of long repeats, repeated."""
    parts = "|".join(f"{'ab' * i}[^x]{{0,400}}" for i in range(60))
    return {"regex": f"y{number}({parts}){{40}}"}


def huge_alternation(number: int) -> dict[str, Any]:
    """40 000 words in a pattern."""
    return {"regex": "|".join(f"w{value:x}" for value in range(number, number + 40_000))}


def deep_nesting(number: int) -> dict[str, Any]:
    """Sixty arrays in one another."""
    schema: dict[str, Any] = {"type": "integer", "minimum": number}
    for _ in range(58):
        schema = {"type": "array", "items": schema}
    return {"json": schema}


def recursive_reference(number: int) -> dict[str, Any]:
    """Definitions that all refer to all."""
    names = [f"d{index}" for index in range(40)]
    node = {
        "type": "object", "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names},
        "additionalProperties": False,
    }  # fmt: skip
    return {"json": {"$ref": "#/$defs/d0", "$defs": {name: {**node, "title": f"{name}{number}"} for name in names}}}


def endless_reference(number: int) -> dict[str, Any]:
    """A definition that is nothing but itself."""
    return {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "title": str(number)}}


def many_properties(number: int) -> dict[str, Any]:
    """4000 properties, all optional."""
    properties = {f"p{number}_{index}": {"type": "string", "maxLength": 100} for index in range(4000)}
    return {"json": {"type": "object", "properties": properties}}


def long_strings(number: int) -> dict[str, Any]:
    """Strings of up to a million characters, counted."""
    return {
        "json": {"type": "array", "items": {"type": "string", "maxLength": 1_000_000 + number}, "maxItems": 100_000}
    }


def big_ebnf(number: int) -> dict[str, Any]:
    """8000 rules."""
    rules = "\n".join(f'r{i} ::= "a{number}" r{i + 1} | [a-z]{{1,9}} r{(i * 7) % 8000} | "c{i}"' for i in range(7999))
    return {"grammar": f'root ::= r0\n{rules}\nr7999 ::= "z"'}


def repeated_ebnf(number: int) -> dict[str, Any]:
    """Repeats of repeats."""
    return {"grammar": f'root ::= "{number}" (((a{{1,1000}}){{1,1000}}){{1,1000}}){{1,1000}}\na ::= [a-z]'}


def big_lark(number: int) -> dict[str, Any]:
    """3000 rules that can all begin alike."""
    rules = "\n".join(f"r{i}: /[a-z]+{number}/ r{i + 1} | /[a-y]+/ r{(i * 7) % 3000}" for i in range(2999))
    return {"grammar": f'start: r0\n{rules}\nr2999: "z"'}


FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    one.__name__: one
    for one in (
        nested_one_of, huge_enum, huge_choice, nested_repeats, exponential_regex, subset_regex, wide_regex,
        huge_alternation, deep_nesting, recursive_reference, endless_reference, many_properties, long_strings, big_ebnf,
        repeated_ebnf, big_lark,
    )
}  # fmt: skip
"""By name: makes the form, each time another one, so that none is found in a cache."""

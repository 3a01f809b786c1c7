"""CallGrammar: the parts that an answer is made of - fixed texts, control tokens, schemas, choices of these.

Made by `quire.parsers` for calls of tools, and read from a request's structural tag by
`quire.structured_output.structural_tags`; each grammar library says in its file which parts it can write, and how.
Values only. A call of `f` in the format of Hermes is

    Sequence((Literal('<tool_call>{"name": "f", "arguments": '), Schema({"type": "object"}), Literal("}</tool_call>")))

Types and fields have the names of vLLM's (xgrammar's) structural tags, so that `msgspec.to_builtins` of a part is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

Limit = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None
"""At most so many; None = any number."""
TokenName = int | str
"""A token by its id or its text."""


class _Part(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    pass


class Literal(_Part, frozen=True, tag="const_string"):
    """A text as it is."""

    value: str


class Token(_Part, frozen=True, tag="token"):
    """One token, which may be a control token."""

    token: TokenName


class Schema(_Part, frozen=True, tag="json_schema"):
    """JSON that a schema accepts.

    Attributes:
        max_whitespace_cnt: optional whitespace characters in a row; None = any number.
        excludes: what its texts do not hold.
    """

    json_schema: dict[str, Any] | bool
    max_whitespace_cnt: Annotated[int, msgspec.Meta(ge=1)] | None = None
    excludes: tuple[str, ...] = ()


class Regex(_Part, frozen=True, tag="regex"):
    """A text that matches a regular expression."""

    pattern: str


class Ebnf(_Part, frozen=True, tag="grammar"):
    """A text of an EBNF grammar."""

    grammar: str


class AnyText(_Part, frozen=True, tag="any_text"):
    """Free text that holds none of `excludes`."""

    excludes: tuple[str, ...] = ()
    max_tokens: Limit = None
    max_chars: Limit = None


class AnyToken(_Part, frozen=True, tag="exclude_token"):
    """One token that is none of `exclude_tokens`."""

    exclude_tokens: tuple[TokenName, ...] = ()


class AnyTokens(_Part, frozen=True, tag="any_tokens"):
    """Tokens that are none of `exclude_tokens`."""

    exclude_tokens: tuple[TokenName, ...] = ()
    max_tokens: Limit = None


class Sequence(_Part, frozen=True, tag="sequence"):
    """One after another."""

    elements: Annotated[tuple[CallGrammar, ...], msgspec.Meta(min_length=1)]


class Choice(_Part, frozen=True, tag="or"):
    """One of several."""

    elements: Annotated[tuple[CallGrammar, ...], msgspec.Meta(min_length=1)]


class Maybe(_Part, frozen=True, tag="optional"):
    """Once or not at all."""

    content: CallGrammar


class OneOrMore(_Part, frozen=True, tag="plus"):
    """At least once."""

    content: CallGrammar


class ZeroOrMore(_Part, frozen=True, tag="star"):
    """Any number of times."""

    content: CallGrammar


class Repeat(_Part, frozen=True, tag="repeat"):
    """At least `min` times and at most `max`; -1 = any number."""

    min: int
    max: int
    content: CallGrammar


class Tag(_Part, frozen=True, tag="tag"):
    """Something between a beginning and an end; of several ends any."""

    begin: str | Token
    content: CallGrammar
    end: str | tuple[str, ...] | Token


class SeparatedTags(_Part, frozen=True, tag="tags_with_separator"):
    """Tags with a text between them."""

    tags: Annotated[tuple[Tag, ...], msgspec.Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class TriggeredTags(_Part, frozen=True, tag="triggered_tags"):
    """Free text in which a trigger begins the tag that it is the beginning of."""

    triggers: tuple[str, ...]
    tags: Annotated[tuple[Tag, ...], msgspec.Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()


class TokenTriggeredTags(_Part, frozen=True, tag="token_triggered_tags"):
    """As `TriggeredTags`, by tokens."""

    trigger_tokens: tuple[TokenName, ...]
    tags: Annotated[tuple[Tag, ...], msgspec.Meta(min_length=1)]
    exclude_tokens: tuple[TokenName, ...] = ()
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Part, frozen=True, tag="dispatch"):
    """Free text in which each of some texts is followed by a part of its own."""

    rules: Annotated[tuple[tuple[str, CallGrammar], ...], msgspec.Meta(min_length=1)]
    loop: bool = True
    excludes: tuple[str, ...] = ()


class TokenDispatch(_Part, frozen=True, tag="token_dispatch"):
    """As `Dispatch`, by tokens."""

    rules: Annotated[tuple[tuple[TokenName, CallGrammar], ...], msgspec.Meta(min_length=1)]
    loop: bool = True
    exclude_tokens: tuple[TokenName, ...] = ()


CallGrammar = (
    Literal | Token | Schema | Regex | Ebnf | AnyText | AnyToken | AnyTokens
    | Sequence | Choice | Maybe | OneOrMore | ZeroOrMore | Repeat
    | Tag | SeparatedTags | TriggeredTags | TokenTriggeredTags | Dispatch | TokenDispatch
)  # fmt: skip
TYPES = frozenset(str(part.__struct_config__.tag) for part in CallGrammar.__args__)
"""All types of parts, by name."""


def parts_of(grammar: CallGrammar, path: str = "") -> Iterator[tuple[str, CallGrammar]]:
    """(path as a JSON pointer, part) of `grammar` and all within it, outer ones first."""
    yield path, grammar
    for step, inner in _inner(grammar):
        yield from parts_of(inner, f"{path}/{step}")


def with_parts(grammar: CallGrammar, change: Callable[[CallGrammar], CallGrammar]) -> CallGrammar:
    """A copy of `grammar` in which each part that holds no others is what `change` makes of it."""
    match grammar:
        case Sequence() | Choice():
            return msgspec.structs.replace(grammar, elements=tuple(with_parts(one, change) for one in grammar.elements))
        case SeparatedTags() | TriggeredTags() | TokenTriggeredTags():
            return msgspec.structs.replace(grammar, tags=tuple(with_parts(one, change) for one in grammar.tags))
        case Dispatch() | TokenDispatch():
            rules = tuple((begin, with_parts(one, change)) for begin, one in grammar.rules)
            return msgspec.structs.replace(grammar, rules=rules)
        case Maybe() | OneOrMore() | ZeroOrMore() | Repeat() | Tag():
            return msgspec.structs.replace(grammar, content=with_parts(grammar.content, change))
        case _:
            return change(grammar)


def _inner(grammar: CallGrammar) -> list[tuple[str, CallGrammar]]:
    """(step of the path, part) of the parts directly within one."""
    match grammar:
        case Sequence() | Choice():
            return [(f"elements/{index}", one) for index, one in enumerate(grammar.elements)]
        case SeparatedTags() | TriggeredTags() | TokenTriggeredTags():
            return [(f"tags/{index}", one) for index, one in enumerate(grammar.tags)]
        case Dispatch() | TokenDispatch():
            return [(f"rules/{index}/1", one) for index, (_, one) in enumerate(grammar.rules)]
        case Maybe() | OneOrMore() | ZeroOrMore() | Repeat():
            return [("content", grammar.content)]
        case Tag():
            edges = [("begin", grammar.begin), ("end", grammar.end)]
            return [("content", grammar.content), *((step, one) for step, one in edges if isinstance(one, Token))]
        case _:
            return []

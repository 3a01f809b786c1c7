"""What a request demands of its output's form. Made by users, checked here as far as it needs no model.

Read by `quire.structured_output`, which makes a grammar of it. Names and defaults are those that users of vLLM know.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from quire.core.call_grammar import CallGrammar
from quire.errors import ValidationError, nearest
from quire.utils.checks import check_bool, shown, wrong_type

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
WITH_WHITESPACE = ("json", "json_object", "structural_tag")
MAX_DEPTH = 64
MAX_TAG_DEPTH = MAX_DEPTH + 16
MAX_CHARS = 1 << 20
MAX_CHOICES = 16384
MAX_VALUES = 20_000
"""Of a schema or tag on one level; so many could not be compiled in time."""
LARGE_CHARS = 20_000
LARGE_VALUES = 1000


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True, kw_only=True):
    """A constraint on the output: exactly one of the first six fields is given.

    >>> StructuredOutputsParams(choice=["yes", "no"])
    StructuredOutputsParams(choice=['yes', 'no'])
    >>> schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    >>> StructuredOutputsParams(json=schema).json == schema
    True

    Attributes:
        json: a JSON schema, as a dict or a string; the output is a JSON value that the schema accepts.
        regex: the whole output matches it.
        choice: the output is one of these strings.
        grammar: an EBNF grammar (`root ::= ...`) or a Lark grammar (`start: ...`).
        json_object: True = any JSON object.
        structural_tag: free text with parts that follow schemas, as a dict or a string.
        disable_any_whitespace: JSON is written without optional whitespace.
        disable_additional_properties: objects have no properties but those that the schema names.
        whitespace_pattern: what may stand between the parts of a JSON value; guidance and outlines support it.
        max_whitespace_cnt: internal; optional whitespace characters in a row in JSON; None = any number.
        backend: internal; which library makes the grammar, set by the input processor.
        may_fall_back: internal; another library may make it when this one refuses it.
        source: internal; the field of a request of which it was made, for errors.
        call_grammar: internal; stands for a `structural_tag` that the server has made itself.

    Raises:
        ValidationError: none or several are given, or one is empty, of the wrong type, too large or nested too deeply;
            what is wrong within a schema or tag that `is_large` is found when the request is made.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    max_whitespace_cnt: int | None = None
    backend: str = ""
    may_fall_back: bool = False
    source: str = ""
    call_grammar: CallGrammar | None = None

    def __post_init__(self) -> None:
        if self.backend or self.call_grammar is not None:  # made of what was checked
            return
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            what = "none" if not given else ", ".join(given)
            raise ValidationError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; got {what}",
                hint="give one of them", field="structured_outputs",
            )  # fmt: skip
        check_bool("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        check_bool("structured_outputs.disable_additional_properties", self.disable_additional_properties)
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            raise wrong_type("structured_outputs.whitespace_pattern", self.whitespace_pattern, "text")
        if self.whitespace_pattern is not None and given[0] not in WITH_WHITESPACE:
            raise ValidationError(
                f"structured_outputs.whitespace_pattern has no effect on {given[0]}",
                hint=f"leave it out, or use {', '.join(WITH_WHITESPACE)}", field="structured_outputs",
            )  # fmt: skip
        value = getattr(self, given[0])
        if given[0] in _PARSED and isinstance(value, (dict, str)) and self.is_large:
            return  # all of it is checked where its library is chosen, which delays no other request
        _CHECKS[given[0]](self.field, value)

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        if self.call_grammar is not None:
            return "structural_tag"
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def field(self) -> str:
        """What errors name."""
        return self.source or f"structured_outputs.{self.kind}"

    @property
    def is_large(self) -> bool:
        """Whether looking at all of it takes long enough for others to notice."""
        given = getattr(self, self.kind) if self.call_grammar is None else msgspec.to_builtins(self.call_grammar)
        num_chars, num_values, pending = 0, 0, [given]
        while pending and num_chars <= LARGE_CHARS and num_values <= LARGE_VALUES:
            value = pending.pop()
            num_values += 1
            if isinstance(value, str):
                num_chars += len(value)
            elif isinstance(value, (dict, list)):
                num_values += len(value)
                if num_values <= LARGE_VALUES:
                    pending.extend(value.values() if isinstance(value, dict) else value)
        return num_chars > LARGE_CHARS or num_values > LARGE_VALUES

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """`value`, which is one already or a dict of its fields.

        Raises:
            ValidationError: it is neither, or a name is unknown.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise wrong_type("structured_outputs", value, "an object such as {'json': {...}}")
        allowed = [name for name in cls.__struct_fields__ if name not in _INTERNAL]
        for name in value:
            if name not in allowed:
                close = nearest(str(name), allowed)
                hint = f"did you mean {close!r}?" if close else f"valid: {', '.join(allowed)}"
                raise ValidationError(
                    f"unknown field {shown(name)} of structured_outputs", hint=hint, field="structured_outputs"
                )
        return cls(**value)


def parse_json(field: str, value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """`value`, a JSON value or its text, as a value of plain data.

    Raises:
        ValidationError: it is not JSON, too large, or nested too deeply; the field is `field`.
    """
    parsed = value
    if isinstance(value, str):
        if not value.strip():
            raise ValidationError(f"{field} is empty", hint="give a JSON value", field=field)
        if len(value) > MAX_CHARS:
            raise ValidationError(f"{field} has more than {MAX_CHARS} characters", hint="make it smaller", field=field)
        try:
            parsed = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValidationError(f"{field} is not JSON: {error}", hint="give valid JSON", field=field) from None
    if _breadth_exceeds(parsed, MAX_VALUES):
        raise ValidationError(f"{field} has more than {MAX_VALUES} values", hint="make it smaller", field=field)
    if _depth_exceeds(parsed, max_depth):
        raise ValidationError(f"{field} is nested too deeply", hint=f"use at most {max_depth} levels", field=field)
    if not isinstance(value, str) and len(json_text(field, parsed)) > MAX_CHARS:
        raise ValidationError(f"{field} has more than {MAX_CHARS} characters", hint="make it smaller", field=field)
    return parsed


def json_text(field: str, value: Any) -> str:
    """The text of a JSON value, the order of keys kept.

    Raises:
        ValidationError: it holds what JSON has not.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ValidationError(
            f"{field} is not a valid JSON value: {error}", hint="use plain JSON data", field=field
        ) from None
    return text


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _breadth_exceeds(value: Any, limit: int) -> bool:
    """Whether a value has more than `limit` values on one level; looks at no more than it must."""
    level = [value]
    for _ in range(MAX_TAG_DEPTH):  # what is deeper is refused for its depth
        containers = [one for one in level if isinstance(one, (dict, list, tuple))]
        if sum(map(len, containers)) > limit:
            return True
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    return False


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for one in level
            if isinstance(one, (dict, list, tuple))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def _check_schema(field: str, value: Any) -> None:
    if not isinstance(value, (str, dict, bool)):
        raise wrong_type(field, value, "a JSON schema: an object, or a string with one")
    if not isinstance(parse_json(field, value), (dict, bool)):
        raise ValidationError(f"{field} is not a valid JSON schema", hint="a schema is an object", field=field)


def _check_text(field: str, value: Any) -> None:
    if not isinstance(value, str):
        raise wrong_type(field, value, "a string")
    if not value.strip():
        raise ValidationError(f"{field} is empty", hint="leave it out, or give a pattern", field=field)
    if "\0" in value:
        raise ValidationError(f"{field} contains a NUL character", hint="remove it", field=field)
    if len(value) > MAX_CHARS:
        raise ValidationError(f"{field} has more than {MAX_CHARS} characters", hint="make it smaller", field=field)
    _check_unicode(field, value)


def _check_choice(field: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise wrong_type(field, value, "a list of strings")
    if not value:
        raise ValidationError(f"{field} is empty", hint="give at least one choice", field=field)
    if len(value) > MAX_CHOICES or sum(len(one) for one in value if isinstance(one, str)) > MAX_CHARS:
        raise ValidationError(
            f"{field} has more than {MAX_CHOICES} choices or {MAX_CHARS} characters",
            hint="make it smaller",
            field=field,
        )
    for index, one in enumerate(value):
        if not isinstance(one, str):
            raise wrong_type(f"{field}[{index}]", one, "a string")
        if not one or "\0" in one:
            raise ValidationError(
                f"{field}[{index}] is empty or contains a NUL character", hint="give a non-empty string", field=field
            )
        _check_unicode(f"{field}[{index}]", one)


def _check_unicode(field: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValidationError(
            f"{field} is not valid Unicode: it has half of a surrogate pair", hint="send valid Unicode", field=field
        ) from None


def _check_json_object(field: str, value: Any) -> None:
    if value is not True:
        raise ValidationError(f"{field} must be true", hint=f"leave out {field}", field=field)


def _check_tag(field: str, value: Any) -> None:
    if not isinstance(value, (str, dict)):
        raise wrong_type(field, value, "an object, or a string with one")
    if not isinstance(parse_json(field, value, MAX_TAG_DEPTH), dict):
        raise ValidationError(f"{field} is not an object", hint="give a structural tag", field=field)


_INTERNAL = ("backend", "may_fall_back", "source", "call_grammar")
_PARSED = ("json", "structural_tag")
_CHECKS = {
    "json": _check_schema,
    "regex": _check_text,
    "choice": _check_choice,
    "grammar": _check_text,
    "json_object": _check_json_object,
    "structural_tag": _check_tag,
}

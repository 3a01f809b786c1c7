"""The Jinja environment in which chat templates run: no attributes but plain data's, no unbounded operation.

Called by `ChatTemplate`. Built on Jinja's immutable sandbox, then narrowed: filters and methods are the few that
templates of published models use, and whatever grows a value asks the `Budget` of the rendering first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from quire.errors import ChatTemplateError
from quire.tokenization.template_budget import Budget, OverBudgetError

PLAIN_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select", "selectattr",
    "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
TEXT_METHODS = (
    "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower",
    "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
    "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
)  # fmt: skip
METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(TEXT_METHODS),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
}
EMPTY: dict[str, object] = {}
VIEWS = (type(EMPTY.keys()), type(EMPTY.values()), type(EMPTY.items()))
CHECK = "quire_check"
CONCAT = "quire_concat"
MAX_INDENT = 64
MAX_DIGITS_IN_FORMAT = re.compile(r"\d{4,}|\*|\{[^}]*\{")


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks a model's own words for training; here its body alone."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body's nodes in place of the tag's."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class LenientNamespace(Namespace):
    """A namespace that has a name instead of its content when it is printed: it could hold itself."""

    def __repr__(self) -> str:
        return "<namespace>"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment. `budget` is set for the duration of a rendering; one rendering at a time."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run operations before any budget exists
            cache_size=0,
            extensions=[GenerationTag, LoopControlExtension],
        )
        self.budget = budget
        self.filters = self._make_filters()
        self.globals = {
            "range": safe_range,
            "dict": lambda *args, **kwargs: self.budget.check(dict(*args, **kwargs)),
            "namespace": LenientNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.concat = self._concat  # type: ignore[method-assign]

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _check_new_values(source)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run `left operator right` when its result is affordable."""
        if operator == "+":
            self._require_sum(left, right)
        elif operator == "*":
            self._require_product(left, right)
        elif operator == "**":
            self._require_power(left, right)
        elif isinstance(left, str):
            _require_plain_format(left)
        return self.budget.check(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Plain data have only the methods listed here; Jinja's own objects what its sandbox allows."""
        for kind, names in METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        if isinstance(obj, (int, float, bytes, type)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `obj` when its result is affordable."""
        for value in (*args, *kwargs.values()):
            self.budget.check(value)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = self._before_text_method(owner, obj.__name__, args)
        self.budget.enter_call()
        result = super().call(context, obj, *args, **kwargs)
        self.budget.leave_call()
        if isinstance(result, VIEWS):
            result = list(result)  # a view has no weight of its own
        return self.budget.check(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `str.format`, for format strings whose result is affordable."""
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None
        text = str(value.__self__)

        def checked(*args: Any, **kwargs: Any) -> str:
            _require_plain_format(text)
            return str(self.budget.check(format_text(*args, **kwargs)))

        return checked

    def _before_text_method(self, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuse a method of `text` whose result is too large; return its arguments."""
        if name == "replace" and len(args) >= 2:
            self._require_replacement(text, *args[:2])
        elif name == "join" and args:
            return (self._items_to_join(text, args[0]),)
        return args

    def _make_filters(self) -> dict[str, Callable[..., Any]]:
        filters = {name: self._checked(FILTERS[name]) for name in PLAIN_FILTERS}
        filters |= {
            "replace": self._filter_replace,
            "join": self._filter_join,
            "indent": self._filter_indent,
            "format": self._filter_format,
            "tojson": self._filter_tojson,
            CHECK: lambda value: self.budget.check(value),
            CONCAT: self._concat,
        }
        return filters

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its first argument weighed as it is read, and its result weighed."""
        mark = getattr(function, "jinja_pass_arg", None)  # set on filters whose first argument is the context
        position = 0 if mark is None else 1

        def checked(*args: Any, **kwargs: Any) -> Any:
            values = list(args)
            if _is_lazy(values[position]):
                values[position] = self.budget.guard(values[position])
            return self.budget.check(function(*values, **kwargs))

        if mark is not None:
            checked.jinja_pass_arg = mark  # type: ignore[attr-defined]
        return checked

    def _concat(self, parts: Iterable[Any]) -> str:
        return "".join(self.budget.guard(map(self._text_of, parts)))

    def _text_of(self, value: Any) -> str:
        self.budget.check(value)
        return str(value)

    def _filter_replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        self._require_replacement(str(text), old, new)
        return self._text_of(text).replace(old, new, count)

    def _filter_join(self, items: Any, separator: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        return separator.join(self._items_to_join(separator, items))

    def _filter_indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        prefix = width if isinstance(width, str) else " " * min(int(width), MAX_INDENT + 1)
        if len(prefix) > MAX_INDENT:
            raise OverBudgetError(f"indents by more than {MAX_INDENT} characters")
        lines = self._text_of(text).split("\n")
        self.budget.require_weight(sum(map(len, lines)) + len(lines) * (len(prefix) + 1))
        head = (prefix if first else "") + lines[0]
        return "\n".join([head, *(prefix + line if line.strip() or blank else line for line in lines[1:])])

    def _filter_format(self, text: Any, *args: Any, **kwargs: Any) -> str:
        _require_plain_format(str(text))
        return str(self.budget.check(self._text_of(text) % (kwargs or args)))

    def _filter_tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """`value` as JSON; unlike Jinja's own filter nothing is escaped for HTML."""
        if len(indent) > MAX_INDENT if isinstance(indent, str) else (indent or 0) > MAX_INDENT:
            raise OverBudgetError(f"indents JSON by more than {MAX_INDENT} characters")
        self.budget.check(value)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_not_json
        )
        if indent is None:
            return str(self.budget.check(encoder.encode(value)))
        return "".join(self.budget.guard(encoder.iterencode(value)))

    def _items_to_join(self, separator: str, items: Iterable[Any]) -> list[str]:
        texts = list(self.budget.guard(map(self._text_of, items)))
        self.budget.require_weight(sum(map(len, texts)) + len(separator) * len(texts))
        return texts

    def _require_replacement(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.budget.require_weight(len(text) + text.count(old) * max(0, len(new) - len(old)))

    def _require_sum(self, left: Any, right: Any) -> None:
        if isinstance(left, (str, list, tuple)):
            self.budget.require_weight(self.budget.weigh(left) + self.budget.weigh(right))

    def _require_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self.budget.require_bits(left.bit_length() + right.bit_length())
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                self.budget.require_weight(self.budget.weigh(value) * max(times, 0))

    def _require_power(self, base: Any, exponent: Any) -> None:
        if isinstance(base, int) and isinstance(exponent, int):
            self.budget.require_bits(base.bit_length() * max(exponent, 0))


def _check_new_values(template: nodes.Template) -> None:
    """Send every value that template syntax itself makes through the budget: lists, dictionaries, joined texts."""
    for parent in reversed([template, *template.find_all(nodes.Node)]):  # children before their parents
        for field, value in list(parent.iter_fields()):
            if isinstance(value, list):
                setattr(parent, field, [_checked_node(item) for item in value])
            else:
                setattr(parent, field, _checked_node(value))


def _checked_node(node: Any) -> Any:
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes, lineno=node.lineno), CONCAT)
    if isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filter(node, CHECK)
    return node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_lazy(value: Any) -> bool:
    """True for sequences that are made while they are read."""
    plain = (str, bytes, int, float, list, tuple, dict, Undefined, range)
    return value is not None and not isinstance(value, plain) and isinstance(value, Iterable)


def _require_plain_format(text: str) -> None:
    """Refuse a format string with large or computed widths."""
    if MAX_DIGITS_IN_FORMAT.search(text):
        raise OverBudgetError("uses a format string with a large or computed width")


def _raise_exception(message: Any) -> NoReturn:
    """What templates call to refuse a conversation."""
    hint = "change the messages, or give another chat_template"
    raise ChatTemplateError(f"the chat template refused the messages: {message}", hint=hint, field="messages")


def _strftime_now(format: str) -> str:
    """The local time, for templates that tell the model today's date."""
    if len(format) > 100 or MAX_DIGITS_IN_FORMAT.search(format):
        raise OverBudgetError("asks for a date in a format that is too long")
    return datetime.now().strftime(format)


def _not_json(value: Any) -> NoReturn:
    raise ChatTemplateError(
        f"the chat template writes a {type(value).__name__} as JSON, which has no such type", field="chat_template"
    )

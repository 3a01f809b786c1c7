"""The tools of `quire chat --tools demo`: a calculator and a clock, which run here. No state.

Their names and arguments are of the kind that the embedded model knows. Whatever a model asks for is answered: a call
that cannot be carried out has a result that says why.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import lru_cache
from typing import Any

from quire.cli.arithmetic import ExpressionError, evaluate
from quire.errors import nearest
from quire.parsers.tools import decode, encode

MAX_ZONE_CHARS = 64
MAX_SHOWN_CHARS = 80
TEXT, INTEGER = "string", "integer"
CITY = {"city": (TEXT, "Name of the city or time zone")}
TWO_NUMBERS = {"a": (INTEGER, "A number"), "b": (INTEGER, "A number")}
Now = Callable[[tzinfo], datetime]


class ToolError(ValueError):
    """A call that cannot be carried out; the message is for the model."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        parameters: name -> (JSON type, description); all of them are required.
        run: called with values of those types; may raise `ToolError`.
    """

    name: str
    description: str
    parameters: Mapping[str, tuple[str, str]]
    run: Callable[..., dict[str, Any]]

    @property
    def schema(self) -> dict[str, Any]:
        """As in the field `tools` of a request."""
        properties = {name: {"type": kind, "description": doc} for name, (kind, doc) in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, arguments: Any) -> dict[str, Any]:
        """The result for `arguments`.

        Raises:
            ToolError: they are not those of `parameters`, or the tool cannot do it.
        """
        if not isinstance(arguments, dict):
            raise ToolError("the arguments are not a JSON object")
        for name in self.parameters:
            if name not in arguments:
                raise ToolError(f"the argument {name} is missing")
        for name, value in arguments.items():
            if name not in self.parameters:
                raise ToolError(
                    f"{self.name} has no argument {name[:MAX_SHOWN_CHARS]!r}; it has {', '.join(self.parameters)}"
                )
            kind = self.parameters[name][0]
            if type(value) is not {TEXT: str, INTEGER: int}[kind]:
                raise ToolError(f"{name} must be of type {kind}")
        return self.run(**arguments)


class Toolbox:
    """Tools by name.

    Attributes:
        schemas: of all of them.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema for tool in tools]

    def call(self, name: str, arguments: str) -> str:
        """The result of a call as JSON text: {"error": ...} for one that cannot be carried out.

        Args:
            arguments: JSON text, as the model wrote it.
        """
        try:
            return encode(self._find(name).call(_parsed(arguments)))
        except (ToolError, ExpressionError) as error:
            return encode({"error": str(error)})

    def _find(self, name: str) -> Tool:
        if name not in self._tools:
            raise ToolError(f"there is no tool {name[:MAX_SHOWN_CHARS]!r}; there are {', '.join(self._tools)}")
        return self._tools[name]


def demo_tools(now: Now = datetime.now) -> Toolbox:
    """A calculator, its two simplest uses by themselves (small models know those), and a clock with a calendar.

    Args:
        now: the time in a zone.
    """

    def get_time(city: str) -> dict[str, Any]:
        return {"city": city, "time": f"{now(find_zone(city)):%H:%M}"}

    def get_date(city: str) -> dict[str, Any]:
        zone = find_zone(city)
        at = now(zone)
        return {"city": city, "date": f"{at:%Y-%m-%d}", "day": f"{at:%A}", "zone": str(zone)}

    return Toolbox(
        [
            Tool("add", "Add two numbers", TWO_NUMBERS, lambda a, b: {"sum": evaluate(f"{a} + {b}")}),
            Tool("multiply", "Multiply two numbers", TWO_NUMBERS, lambda a, b: {"product": evaluate(f"{a} * {b}")}),
            Tool(
                "calculate", "Calculate an arithmetic expression", {"expression": (TEXT, "For example (3 + 4) * 2.5")},
                lambda expression: {"result": evaluate(expression)},
            ),
            Tool("get_time", "Get the local time in a city", CITY, get_time),
            Tool("get_date", "Get the date and the day of the week in a city", CITY, get_date),
        ]
    )  # fmt: skip


def find_zone(name: str) -> zoneinfo.ZoneInfo:
    """The time zone of a name such as Europe/Paris, of its last part alone, or UTC; case does not matter.

    Raises:
        ToolError: there is none.
    """
    wanted = name.strip().replace(" ", "_").lower()
    if len(wanted) <= MAX_ZONE_CHARS:
        zones = _zones()
        if wanted in zones:
            return zoneinfo.ZoneInfo(zones[wanted])
    close = nearest(wanted[:MAX_ZONE_CHARS], _zones())
    hint = f"; the nearest name is {_zones()[close]}" if close else "; name one such as Europe/Paris"
    raise ToolError(f"no time zone is named {name[:MAX_SHOWN_CHARS]!r}{hint}")


@lru_cache(maxsize=1)
def _zones() -> dict[str, str]:
    """Names in lower case -> time zones; whole names win over last parts."""
    whole = sorted(zoneinfo.available_timezones())
    last = {one.rpartition("/")[2].lower(): one for one in reversed(whole)}
    return {**last, **{one.lower(): one for one in whole}}


def _parsed(arguments: str) -> Any:
    try:
        return decode(arguments or "{}")
    except (ValueError, RecursionError):
        raise ToolError("the arguments are not a JSON object") from None

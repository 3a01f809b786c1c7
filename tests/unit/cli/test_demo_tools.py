"""The tools of `quire chat --tools demo`: every call has a result, and a wrong one says why."""

from __future__ import annotations

import json
from datetime import datetime, timezone, tzinfo

import pytest

from quire.cli.demo_tools import ToolError, demo_tools, find_zone

NOW = datetime(2024, 2, 29, 23, 30, tzinfo=timezone.utc)


def now(zone: tzinfo) -> datetime:
    return NOW.astimezone(zone)


def call(name: str, arguments: object) -> dict:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return json.loads(demo_tools(now).call(name, text))


def test_the_calculator_computes():
    assert call("add", {"a": -2, "b": 579}) == {"sum": 577}
    assert call("multiply", {"a": 12, "b": -34}) == {"product": -408}
    assert call("calculate", {"expression": "(3 + 4) * 2.5"}) == {"result": 17.5}
    assert call("calculate", {"expression": "2**100"}) == {"result": 2**100}


def test_the_clock_tells_time_and_date_where_it_is_asked_for():
    assert call("get_time", {"city": "Tokyo"}) == {"city": "Tokyo", "time": "08:30"}
    assert call("get_time", {"city": "utc"})["time"] == "23:30"
    date = {"date": "2024-03-01", "day": "Friday", "zone": "Asia/Tokyo"}
    assert call("get_date", {"city": "Tokyo"}) == {"city": "Tokyo", **date}


@pytest.mark.parametrize(
    ("name", "zone"),
    [
        ("Europe/Paris", "Europe/Paris"),
        ("paris", "Europe/Paris"),
        (" New York ", "America/New_York"),
        ("UTC", "UTC"),
        ("america/argentina/buenos_aires", "America/Argentina/Buenos_Aires"),
    ],
)
def test_a_zone_is_found_by_its_name_or_the_last_part_of_it(name, zone):
    assert str(find_zone(name)) == zone


def test_a_zone_that_is_none_is_refused_with_the_nearest_name():
    with pytest.raises(ToolError, match="nearest name is Europe/Paris"):
        find_zone("Pariss")
    for name in ("", "../../etc/passwd", "x" * 1000, "\0", "Europe/"):
        with pytest.raises(ToolError, match="no time zone"):
            find_zone(name)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("calculate", {"expression": "1/0"}, "division by zero"),
        ("calculate", {}, "expression is missing"),
        ("calculate", {"expression": 5}, "type string"),
        ("calculate", {"expression": "1", "x": 1}, "no argument 'x'"),
        ("calculate", "[1]", "not a JSON object"),
        ("calculate", '{"expression": "1', "not a JSON object"),
        ("calculate", "[" * 100_000, "not a JSON object"),
        ("calculate", {"expression": "\ud800"}, "is not a number"),
        ("rm", {}, "no tool 'rm'; there are add, multiply, calculate, get_time, get_date"),
        ("get_time", {"city": "Atlantis"}, "no time zone"),
        ("get_time", "", "city is missing"),
        ("add", {"a": 1, "b": True}, "b must be of type integer"),
        ("multiply", '{"a": 2.5, "b": 2}', "type integer"),
        ("multiply", f'{{"a": {"9" * 400}, "b": {"9" * 400}}}', "500 characters"),
        ("get_time", '{"city": "\\ud800"}', "no time zone"),
    ],
    ids=lambda value: str(value)[:20].encode("ascii", "replace").decode(),
)
def test_a_call_that_cannot_be_carried_out_has_a_result_that_says_why(name, arguments, words):
    assert words in call(name, arguments)["error"]


def test_the_schemas_are_those_of_a_request():
    schemas = demo_tools().schemas
    assert [one["function"]["name"] for one in schemas] == ["add", "multiply", "calculate", "get_time", "get_date"]
    for one in schemas:
        parameters = one["function"]["parameters"]
        assert one["type"] == "function" and parameters["required"] == list(parameters["properties"])

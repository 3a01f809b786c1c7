"""Large schemas are checked by a process: with the answers of the check itself, once for each salt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.structured_outputs import MAX_DEPTH, MAX_VALUES, StructuredOutputsParams
from quire.errors import EngineGenerateError, ValidationError
from quire.structured_output import form_checker
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.form_checker import FormChecker
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries
CONFIG = StructuredOutputsConfig()


@pytest.fixture(scope="module")
def checker() -> Iterator[FormChecker]:
    made = FormChecker(CONFIG)
    yield made
    made.close()


def large(**more: Any) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "integer"} for number in range(1200)}
    return {"type": "object", "properties": {**properties, **more}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_large_schema_gets_what_the_check_itself_says_and_this_process_checks_nothing(checker, monkeypatch):
    form = StructuredOutputsParams(json=large())
    expected = resolve_structured_outputs(form, CONFIG)
    monkeypatch.setattr(form_checker, "resolve_structured_outputs", None)
    assert checker.resolve(form, "") == expected


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (large(x={"not": {}}), "/properties/x/not"),
        (large(x={"minimum": "1"}), "/properties/x/minimum"),
        (large(x=nested(MAX_DEPTH)), "nested too deeply"),
        ({"enum": list(range(MAX_VALUES + 1))}, f"more than {MAX_VALUES} values"),
        ('["' + "a" * 30_000 + '"]', "not a valid JSON schema"),
        ('{"a": "' + "a" * 30_000, "is not JSON"),
    ],
)
def test_what_is_wrong_with_a_large_schema_is_told_as_ever(checker, schema, path):
    form = StructuredOutputsParams(json=schema, source="response_format")
    with pytest.raises(ValidationError) as expected:
        resolve_structured_outputs(form, CONFIG)
    for _ in range(2):
        with pytest.raises(ValidationError) as caught:
            checker.resolve(form, "")
        error = caught.value
        assert path in error.message and error.field == "response_format"
        assert (error.message, error.hint) == (expected.value.message, expected.value.hint)


@pytest.mark.parametrize("value", [object(), nested(3000), 1 << 70], ids=["object", "deep", "long"])
def test_what_no_message_can_hold_is_refused_or_taken_as_ever(checker, value):
    form = StructuredOutputsParams(json=large(x={"const": value}))
    try:
        expected = resolve_structured_outputs(form, CONFIG)
    except ValidationError as error:
        with pytest.raises(ValidationError, match=re.escape(error.message)):
            checker.resolve(form, "")
    else:
        assert checker.resolve(form, "") == expected


def test_a_schema_is_checked_once_for_each_salt(monkeypatch):
    checker, asked = FormChecker(CONFIG), []
    monkeypatch.setattr(checker, "_ask", lambda request: asked.append(request) or form_checker.CheckResult(form))
    form = StructuredOutputsParams(json=large(y={}))
    for salt in ("alice", "bob", "alice"):
        checker.resolve(form, salt)
    assert len(asked) == 2, "how soon alice's is there says nothing of bob's"
    for number in range(form_checker.MAX_KEPT + 5):
        checker.resolve(form, str(number))
    assert len(checker._kept) <= form_checker.MAX_KEPT and checker._num_bytes <= form_checker.MAX_KEPT_BYTES


def test_a_process_that_ends_is_named_and_the_next_check_has_another():
    checker = FormChecker(CONFIG)
    try:
        form = StructuredOutputsParams(json=large(z={}))
        checker.resolve(form, "")
        assert checker._process is not None
        started = checker._started
        checker._process.kill()
        checker._started = lambda: checker._process  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(EngineGenerateError, match="was terminated by SIGKILL"):
            checker.resolve(form, "other")
        checker._started = started  # type: ignore[method-assign]
        assert checker.resolve(form, "other").backend
    finally:
        checker.close()
    with pytest.raises(EngineGenerateError, match="shut down"):
        checker.resolve(form, "third")

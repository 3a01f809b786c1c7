"""Calls on every rank: functions cross by their import names, arguments and results as plain values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.core.serial import MessageDecoder, MessageEncoder
from quire.core.wire import ToCore, UtilityCall
from quire.core.worker_call import METHODS, answer_call, make_call
from quire.errors import UnsupportedError, ValidationError
from quire.worker.worker import Worker
from tests.parallel import rank_functions

WORKER: Any = SimpleNamespace(
    communicator=SimpleNamespace(rank=3), model=[1, 2], memory_parts=lambda: {1: 2}, follow=lambda: None
)


def test_a_function_crosses_by_its_name_with_its_arguments():
    call = make_call(rank_functions.describe, ("hello",), {"times": 2})
    assert call.function == "tests.parallel.rank_functions:describe"
    frames = [bytes(frame) for frame in MessageEncoder().encode(UtilityCall(1, "collective_rpc", call))]
    message = MessageDecoder(ToCore).decode(frames)
    assert isinstance(message, UtilityCall) and message.argument == call
    found = answer_call(WORKER, message.argument)
    assert found["rank"] == 3 and found["words"] == ["hello"] * 2
    named = make_call("tests.parallel.rank_functions:describe", ("hello",), {"times": 2})
    assert named == call


def test_a_function_may_be_given_the_model():
    assert answer_call(WORKER, make_call("builtins:len", (), None, of_model=True)) == 2


def test_methods_are_those_that_a_rank_runs_by_itself():
    assert all(callable(getattr(Worker, name)) for name in METHODS)
    assert answer_call(WORKER, make_call("memory_parts", (), None)) == {1: 2}
    for name in ("follow", "no_such_method", "_runner"):
        with pytest.raises(ValidationError, match="cannot be called on every rank") as caught:
            make_call(name, (), None)
        assert "memory_parts" in (caught.value.hint or "")


def test_a_function_without_an_import_name_is_refused_with_the_reason():
    def inner(worker: Any) -> None:
        pass

    for function in (lambda worker: 1, inner):
        with pytest.raises(UnsupportedError, match="no code is sent") as caught:
            make_call(function, (), None)
        assert "top level of a module" in (caught.value.hint or "")


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(ValidationError, match="an argument of collective_rpc"):
        make_call("memory_parts", (object(),), None)
    worker = SimpleNamespace(model=object())
    with pytest.raises(ValidationError, match="the result of collective_rpc has the type object"):
        answer_call(worker, make_call(rank_functions.model_of, (), None))


@pytest.mark.parametrize("name", ["no_such_module_at_all:f", "os:no_such_function", "os:environ"])
def test_a_name_that_leads_nowhere_is_refused(name: str):
    with pytest.raises(ValidationError, match="cannot be imported|is not a function"):
        answer_call(WORKER, make_call(name, (), None))


def test_tuples_and_structs_become_plain_values():
    class Point(msgspec.Struct):
        x: int

    assert make_call("memory_parts", [(1, 2), Point(3)], None).args == [(1, 2), {"x": 3}]

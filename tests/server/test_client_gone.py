"""A client that goes away frees its pages within two steps, whatever its request is doing. Steps are counted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.robustness.http_streams import request_bytes
from tests.server.hand_core import HandCore, HandEngine
from tests.server.servers import RunningServer

MAX_NUM_SEQS = 3
LONG_TEXT = "one two three four five six seven eight nine ten " * 6  # five steps of prefill
FORMS = {
    "completion": ("/v1/completions", {}),
    "completion stream": ("/v1/completions", {"stream": True}),
    "chat": ("/v1/chat/completions", {}),
    "chat stream": ("/v1/chat/completions", {"stream": True}),
}


class House:
    """A server on a core that is turned by hand."""

    def __init__(self) -> None:
        self.core = HandCore(MAX_NUM_SEQS)
        self.engine = HandEngine(self.core)
        self.server = RunningServer(self.engine, sse_keep_alive_interval=0)

    def ask(self, path: str, text: str | list[str], *, is_alone: bool = True, **body: Any) -> socket.socket:
        """A request that the core has got; nothing of its prompt is in the prefix cache."""
        assert not is_alone or self.core.reset_prefix_cache()
        fields = {"model": "leaf", "max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 3, **body}
        fields |= {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        client = socket.create_connection(("127.0.0.1", self.server.port))
        client.sendall(request_bytes(path, fields))
        assert self.core.has_mail(10), "the request has reached the core"
        return client

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """Turn until it holds; the front-end has taken in every step by then."""
        for _ in range(100):
            if condition():
                return
            stats = self.engine.last_stats
            self.core.turn()
            self.server.wait_until(lambda stats=stats: self.engine.last_stats is not stats)
        raise AssertionError("it never came to be")

    def steps_until_free(self, client: socket.socket, num_pages: int) -> int:
        """Close `client` while a step runs; turns of the core until only `num_pages` are held, that step included."""
        num_wanted = self.others
        before = self.core.num_turns
        client.close()
        self.core.turn()  # the step that ran when the client went away
        self.server.wait_until(lambda: self.engine.wanted == num_wanted)
        while self.core.num_pages > num_pages or self.core.num_requests > num_wanted:
            self.core.has_mail(1)
            self.core.turn()
            assert self.core.num_turns - before < 10, "its pages are never freed"
        return self.core.num_turns - before

    others = 0


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    house = House()
    with house.server:
        yield house
    house.core.close()


@pytest.fixture
def empty(house: House) -> Iterator[House]:
    """The house, left empty again."""
    house.others = 0
    yield house
    house.others = 0
    house.turn_until(lambda: not house.core.num_requests)
    house.server.wait_until(lambda: not house.engine._streams)
    assert house.core.num_pages == 0


@pytest.mark.parametrize("form", FORMS)
def test_while_it_decodes(empty: House, form: str):
    path, body = FORMS[form]
    client = empty.ask(path, "Say it", **body)
    empty.turn_until(lambda: len(_token_counts(empty)) == 1 and min(_token_counts(empty)) >= 3)
    assert empty.core.num_pages > 0
    assert empty.steps_until_free(client, 0) <= 2


@pytest.mark.parametrize("form", FORMS)
def test_while_its_prompt_is_computed_in_chunks(empty: House, form: str):
    path, body = FORMS[form]
    client = empty.ask(path, LONG_TEXT, **body)
    empty.turn_until(lambda: empty.core.num_pages > 0)
    assert max(_token_counts(empty)) == 0
    assert empty.steps_until_free(client, 0) <= 2


@pytest.mark.parametrize("form", FORMS)
def test_while_it_waits_for_its_turn(empty: House, form: str):
    path, body = FORMS[form]
    other = empty.ask("/v1/completions", "Others", stream=True, n=MAX_NUM_SEQS, max_tokens=12)
    empty.turn_until(lambda: empty.engine.last_stats.num_running == MAX_NUM_SEQS)
    client = empty.ask(path, "Say it", is_alone=False, **body)
    empty.core.turn()
    assert empty.core.num_requests == MAX_NUM_SEQS + 1
    empty.others = MAX_NUM_SEQS
    assert empty.steps_until_free(client, 10**6) <= 2
    empty.turn_until(lambda: not empty.core.num_requests)
    while other.recv(1 << 16):  # the other stream has lost nothing
        pass
    other.close()


@pytest.mark.parametrize("form", FORMS)
def test_while_some_of_its_answers_wait_for_the_first(empty: House, form: str):
    path, body = FORMS[form]
    client = empty.ask(path, LONG_TEXT, n=3, **body)
    empty.turn_until(lambda: empty.core.num_pages > 0 and empty.core.num_requests == 3)
    assert empty.engine.last_stats.num_running <= 1
    assert empty.steps_until_free(client, 0) <= 2


@pytest.mark.parametrize("form", FORMS)
def test_while_all_of_its_answers_decode(empty: House, form: str):
    path, body = FORMS[form]
    client = empty.ask(path, LONG_TEXT, n=3, **body)
    empty.turn_until(lambda: len(_token_counts(empty)) == 3 and min(_token_counts(empty)) >= 2)
    assert empty.steps_until_free(client, 0) <= 2


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_with_several_prompts(empty: House, stream: bool):
    client = empty.ask("/v1/completions", ["One", LONG_TEXT], stream=stream)
    empty.turn_until(lambda: len(_token_counts(empty)) == 2 and max(_token_counts(empty)) >= 1)
    assert empty.steps_until_free(client, 0) <= 2


def _token_counts(house: House) -> list[int]:
    """Tokens of each answer so far, as the front-end knows."""
    return [len(state.token_ids) for _, state in list(house.engine._front._outputs._by_handle.values())]

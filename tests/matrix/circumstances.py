"""The circumstances of the matrix: what is done beside a feature, and what must hold then."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.matrix.answers import Answer, Response, response_of
from tests.matrix.apis import MESSAGES, RESPONSES, Api, Said
from tests.matrix.features import FEATURES
from tests.matrix.serving import CHATS, DRAFTING, PLAIN, USAGE, Servers


class Cell:
    """A feature under test.

    Args:
        servers: all of them.
        name: of the feature.
        alone: responses to the features, each alone, whole, with nothing else asked for; filled as they are needed.
    """

    def __init__(self, servers: Servers, name: str, alone: dict[tuple[str, str], Response]) -> None:
        self.servers = servers
        self.name = name
        self.feature = FEATURES[name]
        self._alone = alone

    def alone(self, engine: str = PLAIN) -> Response:
        """The response in the plainest circumstances; its answer is valid."""
        if (self.name, engine) not in self._alone:
            response = self.servers.ask(self.feature, self.feature.body(), engine=engine)
            self.check(response.answer)
            self._alone[self.name, engine] = response
        return self._alone[self.name, engine]

    def ask(self, **fields: Any) -> Response:
        """The response with `fields`: a stream comes to the same as a whole answer."""
        body = self.feature.body(**fields)
        whole, streamed = self.ask_at_once([body, {**body, "stream": True, "stream_options": USAGE}])
        assert streamed.same() == whole.same()
        for answer in whole.answers:
            check_reason(answer)
        return whole

    def ask_at_once(self, bodies: Sequence[dict[str, Any]]) -> list[Response]:
        """The responses to several chats."""
        return [response_of(one) for one in self.servers.exchanges(self.feature, CHATS, bodies)]

    def check(self, answer: Answer) -> None:
        """A complete answer is valid."""
        self.feature.check(answer)
        check_reason(answer)


def check_reason(answer: Answer) -> None:
    """The reason of its end does not contradict what an answer says."""
    assert answer.finish_reason in ("stop", "tool_calls", "length"), answer
    assert (answer.finish_reason == "tool_calls") <= bool(answer.calls)
    assert (answer.finish_reason == "stop") <= (not answer.calls)


def check_beginning(cut: Answer, whole: Answer) -> None:
    """All that `cut` says is what `whole` begins with."""
    assert len(cut.calls) <= len(whole.calls)
    for part, all_of_it in zip(cut.texts, whole.texts):
        assert all_of_it.startswith(part), (part, all_of_it)


def streamed(cell: Cell) -> None:
    response = cell.servers.ask(cell.feature, cell.feature.body(stream=True, stream_options=USAGE))
    assert response.num_events > 4 and response.same() == cell.alone().same()


def several_answers(cell: Cell) -> None:
    response = cell.ask(n=3)
    seeds = [cell.feature.body()["seed"] + index for index in (1, 2)]
    singles = cell.ask_at_once([cell.feature.body(seed=seed) for seed in seeds])
    assert response.answers == [cell.alone().answer, *(one.answer for one in singles)]
    for answer in response.answers:
        if cell.feature.is_structured:
            cell.check(answer)


def logprobs(cell: Cell) -> None:
    response = cell.ask(logprobs=True, top_logprobs=2)
    entries = response.answer.logprobs
    assert len(entries) == response.usage["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    written = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    for text in response.answer.texts:
        assert text in written
    response.answer.logprobs = []
    assert response.same() == cell.alone().same()


def seeds(cell: Cell) -> None:
    answer = cell.ask(seed=8).answer  # twice
    if cell.feature.is_structured:
        cell.check(answer)


def stop_text(cell: Cell) -> None:
    whole = cell.alone().answer
    longest = max(whole.texts, key=len)
    stop = longest[len(longest) // 2 :][:3]
    response = cell.ask(stop=[stop])
    assert response.answer.stop_reason == stop and response.answer.finish_reason in ("stop", "tool_calls")
    check_beginning(response.answer, whole)
    assert not any(stop in text for text in response.answer.texts)


def cut_by_max_tokens(cell: Cell) -> None:
    whole = cell.alone()
    max_tokens = whole.usage["completion_tokens"] // 2
    response = cell.ask(max_tokens=max_tokens)
    assert response.answer.finish_reason == "length" and response.usage["completion_tokens"] == max_tokens
    for mark in ("<|", "<tool_call>"):  # what was cut before it told what it is
        response.answer.content = response.answer.content.partition(mark)[0]
    check_beginning(response.answer, whole.answer)


def greedy(cell: Cell) -> None:
    cell.check(cell.servers.ask(cell.feature, cell.feature.body(temperature=0.0)).answer)


def penalties(cell: Cell) -> None:
    fields = {
        "presence_penalty": 0.3,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.02,
        "logit_bias": {"300": -5.0},
    }
    answer = cell.servers.ask(cell.feature, cell.feature.body(**fields)).answer
    check_reason(answer)
    if cell.feature.is_structured:
        cell.check(answer)


def min_tokens(cell: Cell) -> None:
    response = cell.servers.ask(cell.feature, cell.feature.body(min_tokens=10))
    assert response.same() == cell.alone().same()


def ignored_end(cell: Cell) -> None:
    limit = cell.alone().usage["completion_tokens"] + 20
    response = cell.ask(ignore_eos=True, max_tokens=limit)
    assert (response.usage["completion_tokens"], response.answer.finish_reason) == (limit, "length")
    if cell.feature.is_structured:
        cell.feature.check(response.answer)


def prefix_hit(cell: Cell) -> None:
    cell.alone()
    again = cell.servers.ask(cell.feature, cell.feature.body())
    assert again.num_cached > 0 and again.same() == cell.alone().same()


def beams(cell: Cell) -> None:
    fields = {"use_beam_search": True, "n": 2, "temperature": 0.0}
    response = cell.servers.ask(cell.feature, cell.feature.body(**fields))
    assert len(response.answers) == 2
    for answer in response.answers:
        check_reason(answer)
    assert response.same() == cell.servers.ask(cell.feature, cell.feature.body(**fields)).same()
    cell.check(response.answers[0])


def in_a_crowd(engine: str) -> Callable[[Cell], None]:
    """All features at once on an engine of its own settings, each as alone on the plain one."""

    def run(cell: Cell) -> None:
        for copy in cell.servers.crowd(engine).responses[cell.name]:
            assert copy.same() == cell.alone().same()

    return run


def in_a_small_pool(engine: str) -> Callable[[Cell], None]:
    """As `in_a_crowd`, with fewer pages than are needed."""

    def run(cell: Cell) -> None:
        assert cell.servers.crowd(engine).num_preemptions >= 5
        in_a_crowd(engine)(cell)

    return run


def preempted(engine: str, *, is_swapped: bool) -> Callable[[Cell], None]:
    """As `in_a_crowd`, and more urgent requests take every one's row in the middle."""

    def run(cell: Cell) -> None:
        crowd = cell.servers.crowd(engine)
        assert crowd.num_swaps >= len(FEATURES) if is_swapped else not crowd.num_swaps
        (response,) = crowd.responses[cell.name]
        assert response.metrics["preemptions"] > 0
        assert response.same() == cell.alone().same()

    return run


def with_drafts(engine: str) -> Callable[[Cell], None]:
    """As `in_a_crowd`, as streams, and tokens are guessed ahead."""

    def run(cell: Cell) -> None:
        assert cell.servers.crowd(engine).has_drafted
        in_a_crowd(engine)(cell)

    return run


def eight_bit_cache(cell: Cell) -> None:
    alone = cell.servers.ask(cell.feature, cell.feature.body(), engine="fp8")
    check_reason(alone.answer)
    if cell.feature.is_structured:
        cell.check(alone.answer)
    for copy in cell.servers.crowd("fp8").responses[cell.name]:
        assert copy.same() == alone.same()


def through(api: Api) -> Callable[[Cell], None]:
    """Another API says what a chat says, whole and as a stream."""

    def run(cell: Cell) -> None:
        chat = cell.alone().answer
        arguments = [(name, json.loads(text)) for name, text in chat.calls]
        meant = Said(chat.content, chat.reasoning, arguments, api.ends[chat.finish_reason or ""])
        body = api.body(cell.feature.body())
        bodies = [{**body, "stream": stream} for stream in (False, True)]
        for exchange in cell.servers.exchanges(cell.feature, api.path, bodies):
            assert api.read(exchange) == meant

    return run


def as_a_completion(cell: Cell) -> None:
    body = cell.feature.body()
    chat = cell.servers.exchange(cell.feature, CHATS, {**body, "return_token_ids": True, "max_tokens": 1})
    del body["messages"]
    body["prompt"] = json.loads(chat.body)["prompt_token_ids"]
    bodies = [{**body, "stream": stream} for stream in (False, True)]
    for stream, exchange in enumerate(cell.servers.exchanges(cell.feature, "/v1/completions", bodies)):
        parts = [json.loads(one) for one in exchange.events[:-1]] if stream else [json.loads(exchange.body)]
        choices = [choice for part in parts for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices) == cell.alone().answer.content
        assert choices[-1]["finish_reason"] == cell.alone().answer.finish_reason


def killed(cell: Cell) -> None:
    response = cell.servers.resumed(cell.name)
    assert response.metrics["restarts"] > 0 and response.same() == cell.alone().same()


@dataclass(frozen=True)
class Circumstance:
    """A row of the matrix.

    Attributes:
        title: what the page calls it.
        run: raises AssertionError unless the feature works, `RefusedError` when the request is refused.
    """

    title: str
    run: Callable[[Cell], None]


CIRCUMSTANCES: dict[str, Circumstance] = {
    "stream": Circumstance("`stream`", streamed),
    "n": Circumstance("`n` = 3", several_answers),
    "logprobs": Circumstance("`logprobs`", logprobs),
    "seed": Circumstance("`seed`", seeds),
    "greedy": Circumstance("`temperature` = 0", greedy),
    "penalties": Circumstance("penalties and `logit_bias`", penalties),
    "stop": Circumstance("`stop`", stop_text),
    "max_tokens": Circumstance("cut by `max_tokens`", cut_by_max_tokens),
    "min_tokens": Circumstance("`min_tokens`", min_tokens),
    "ignore_eos": Circumstance("`ignore_eos`", ignored_end),
    "beams": Circumstance("`use_beam_search`", beams),
    "prefix": Circumstance("prefix found in the cache", prefix_hit),
    "chunks": Circumstance("in a batch with all others, prompts cut into chunks", in_a_crowd("chunks")),
    "pool": Circumstance("in too small a pool of pages", in_a_small_pool("pool")),
    "recompute": Circumstance(
        "preempted (policy `priority`), computed again", preempted("recompute", is_swapped=False)
    ),
    "swap": Circumstance("preempted (policy `priority`), swapped", preempted("swap", is_swapped=True)),
    "fair": Circumstance("policy `fair`, in too small a pool", in_a_small_pool("fair")),
    "fp8": Circumstance("KV cache of eight bits", eight_bit_cache),
    "completions": Circumstance("`/v1/completions`", as_a_completion),
    "responses": Circumstance("`/v1/responses`", through(RESPONSES)),
    "messages": Circumstance("`/v1/messages`", through(MESSAGES)),
    "killed": Circumstance("engine core killed mid-stream", killed),
    **{engine: Circumstance(f"drafts of {method}", with_drafts(engine)) for engine, method in DRAFTING.items()},
}

"""Tool calls in Hermes form (measured) and answers that use a tool response.

The chat template lists the tools of a sample between <tools> and </tools>; the
answer is a <tool_call> block. Called by the registry.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from training.corpus import chat, words
from training.corpus.base import Sample, assistant, maybe_system, roughen, user
from training.corpus.tool_specs import SPECS, Spec


def _schema(rng: random.Random, spec: Spec) -> tuple[dict[str, Any], list[str]]:
    """Draws names for one tool and returns (its OpenAI-style schema, argument names)."""
    names: list[str] = []
    properties: dict[str, Any] = {}
    for arg in spec.args:
        name = rng.choice([n for n in arg.names if n not in names] or [arg.names[0] + "2"])
        names.append(name)
        properties[name] = {"type": arg.type}
        if rng.random() < 0.7:
            properties[name]["description"] = arg.description
        if arg.enum:
            properties[name]["enum"] = list(arg.enum)
    function = {
        "name": rng.choice(spec.names),
        "description": spec.description + rng.choice(("", ".")),
        "parameters": {"type": "object", "properties": properties, "required": names},
    }
    return {"type": "function", "function": function}, names


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Writes one tool call as the model should."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True)
class Offer:
    """One offered tool: its kind, its schema and the names of its arguments."""

    spec: Spec
    schema: dict[str, Any]
    names: list[str]

    @property
    def name(self) -> str:
        """Function name in the schema."""
        return self.schema["function"]["name"]


@dataclass(frozen=True)
class Use:
    """One request for an offered tool and what comes of it."""

    offer: Offer
    values: list[Any]
    request: str

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the right call."""
        return dict(zip(self.offer.names, self.values))

    @property
    def call(self) -> dict[str, Any]:
        """The right call."""
        return {"name": self.offer.name, "arguments": self.arguments}

    @property
    def key(self) -> str:
        """Split key: kind of tool and argument values."""
        return f"tool:{self.offer.spec.names[0]}:" + ":".join(map(str, self.values))


def _offers(rng: random.Random) -> list[Offer]:
    """Draws one to three different tools."""
    return [Offer(s, *_schema(rng, s)) for s in rng.sample(SPECS, rng.choice((1, 1, 2, 2, 3)))]


def _use(rng: random.Random, offers: list[Offer]) -> Use:
    """Draws one of the tools, argument values and a request."""
    offer = rng.choice(offers)
    values: list[Any] = []
    for arg in offer.spec.args:
        value = arg.value(rng)
        while arg.type == "string" and value in values:
            value = arg.value(rng)
        values.append(value)
    return Use(offer, values, roughen(rng, rng.choice(offer.spec.requests).format(*values)))


def _answered(rng: random.Random, use: Use) -> tuple[list[dict[str, Any]], str, Any]:
    """Returns (messages from the request to the tool response, final sentence, result)."""
    spec = use.offer.spec
    if spec.result_key == "sum":
        result: Any = use.values[0] + use.values[1]
    elif spec.result_key == "product":
        result = use.values[0] * use.values[1]
    else:
        result = spec.result(rng)
    r = rng.random()
    content = {**use.arguments, spec.result_key: result} if r < 0.3 else {spec.result_key: result}
    response = str(result) if r > 0.85 else json.dumps(content)
    made = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": use.call}]}
    sentence = spec.results[0].format(*use.values, r=result)
    return [user(use.request), made, {"role": "tool", "content": response}], sentence, result


def _history(rng: random.Random, offers: list[Offer], turns: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Earlier turns of a training conversation: (messages, split keys)."""
    messages, keys = maybe_system(rng, 0.2), []
    for _ in range(turns):
        use = _use(rng, offers)
        shown, sentence, _ = _answered(rng, use)
        messages += shown + [assistant(sentence)]
        keys.append(use.key)
    return messages, keys


def make_tool_call(rng: random.Random, single: bool) -> Sample:
    """A request that one of one to three offered tools can serve."""
    offers = _offers(rng)
    messages, keys = _history(rng, offers, 0 if single else rng.choice((0, 0, 1, 2, 3)))
    use = _use(rng, offers)
    return Sample(
        "tool_calls",
        messages + [user(use.request)],
        call_text(use.offer.name, use.arguments),
        {"kind": "tools", "calls": [use.call]},
        (*keys, use.key),
        [o.schema for o in offers],
    )


def make_tool_answer(rng: random.Random, single: bool) -> Sample:
    """A tool response turned into a sentence."""
    offers = _offers(rng)
    use = _use(rng, offers)
    shown, sentence, result = _answered(rng, use)
    first = [str(use.values[0])] if "{0}" in use.offer.spec.results[0] else []
    return Sample(
        "tool_answers",
        maybe_system(rng, 0.2) + shown,
        sentence,
        {"kind": "text", "must": [str(result)] + first},
        (use.key,),
        [o.schema for o in offers],
    )


def make_no_tool(rng: random.Random, single: bool) -> Sample:
    """Small talk while tools are offered: a plain answer is right."""
    offers = _offers(rng)
    sample = chat.make_chat(rng, True)
    sample.task, sample.tools = "no_tool", [o.schema for o in offers]
    return sample


def make_two_calls(rng: random.Random, single: bool) -> Sample:
    """One request about two values of a one-argument tool: two calls."""
    spec = rng.choice([s for s in SPECS if len(s.args) == 1 and s.args[0].type == "string"])
    schema, names = _schema(rng, spec)
    first, second = spec.args[0].value(rng), spec.args[0].value(rng)
    while second == first:
        second = spec.args[0].value(rng)
    request = roughen(rng, rng.choice(spec.requests).format(words.join_and([first, second])))
    name = schema["function"]["name"]
    calls = [{"name": name, "arguments": {names[0]: v}} for v in (first, second)]
    answer = "\n".join(call_text(name, c["arguments"]) for c in calls)
    return Sample(
        "two_tool_calls",
        [user(request)],
        answer,
        {"kind": "tools", "calls": calls},
        (f"tool:{spec.names[0]}:{first}:{second}",),
        [schema],
    )

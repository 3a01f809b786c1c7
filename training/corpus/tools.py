"""Tool calls in Hermes form (measured) and answers that use a tool response.

The chat template lists the tools of a sample between <tools> and </tools>; the
answer is a <tool_call> block. Called by the registry.
"""

from __future__ import annotations

import json
import random
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
    function = {"name": rng.choice(spec.names), "description": spec.description + rng.choice(("", ".")),
                "parameters": {"type": "object", "properties": properties, "required": names}}
    return {"type": "function", "function": function}, names


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Writes one tool call as the model should."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _draw(rng: random.Random) -> tuple[list[dict[str, Any]], Spec, str, dict[str, Any], list[Any]]:
    """Draws offered tools, the right one of them, its name, arguments and values."""
    specs = rng.sample(SPECS, rng.choice((1, 1, 2, 2, 3)))
    schemas = [_schema(rng, s) for s in specs]
    i = rng.randrange(len(specs))
    values: list[Any] = []
    for arg in specs[i].args:
        value = arg.value(rng)
        while arg.type == "string" and value in values:
            value = arg.value(rng)
        values.append(value)
    return ([s for s, _ in schemas], specs[i], schemas[i][0]["function"]["name"],
            dict(zip(schemas[i][1], values)), values)


def _key(spec: Spec, values: list[Any]) -> str:
    return f"tool:{spec.names[0]}:" + ":".join(map(str, values))


def _result(rng: random.Random, spec: Spec, values: list[Any]) -> Any:
    """What the tool returns: true for arithmetic, made up otherwise."""
    if spec.result_key == "sum":
        return values[0] + values[1]
    return values[0] * values[1] if spec.result_key == "product" else spec.result(rng)


def make_tool_call(rng: random.Random, single: bool) -> Sample:
    """A request that one of one to three offered tools can serve."""
    tools, spec, name, arguments, values = _draw(rng)
    request = roughen(rng, rng.choice(spec.requests).format(*values))
    call = {"name": name, "arguments": arguments}
    return Sample("tool_calls", maybe_system(rng, 0.2) + [user(request)], call_text(name, arguments),
                  {"kind": "tools", "calls": [call]}, (_key(spec, values),), tools)


def make_tool_answer(rng: random.Random, single: bool) -> Sample:
    """A tool response turned into a sentence; sometimes another request follows."""
    tools, spec, name, arguments, values = _draw(rng)
    request = roughen(rng, rng.choice(spec.requests).format(*values))
    result = _result(rng, spec, values)
    r = rng.random()
    content: Any = {spec.result_key: result}
    if r < 0.3:
        content = {**arguments, spec.result_key: result}
    response = str(result) if r > 0.85 else json.dumps(content)
    answer = spec.results[0].format(*values, r=result)
    call = {"name": name, "arguments": arguments}
    made = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    messages = maybe_system(rng, 0.2) + [user(request), made, {"role": "tool", "content": response}]
    keys = (_key(spec, values),)
    if not single and rng.random() < 0.4:
        again = [a.value(rng) for a in spec.args]
        arguments = dict(zip(arguments, again))
        messages += [assistant(answer), user(rng.choice(spec.requests).format(*again))]
        return Sample("tool_calls", messages, call_text(name, arguments),
                      {"kind": "tools", "calls": [{"name": name, "arguments": arguments}]},
                      keys + (_key(spec, again),), tools)
    return Sample("tool_answers", messages, answer,
                  {"kind": "text", "must": [str(result)] + [str(v) for v in values if spec.results[0].count("{0}")][:1]},
                  keys, tools)


def make_no_tool(rng: random.Random, single: bool) -> Sample:
    """Small talk while tools are offered: a plain answer is right."""
    tools, *_ = _draw(rng)
    sample = chat.make_chat(rng, True)
    sample.task, sample.tools, sample.keys = "no_tool", tools, ()
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
    return Sample("two_tool_calls", [user(request)], answer, {"kind": "tools", "calls": calls},
                  (f"{_key(spec, [first])}:{second}",), [schema])

"""Calls that are forced, thousands of them, in an engine at high concurrency: each is a valid call of an allowed tool.

`python -m tests.structured.forced_tools --count 5000` is `make test-forced-tools`: it prints one figure last, the
violations. Every answer is read as a server reads it, whole and in parts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from quire import LLM
from quire.config.server import ApiConfig, LimitsConfig
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.models.hub import resolve_model_path
from quire.parsers.events import Content, Reasoning
from quire.server.chat.answer_events import ToolCallDelta, ToolCallStart
from quire.server.chat.parsing import Parsing, ParsingPlan
from quire.server.chat.protocol.chat import ChatRequest, chat_params
from quire.server.chat.protocol.warnings import Warnings
from tests.structured.test_forced import FORMATS, MARKS, OFFERED, TOOLS

TASKS = ("What is the weather in Paris?", "Plot 1, 2 and 3.", "What time is it?", "Add 2 and 5.", "Tell me a story.")
NAMES = [tool["name"] for tool in TOOLS]
SCHEMAS = {tool["name"]: tool.get("parameters") or {"maxProperties": 0} for tool in TOOLS}
MAX_TOKENS = 128


@dataclass(frozen=True)
class Asked:
    """A request that forces calls.

    Attributes:
        names: of the tools that may be called.
        max_calls: None = any number.
        budget: tokens of thinking; None = the model cannot think.
    """

    plan: ParsingPlan
    params: SamplingParams
    prompt: list[int]
    names: frozenset[str]
    max_calls: int | None
    budget: int | None


class Forcing:
    """Requests for one model.

    Args:
        engine: has a tokenizer and a template.
        formats: of calls.
    """

    def __init__(self, engine: Any, formats: Sequence[str] = FORMATS) -> None:
        self._engine = engine
        self._formats = formats
        self._parsings: dict[tuple[str, bool], Parsing] = {}

    def request(self, rng: random.Random) -> Asked:
        """Any format, any choice that forces calls, after thinking or not."""
        form = rng.choice(self._formats)
        thinks = rng.random() < 0.3 and form != "openai"  # which has thinking of its own, and no budget for it
        names, fields = NAMES, dict[str, Any]()
        kind = rng.choice(["required", "one", "named", "allowed"])
        if kind == "named":
            names = [rng.choice(NAMES)]
            fields["tool_choice"] = named(names[0])
        elif kind == "allowed":
            names = rng.sample(NAMES, 2)
            allowed = {"mode": "required", "tools": [named(name) for name in names]}
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        else:
            fields["tool_choice"] = "required"
        if kind == "one":
            fields["parallel_tool_calls"] = False
        budget = rng.choice([0, 3, 12]) if thinks else None
        system = {"role": "system", "content": "Call a tool." + (" /think" if thinks else "")}
        body = ChatRequest(
            messages=[system, {"role": "user", "content": rng.choice(TASKS)}], tools=OFFERED, temperature=1.0,
            seed=rng.randrange(1 << 40), max_tokens=MAX_TOKENS, thinking_token_budget=budget, **fields,
        )  # fmt: skip
        plan = self._parsing(form, thinks=thinks).plan(body, Warnings())
        assert plan is not None, "calls are read"
        prompt = self._prompt(body, begins_thinking=thinks and rng.random() < 0.5)
        params = chat_params(body, {}, LimitsConfig())
        plan.constrain(params, prompt)
        max_calls = 1 if kind in ("one", "named") else None
        return Asked(plan, params, prompt, frozenset(names), max_calls, budget)

    def _parsing(self, name: str, *, thinks: bool) -> Parsing:
        key = (name, thinks)
        if key not in self._parsings:
            config = ApiConfig(tool_call_parser=name, reasoning_parser="think" if thinks else None)
            self._parsings[key] = Parsing(config, self._engine)
        return self._parsings[key]

    def _prompt(self, body: ChatRequest, *, begins_thinking: bool) -> list[int]:
        template, tokenizer = self._engine.chat_template, self._engine.tokenizer
        assert template is not None and tokenizer is not None, "leaf has both"
        text = template.render(body.messages or [], tools=body.tools)
        return tokenizer.encode(text + ("<think>\n" if begins_thinking else ""), add_special_tokens=False)


def named(name: str) -> dict[str, Any]:
    """A choice of one tool."""
    return {"type": "function", "function": {"name": name}}


@dataclass
class Told:
    """What the events of an answer come to."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    reason: str | None
    num_reasoning: int


def read(asked: Asked, answer: CompletionOutput, rng: random.Random | None = None) -> Told:
    """The answer as a server tells it; with `rng` as a stream, cut at random."""
    reader = asked.plan.answer(asked.prompt)
    told = Told("", "", [], reader.finish_reason(answer.finish_reason), 0)
    text = answer.text
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5)) if rng is not None else []
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for index, part in enumerate(parts):
        is_end = index == len(parts) - 1
        for event in reader.push(part, answer.token_ids if is_end else (), is_end=is_end):
            if isinstance(event, Content):
                told.content += event.text
            elif isinstance(event, Reasoning):
                told.reasoning += event.text
            elif isinstance(event, ToolCallStart):
                told.calls.append((event.name, ""))
            elif isinstance(event, ToolCallDelta):
                name, arguments = told.calls[event.index]
                told.calls[event.index] = (name, arguments + event.text)
    told.reason, told.num_reasoning = reader.finish_reason(answer.finish_reason), reader.num_reasoning
    return told


def problem(asked: Asked, told: Told) -> str | None:
    """What is wrong with an answer whose calls were forced; None = nothing."""
    if told.reason not in ("tool_calls", "length"):
        return f"it ended with {told.reason}"
    if not {name for name, _ in told.calls} <= asked.names:
        return "a tool that is not allowed"
    if asked.max_calls is not None and len(told.calls) > asked.max_calls:
        return "too many calls"
    if asked.budget is not None and told.num_reasoning > asked.budget:
        return f"{told.num_reasoning} tokens of thinking"
    whole = told.calls if told.reason == "tool_calls" else told.calls[:-1]
    if told.reason == "tool_calls" and (not told.calls or told.content):
        return "no call, or text beside it"
    return next((found for name, text in whole if (found := _argument_problem(name, text)) is not None), None)


def _argument_problem(name: str, text: str) -> str | None:
    try:
        value = json.loads(text)
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{name}: {str(error).splitlines()[0]}"
    return None if isinstance(value, dict) else "the arguments are no object"


def run(llm: LLM, count: int, seed: int, formats: Sequence[str] = FORMATS) -> tuple[Counter[str], list[str]]:
    """(answers by how they ended, violations) of `count` forced requests."""
    rng = random.Random(seed)
    forcing = Forcing(llm.llm_engine, formats)
    asked = [forcing.request(rng) for _ in range(count)]
    prompts = [{"prompt_token_ids": one.prompt} for one in asked]
    outputs: list[RequestOutput] = llm.generate(prompts, [one.params for one in asked], use_tqdm=False)
    ends: Counter[str] = Counter()
    violations = []
    for one, output in zip(asked, outputs, strict=True):
        (answer,) = output.outputs
        told = read(one, answer)
        ends[str(told.reason)] += 1
        found = problem(one, told)
        if found is None and read(one, answer, rng) != told:
            found = "its stream is not the whole"
        if found is not None:
            violations.append(f"{found}: {answer.text!r}")
    return ends, violations


@contextmanager
def with_control_tokens() -> Iterator[str]:
    """The directory of a model of random weights whose vocabulary has the formats' marks as control tokens."""
    source = Path(resolve_model_path("leaf", None, None))
    with tempfile.TemporaryDirectory() as directory:
        for file in source.iterdir():
            if file.suffix == ".json":
                shutil.copy(file, directory)
        config, tokenizer = Path(directory, "config.json"), Path(directory, "tokenizer.json")
        arch, files = json.loads(config.read_text()), json.loads(tokenizer.read_text())
        known = {token["content"]: token for token in files["added_tokens"]}
        for mark in MARKS:
            if mark in known:
                known[mark]["special"] = True
            else:
                files["added_tokens"].append({**files["added_tokens"][0], "id": arch["vocab_size"], "content": mark})
                arch["vocab_size"] += 1
        config.write_text(json.dumps(arch))
        tokenizer.write_text(json.dumps(files))
        yield directory


def main() -> None:
    """Force calls of leaf, of random weights, and of random weights with control tokens."""
    parser = argparse.ArgumentParser(description="Forced calls, judged from outside.")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = 0
    with with_control_tokens() as directory:
        models: tuple[tuple[str, Mapping[str, Any]], ...] = (
            ("leaf", {}),
            ("random weights", {"load_format": "dummy"}),
            ("random weights, control tokens", {"load_format": "dummy", "model": directory}),
        )
        for index, (name, settings) in enumerate(models):
            count = (args.count + index) // len(models)
            llm = LLM(max_model_len=1024, max_num_seqs=64, **settings)
            ends, violations = run(llm, count, args.seed + index)
            llm.llm_engine.shutdown()
            print(f"{name}: {count} requests, {dict(ends)}, {len(violations)} violations", flush=True)
            for violation in violations[:5]:
                print("  violation:", violation)
            total += len(violations)
    print(f"violations: {total}")
    raise SystemExit(total > 0)


if __name__ == "__main__":
    main()

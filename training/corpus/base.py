"""What a training sample is, how answers are checked, and the held-out split.

Used by every task module, by the corpus registry and by the evaluation. There
is no state: a sample is held out if a hash of one of its slot keys says so.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

HELD_OUT_SHARE = 0.1  # share of all keys that training never sees


@dataclass
class Sample:
    """One conversation that ends with the answer to learn.

    Attributes:
        task: Name of the task, e.g. "sums".
        messages: Chat messages before the answer (roles system, user, assistant, tool).
        answer: The reply of the assistant, without the end-of-turn token.
        check: How to judge a reply; see `is_right`. Empty if it cannot be judged.
        keys: Canonical slot combinations which decide about the split.
        tools: Tool descriptions offered in the system prompt, or None.
    """

    task: str
    messages: list[dict[str, Any]]
    answer: str
    check: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    tools: list[dict[str, Any]] | None = None


def held_out(key: str) -> bool:
    """Says whether a slot combination belongs to the held-out tenth."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**32


def sum_key(a: int, b: int) -> str:
    """Key of the sum of two numbers; the order does not matter."""
    return f"sum:{min(a, b)}+{max(a, b)}"


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """An assistant message of an earlier turn."""
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are leaf, a tiny model.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a helpful, careful assistant.",
    "Be short and correct.",
    "Help the user.",
)


def maybe_system(rng: random.Random, share: float = 0.25) -> list[dict[str, Any]]:
    """Returns a neutral system message with probability `share`, else nothing."""
    return [system(rng.choice(SYSTEM_PROMPTS))] if rng.random() < share else []


def roughen(rng: random.Random, text: str) -> str:
    """Varies a prompt as people do: lower-case start, no final mark, politeness."""
    r = rng.random()
    if r < 0.10 and text[0].isupper():
        text = text[0].lower() + text[1:]
    elif r < 0.14 and text[-1] in "?.":
        text = "Please tell me: " + text[0].lower() + text[1:]
    if rng.random() < 0.15 and text[-1] in "?.":
        text = text[:-1]
    return text


def _contains(reply: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase.lower())}(?!\w)", reply.lower()) is not None


def strip_thought(reply: str) -> str:
    """Removes a leading <think>...</think> block."""
    return re.sub(r"^\s*<think>.*?</think>\s*", "", reply, flags=re.DOTALL)


def _json_equal(a: Any, b: Any) -> bool:
    """Equality that tells 1 from True and looks at types of numbers."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def parse_tool_calls(reply: str) -> list[Any] | None:
    """Reads the <tool_call> blocks of a reply; None if there is anything else."""
    blocks = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", reply, flags=re.DOTALL)
    rest = re.sub(r"<tool_call>.*?</tool_call>", "", reply, flags=re.DOTALL).strip()
    if rest or not blocks:
        return None
    try:
        return [json.loads(b) for b in blocks]
    except ValueError:
        return None


def is_right(reply: str, check: dict[str, Any]) -> bool:
    """Judges a reply.

    Args:
        reply: Text of the model, without the end-of-turn token.
        check: {"kind": ..., ...} with kind "number" (the last number of the reply is
            `value`), "text" (has every phrase of `must`, none of `no`), "json" (parses
            to `value`), "tools" (makes exactly the calls `calls`), "exact" (`value`).
            "thought": True demands a <think> block first.
    """
    if check.get("thought") and not re.match(r"\s*<think>.*</think>", reply, flags=re.DOTALL):
        return False
    reply = strip_thought(reply).strip()
    kind = check["kind"]
    if kind == "number":
        numbers = re.findall(r"-?\d+(?:\.\d+)?", reply)
        return bool(numbers) and float(numbers[-1]) == float(check["value"])
    if kind == "text":
        return all(_contains(reply, m) for m in check["must"]) and not any(
            _contains(reply, n) for n in check.get("no", ())
        )
    if kind == "json":
        try:
            return _json_equal(json.loads(reply), check["value"])
        except ValueError:
            return False
    if kind == "tools":
        return _json_equal(parse_tool_calls(reply), check["calls"])
    if kind == "exact":
        return reply == check["value"]
    raise ValueError(f"unknown kind of check: {kind}")

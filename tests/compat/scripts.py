"""Answers for examples that need a model that calls tools or writes what it is asked for, which leaf does not.

Each is a function of the prompt's text; `beside` has a server with it instead of leaf's.
"""

from __future__ import annotations

import json
from collections.abc import Callable

WEATHER = {"name": "get_current_weather", "arguments": {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}}
PERSON = {"name": "Alice", "age": 30}
BOOK = {
    "author": "George Orwell",
    "num_pages": 328,
    "short_summary": "A dystopia.",
    "long_summary": "A dystopian novel.",
}


def weather(prompt: str) -> str:
    """A call after some thinking; the weather once the call has been answered."""
    if "<tool_response>" in prompt:
        return "<think>It has been told.</think>It is 85 degrees fahrenheit in Dallas."
    return f"<think>I need the weather.</think><tool_call>\n{json.dumps(WEATHER)}\n</tool_call>"


def batch(prompt: str) -> str:
    """Whatever the conversation of a batch asks for."""
    if "Answer yes or no" in prompt:
        return "yes"
    if "Describe the person" in prompt:
        return json.dumps(PERSON)
    return json.dumps(BOOK) if "this book" in prompt else "It is Paris."


SCRIPTS: dict[str, Callable[[str], str]] = {
    "generate/batched_chat_completions_online.py": batch,
    "reasoning/openai_chat_completion_tool_calls_with_reasoning.py": weather,
    "tool_calling/openai_chat_completion_client_with_tools.py": weather,
}

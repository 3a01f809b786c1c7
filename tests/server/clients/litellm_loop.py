"""litellm's documented loop of tools, and its class of a prompt that is too long. Run by `run_litellm.py`: BASE_URL."""

from __future__ import annotations

import sys
from typing import Any

import litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def finish(provider: str, base_url: str) -> str:
    """The final text of a task that takes one call."""
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    asked = {"model": f"{provider}/leaf", "api_base": base_url, "api_key": "none", "tools": TOOLS, "max_tokens": 100}
    answer = litellm.completion(messages=messages, **asked).choices[0].message
    messages.append(answer)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "sunny"}
        for call in answer.tool_calls
    ]
    text: str = litellm.completion(messages=messages, **asked).choices[0].message.content
    return text


def is_class_of_long_prompts(provider: str, base_url: str) -> bool:
    """Whether litellm knows what is wrong with a prompt that is too long."""
    messages = [{"role": "user", "content": "word " * 5000}]
    try:
        litellm.completion(model=f"{provider}/leaf", messages=messages, api_base=base_url, api_key="none")
    except litellm.ContextWindowExceededError:
        return True
    return False


if __name__ == "__main__":
    for one in ("openai", "hosted_vllm"):
        assert finish(one, sys.argv[1]) == "It is sunny.", one
        assert is_class_of_long_prompts(one, sys.argv[1]), one
        print(f"{one}: the task is finished, and a long prompt has its class")

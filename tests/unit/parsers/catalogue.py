"""Answers in every format: what each of them says, a writer for each format, and answers that are special to one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
Writer = Callable[[list[Call]], str]

ODD = 'a "quoted" \\ back\\slash, {brace} [list] é 漢字 🙂 \t tab'
CALLS: list[list[Call]] = [
    [("now", {})],
    [("get_weather", {"city": "Paris"})],
    [("get_weather", {"city": "São Paulo", "unit": "C", "days": 3})],
    [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})],
    [("now", {}), ("search", {"query": "time"}), ("now", {})],
    [("search", {"query": ODD})],
    [("search", {"query": "", "limit": -1, "exact": True, "since": None})],
    [("search", {"query": "42"})],
    [("search", {"query": "true", "exact": False, "since": "2024"})],
    [("write_file", {"path": "a.py", "content": "def f():\n    return {'a': [1, 2]}\n\nf()"})],
    [("write_file", {"path": "x", "content": "}}]]\"'}]</tool"})],
    [("write_file", {"path": "x", "content": '[1, {"name": "now"}]'})],
    [("plot", {"points": [[1, 2.5], [-3, 1e-05]], "style": {"a": {"b": [None, True]}}, "scale": 0.5})],
    [("plot", {"points": [], "style": {}, "id": "7", "tag": None})],
    [("plot", {"points": ["x", "}", "\\"], "tag": 5, "scale": 2})],
    [("search", {"query": "Was ist los?\n\nÖl & Käse", "limit": 10, "exact": False})],
    [("write_file", {"path": "s.sql", "content": "SELECT '{\"a\": [1]}' AS j; -- done\n"})],
    [("plot", {"points": [{"x": 1, "y": [0.5, -0.25]}], "style": {"color": "red", "dash": [4, 2]}})],
    [("plot", {"scale": -1e-07, "points": [True, None, {}], "id": "<b>"})],
    [("search", {"query": "a, b(c=1), [d]; e"})],
    [
        ("get_weather", {"city": "X"}),
        ("plot", {"points": [0]}),
        ("write_file", {"path": "o", "content": ""}),
        ("now", {}),
    ],
    [("search", {"query": "\\n is no \n, nor is \\\\ or \\u00e9"}), ("get_weather", {"city": "O'Fallon", "days": 0})],
]
MARKERS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁call▁end｜>", "<|tool_call|>",
    "<function=", "</function>", "<|call|>", "<|end|>", "<think>", "</think>", "<arg_key>", "</invoke>",
)  # fmt: skip
PLAIN = [
    "", " ", "Hello!", "It is 5 < 6 and [1, 2] > {}.\n", "Use `f(x=1)`.\n\n- one\n- two  ", "日本語 🙂\n\n",
    '{"name": "Bob", "age": 5}', '[{"name": "x"}]', "[1, 2, 3]", "<b>bold</b> [see] <tool", "{", "[", "<", '{"a": [',
]  # fmt: skip


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(call: Call, key: str = "arguments") -> str:
    return dumps({"name": call[0], key: call[1]})


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{named(call)}\n</tool_call>" for call in calls)


def llama3(calls: list[Call]) -> str:
    return "; ".join(named(call, "parameters") for call in calls)


def pythonic(calls: list[Call]) -> str:
    return "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in calls) + "]"


def mistral_list(calls: list[Call]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(map(named, calls)) + "]"


def mistral_named(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(args)}" for name, args in calls)


def deepseek_v3(calls: list[Call]) -> str:
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call]) -> str:
    body = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(args)}<｜tool▁call▁end｜>" for name, args in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def granite(calls: list[Call]) -> str:
    return "<|tool_call|>[" + ", ".join(map(named, calls)) + "]"


def granite_function(calls: list[Call]) -> str:
    return "".join(f"<function_call> {named(call)} " for call in calls)


def value(one: Any) -> str:
    return one if isinstance(one, str) else dumps(one)


def qwen3_coder(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value(one)}\n</parameter>\n" for key, one in args.items())
        + "</function>\n</tool_call>"
        for name, args in calls
    )


def seed_oss(calls: list[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{value(one)}</parameter>\n" for key, one in args.items())
        + "</function>\n</seed:tool_call>"
        for name, args in calls
    )


def glm(calls: list[Call], line: str) -> str:
    return line.join(
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{value(one)}</arg_value>{line}" for key, one in args.items()
        )
        + "</tool_call>"
        for name, args in calls
    )


def minimax_m2(calls: list[Call]) -> str:
    body = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value(one)}</parameter>\n' for key, one in args.items())
        + "</invoke>"
        for name, args in calls
    )
    return f"<minimax:tool_call>\n{body}\n</minimax:tool_call>"


def dsml(calls: list[Call], block: str) -> str:
    def parameter(key: str, one: Any) -> str:
        is_text = "true" if isinstance(one, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{value(one)}</｜DSML｜parameter>\n'

    body = "\n".join(
        f'<｜DSML｜invoke name="{name}">\n' + "".join(map(parameter, args.keys(), args.values())) + "</｜DSML｜invoke>"
        for name, args in calls
    )
    return f"<｜DSML｜{block}>\n{body}\n</｜DSML｜{block}>"


def step3(calls: list[Call]) -> str:
    body = "\n".join(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">'
        + "".join(f'<steptml:parameter name="{key}">{value(one)}</steptml:parameter>' for key, one in args.items())
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, args in calls
    )
    return f"<｜tool_calls_begin｜>\n{body}\n<｜tool_calls_end｜>"


def tagged(calls: list[Call], opener: str, closer: str, key: str = "arguments") -> str:
    return "".join(f"{opener}\n{named(call, key)}{closer}\n" for call in calls)


def listed(calls: list[Call], opener: str, closer: str) -> str:
    return f"{opener}[{', '.join(map(named, calls))}]{closer}"


def kimi_k2(calls: list[Call]) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(args)}<|tool_call_end|>"
        for index, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def gemma(calls: list[Call], opener: str, closer: str, quote: str) -> str:
    def bare(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{bare(item)}" for key, item in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ",".join(map(bare, one)) + "]"
        return f"{quote}{one}{quote}" if isinstance(one, str) else dumps(one)

    return "".join(f"{opener}call:{name}{bare(args)}{closer}" for name, args in calls)


def lfm2(calls: list[Call]) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def olmo3(calls: list[Call]) -> str:
    return "<function_calls>" + "\n".join(pythonic([call])[1:-1] for call in calls) + "</function_calls>"


def harmony(calls: list[Call]) -> str:
    return "".join(
        f"{'<|start|>assistant' if number else ''}<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{dumps(args)}<|call|>"
        for number, (name, args) in enumerate(calls)
    )


def pattern(calls: list[Call]) -> str:
    return "".join(f"@@{name} => {dumps(args)}@/@" for name, args in calls)


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        write: calls as the model writes them.
        allows_before: text may come before a call.
        own_end: what ends a call, which a text in its arguments cannot hold; "" when arguments are quoted.
    """

    write: Writer
    allows_before: bool = True
    own_end: str = ""


FORMATS = {
    "hermes": Format(hermes),
    "llama3_json": Format(llama3),
    "pythonic": Format(pythonic, allows_before=False),
    "mistral": Format(mistral_list),
    "mistral-named": Format(mistral_named),
    "deepseek_v3": Format(deepseek_v3),
    "deepseek_v31": Format(deepseek_v31),
    "granite": Format(granite),
    "granite-20b-fc": Format(granite_function),
    "qwen3_coder": Format(qwen3_coder, own_end="</parameter>"),
    "seed_oss": Format(seed_oss, own_end="</parameter>"),
    "glm45": Format(lambda calls: glm(calls, "\n"), own_end="</arg_value>"),
    "glm47": Format(lambda calls: glm(calls, ""), own_end="</arg_value>"),
    "minimax_m2": Format(minimax_m2, own_end="</parameter>"),
    "deepseek_v32": Format(lambda calls: dsml(calls, "function_calls"), own_end="</｜DSML｜parameter>"),
    "deepseek_v4": Format(lambda calls: dsml(calls, "tool_calls"), own_end="</｜DSML｜parameter>"),
    "step3": Format(step3, own_end="</steptml:parameter>"),
    "kimi_k2": Format(kimi_k2),
    "gemma4": Format(lambda calls: gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'), own_end='<|"|>'),
    "functiongemma": Format(
        lambda calls: gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>"), own_end="<escape>"
    ),
    "internlm": Format(lambda calls: tagged(calls, "<|action_start|><|plugin|>", "<|action_end|>", "parameters")),
    "longcat": Format(lambda calls: tagged(calls, "<longcat_tool_call>", "</longcat_tool_call>")),
    "jamba": Format(lambda calls: listed(calls, "<tool_calls>", "</tool_calls>")),
    "phi4_mini_json": Format(lambda calls: listed(calls, "functools", "")),
    "xlam": Format(lambda calls: listed(calls, "", "")),
    "lfm2": Format(lfm2),
    "olmo3": Format(olmo3),
    "openai": Format(harmony),
    "pattern": Format(pattern, own_end="@/@"),
}


def contents() -> list[list[Call]]:
    """Calls whose texts hold the marks of the formats."""
    return [[("write_file", {"path": "p", "content": f"{mark} x {mark}"})] for mark in MARKERS]

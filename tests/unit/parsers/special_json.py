# ruff: noqa: E501
"""As `special`, of the formats of JSON between tags, and of Gemma's and LFM2's families."""

from __future__ import annotations

from tests.unit.parsers.special import CALL, OSLO, Special

NOW = ("now", "{}")


def _tagged(opener: str, closer: str) -> Special:
    """What the formats with tags around an object or a list have in common."""
    return [
        (f'{opener}{{"name": "get_weather", "arguments": {OSLO}}}{closer} done', "done", [CALL]),
        (
            f'Ok.{opener} [{{"arguments": {OSLO}, "name": "get_weather"}}, {{"name": "now"}}] {closer}',
            "Ok.",
            [CALL, NOW],
        ),
        (f'{opener}{{"name": "now", "arguments": {{"a": nope}}}}{closer}!', "!", [("now", '{"a": nope}}')]),
        (
            f'{opener}{{"name": "now", "arguments": {{nope}}}}{closer}!',
            f'{opener}{{"name": "now", "arguments": {{nope}}}}{closer}!',
            [],
        ),
        (f'{opener}{{"name": "now", "arguments": {{"a": "x', "", [("now", '{"a": "x')]),
        (f'{opener}{{"name": "now"', f'{opener}{{"name": "now"', []),
        (f"{opener}none{closer}", f"{opener}none{closer}", []),
        (f'{opener}{{"name": "now", "parameters": {{}}}}', "", [NOW]),
        (f'{opener[:-1]} {{"name": "now"}}', f'{opener[:-1]} {{"name": "now"}}', []),
        (f"{opener}[]{closer}", f"{opener}[]{closer}", []),
    ]


def _gemma(opener: str, closer: str, quote: str) -> Special:
    def text(one: str) -> str:
        return f"{quote}{one}{quote}"

    return [
        (f"{opener}call:get_weather{{city:{text('Oslo')}}}{closer}", "", [CALL]),
        (f"Hm. {opener} call:get_weather {{ city : {text('Oslo')} }} {closer} end", "Hm.end", [CALL]),
        (f'{opener}call:get_weather{{"city":"Oslo"}}{closer}', "", [CALL]),
        (f"{opener}call:get_weather{{{text('city')}:Oslo}}{closer}", "", [CALL]),
        (
            f"{opener}call:get_weather{{city:New York,days:2}}{closer}",
            "",
            [("get_weather", '{"city": "New York", "days": 2}')],
        ),
        (
            f"{opener}call:plot{{points:[1,-2.5,[],{{x:null}}],tag:true,id:{text('}],')}}}{closer}",
            "",
            [("plot", '{"points": [1, -2.5, [], {"x": null}], "tag": true, "id": "}],"}')],
        ),
        (
            f"{opener}call:search{{query:{text('')},limit:007}}{closer}",
            "",
            [("search", '{"query": "", "limit": "007"}')],
        ),
        (f"{opener}call:now{{}}", "", [NOW]),
        (f"{opener}call:now{{}}{closer}{opener}call:now{{}}{closer}", "", [NOW, NOW]),
        (f"{opener}call:now{{a:1,}}{closer}.", ".", [("now", '{"a": 1}')]),
        (f"{opener}call:now{{a}}{closer}.", ".", [("now", "{}")]),
        (f"{opener}call:search{{query:{quote}abc", "", [("search", '{"query": "abc')]),
        (f"{opener}call:search{{exact:tr", "", [("search", '{"exact": tr')]),
        (f"{opener}call:now", f"{opener}call:now", []),
        (f"{opener}now{{}}{closer}", f"{opener}now{{}}{closer}", []),
        (f"{opener}call:now(){closer}", f"{opener}call:now(){closer}", []),
    ]


SECTION, BEGIN, ARGUMENTS, END = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
SPECIAL_JSON: dict[str, Special] = {
    "internlm": _tagged("<|action_start|><|plugin|>", "<|action_end|>"),
    "longcat": _tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "jamba": _tagged("<tool_calls>", "</tool_calls>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "phi4_mini_json": [
        (f'functools[{{"name": "get_weather", "parameters": {OSLO}}}] ok', "ok", [CALL]),
        ("import functools\nfunctools[0]", "import functools\nfunctools[0]", []),
        ('functools[{"name": "now"}, 5]', ", 5]", [NOW]),
        ('functools[{"name": "now", "arguments": {"a": 1', "", [("now", '{"a": 1')]),
        ("functools[]", "functools[]", []),
        ("functools", "functools", []),
    ],
    "xlam": [
        (f'```json\n[{{"name": "get_weather", "arguments": {OSLO}}}]\n```', "", [CALL]),
        (f'I call:\n```\n[{{"name": "get_weather", "arguments": {OSLO}}}]\n``` ok', "I call:ok", [CALL]),
        (f'<tool_call>[{{"name": "get_weather", "arguments": {OSLO}}}]</tool_call>', "", [CALL]),
        (f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO}}}]', "", [CALL]),
        (f'{{"name": "get_weather", "arguments": {OSLO}}}', "", [CALL]),
        (f'See [{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "now"}}]', "See", [CALL, NOW]),
        ('[{"name": "Bob"}]', '[{"name": "Bob"}]', []),
        ("```python\nprint([1])\n```", "```python\nprint([1])\n```", []),
        ('[{"name": "now", "arguments": {"a": 01}}]', "", [("now", '{"a": 01}}]')]),
        ("```json\n[1]\n```", "```json\n[1]\n```", []),
    ],
    "kimi_k2": [
        (f"{SECTION}{BEGIN}functions.get_weather:3 {ARGUMENTS} {OSLO} {END}<|tool_calls_section_end|>!", "!", [CALL]),
        (f"{BEGIN}get_weather{ARGUMENTS}{OSLO}{END}", "", [CALL]),
        (f"Hm.{SECTION}\n{BEGIN}functions.now:0{ARGUMENTS}{{}}{END}\n{BEGIN}functions.now:1{ARGUMENTS}{{}}", "Hm.", [NOW, NOW]),
        (f"{SECTION}text", f"{SECTION}text", []),
        (f"{BEGIN}functions.now:0{{}}", f"{BEGIN}functions.now:0{{}}", []),
        (f"{BEGIN}functions.now:0{ARGUMENTS}[]", f"{BEGIN}functions.now:0{ARGUMENTS}[]", []),
        (f'{BEGIN}functions.now:0{ARGUMENTS}{{"a": x}}{END}.', ".", [("now", '{"a": x}')]),
        (f'{BEGIN}functions.now:0{ARGUMENTS}{{"a": "x', "", [("now", '{"a": "x')]),
        (f"{BEGIN}tool_call_1{ARGUMENTS}{{}}{END}", f"{BEGIN}tool_call_1{ARGUMENTS}{{}}{END}", []),
    ],
    "lfm2": [
        ("Ok. <|tool_call_start|>[get_weather(city='Oslo'), now()]<|tool_call_end|>Done.", "Ok.Done.", [CALL, NOW]),
        ("<|tool_call_start|>[now(), ", ", ", [NOW]),
        ("<|tool_call_start|>now()<|tool_call_end|>", "<|tool_call_start|>now()<|tool_call_end|>", []),
        ("<|tool_call_start|>[now(a=x)]<|tool_call_end|>", "<|tool_call_start|>[now(a=x)]<|tool_call_end|>", []),
        ("[now()]", "[now()]", []),
        ("<|tool_call_start|>[now()]<|tool_call_end|><|tool_call_start|>[now()]", "", [NOW, NOW]),
    ],
    "olmo3": [
        ("Ok.\n<function_calls>\nget_weather(city='Oslo')\nnow()\n</function_calls>\nDone.", "Ok.Done.", [CALL, NOW]),
        ("<function_calls>now() now()</function_calls>", "", [NOW, NOW]),
        ("<function_calls>now()\nnow(a=x)</function_calls>", "now(a=x)</function_calls>", [NOW]),
        ("<function_calls>[now()]</function_calls>", "<function_calls>[now()]</function_calls>", []),
        ("<function_calls>\nnow(", "<function_calls>\nnow(", []),
        ("now()", "now()", []),
    ],
}  # fmt: skip

"""Answers that are special to the formats which mark arguments one by one, written in the marks of each."""

from __future__ import annotations

from dataclasses import dataclass

from tests.unit.parsers.special import Special


@dataclass(frozen=True)
class Marked:
    """Patterns of a format; {} stands for a name, a key, a value.

    Attributes:
        block, block_end: around all calls.
        call, call_end: around a call; the first holds its name.
        key: begins an argument.
        value_end: ends it.
        kind, json_kind: in the place of KIND in `key`, before a text and before JSON.
    """

    call: str
    call_end: str
    key: str
    value_end: str
    block: str = ""
    block_end: str = ""
    kind: str = ""
    json_kind: str = ""

    def begin(self, name: str) -> str:
        return self.block + self.call.format(name)

    def open(self, key: str, value: str, *, is_json: bool = False) -> str:
        return self.key.replace("KIND", self.json_kind if is_json else self.kind).format(key) + value

    def one(self, key: str, value: str, *, is_json: bool = False) -> str:
        return self.open(key, value, is_json=is_json) + self.value_end

    def whole(self, name: str, *parts: str) -> str:
        return self.begin(name) + "".join(parts) + self.call_end + self.block_end


XML = {"call": "<function={}>", "call_end": "</function>", "key": "<parameter={}>", "value_end": "</parameter>"}
GLM = Marked("<tool_call>{}\n", "</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
INVOKE = ('<invoke name="{}">', "</invoke>", '<parameter name="{}">', "</parameter>\n")


def _dsml(block: str) -> Marked:
    return Marked(
        '<｜DSML｜invoke name="{}">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="{}"KIND>',
        "</｜DSML｜parameter>\n", f"<｜DSML｜{block}>", f"</｜DSML｜{block}>", ' string="true"', ' string="false"',
    )  # fmt: skip


MARKED = {
    "qwen3_coder": Marked(**XML, block="<tool_call>", block_end="</tool_call>"),
    "seed_oss": Marked(**XML, block="<seed:tool_call>\n", block_end="</seed:tool_call>"),
    "glm45": GLM,
    "glm47": GLM,
    "minimax_m2": Marked(*INVOKE, block="<minimax:tool_call>\n", block_end="</minimax:tool_call>"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "step3": Marked(
        '<steptml:invoke name="{}">', "</steptml:invoke>", '<steptml:parameter name="{}">', "</steptml:parameter>\n",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>", "<｜tool_call_end｜><｜tool_calls_end｜>",
    ),
}  # fmt: skip


def specials(form: Marked) -> Special:
    """(text, content, calls with the JSON text of their arguments)."""
    query, limit = form.one("query", "a"), form.one("limit", "5", is_json=True)
    unended = form.open("query", "a\n")
    cases: Special = [
        (form.whole("now") + "!", "!", [("now", "{}")]),
        ("Hm.\n" + form.whole("search", query, limit), "Hm.", [("search", '{"query": "a", "limit": 5}')]),
        (form.begin("now") + "text", form.begin("now") + "text", []),
        (form.begin("now"), form.begin("now"), []),
        # an end is missing
        (form.whole("search", unended, limit), "", [("search", '{"query": "a", "limit": 5}')]),
        (form.whole("search", form.open("query", "a"), limit), "", [("search", '{"query": "a", "limit": 5}')]),
        (form.whole("search", form.open("limit", "7\n"), query), "", [("search", '{"limit": 7, "query": "a"}')]),
        (form.whole("search", limit, unended), "", [("search", '{"limit": 5, "query": "a"}')]),
        (form.whole("search", limit, unended) + "\n" + form.whole("now"), "",
         [("search", '{"limit": 5, "query": "a"}'), ("now", "{}")]),
        # what only looks like one is text
        (form.whole("search", form.one("query", form.open("other", "b"))), "",
         [("search", '{"query": ' + _quoted(form.open("other", "b")) + "}")]),
        (form.whole("search", limit, form.one("query", form.open("limit", "b"))), "",
         [("search", '{"limit": 5, "query": ' + _quoted(form.open("limit", "b")) + "}")]),
        (form.whole("search", form.one("query", f"x{form.call_end} y")), "",
         [("search", '{"query": ' + _quoted(f"x{form.call_end} y") + "}")]),
        # types
        (form.whole("plot", form.one("id", "007"), form.one("tag", "None", is_json=True)), "",
         [("plot", '{"id": "007", "tag": null}')]),
        (form.whole("plot", form.one("style", '{"a":  [1]}', is_json=True)), "", [("plot", '{"style": {"a": [1]}}')]),
        (form.whole("plot", form.one("scale", "x", is_json=True)), "", [("plot", '{"scale": "x"}')]),
        (form.whole("search", form.one("exact", "True", is_json=True), form.one("other", "12")), "",
         [("search", '{"exact": true, "other": "12"}')]),
        (form.whole("search", form.one("limit", "1e999", is_json=True), form.one("since", "null", is_json=True)), "",
         [("search", '{"limit": "1e999", "since": null}')]),
        (form.whole("search", form.one("query", "é 🙂"), form.one("since", "2024")), "",
         [("search", '{"query": "é 🙂", "since": "2024"}')]),
        # broken or cut
        (form.whole("search", query, query), query + form.call_end + form.block_end,
         [("search", '{"query": "a"')]),
        (form.begin("search") + form.open("query", "abc"), "", [("search", '{"query": "abc')]),
        (form.begin("search") + form.open("limit", "12", is_json=True), "", [("search", '{"limit": 12')]),
        (form.whole("rm", query), form.whole("rm", query), []),
    ]  # fmt: skip
    if form.begin("now").endswith(">"):
        cases[2:4] = [
            (form.begin("now") + "text", "text", [("now", "{")]),
            (form.begin("now"), "", [("now", "{")]),
            (form.begin("now")[:-1], form.begin("now")[:-1], []),
        ]
    return cases


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"').replace("\n", "\\n") + '"'

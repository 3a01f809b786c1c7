"""Random JSON schemas, regular expressions and grammars, and what comes of them in an engine.

`python -m tests.structured.corpus --count 500` is `make test-structured`: it prints one figure last, the violations.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
from dataclasses import dataclass, field
from typing import Any

from quire import LLM, SamplingParams
from quire.errors import QuireClientError

NAMES = ("a", "b", "key", "long name", 'q"uote', "é")
WORDS = ("x", "red", "two words", "", "ü", 'quo"te', "back\\slash")
# Keywords that no library honours today: each schema that has one is to be refused.
REFUSED: dict[str, Any] = {
    "not": {"type": "null"}, "uniqueItems": True, "contains": {"const": 1}, "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}}, "if": {"required": ["a"]}, "$dynamicRef": "#x",
}  # fmt: skip
NEVER_ENDING = 400


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose answers are short: texts, lists and numbers have bounds."""
    makers = [_string, _integer, _number, _plain, _enum]
    if depth > 0:
        makers += [_object, _object, _array, _array, _choice, _combined, _reference]
    schema: dict[str, Any] = rng.choice(makers)(rng, depth - 1)
    if rng.random() < 0.15:
        schema[rng.choice(["title", "description", "$comment"])] = "a note"
    if rng.random() < 0.02:
        keyword = rng.choice(list(REFUSED))
        schema[keyword] = REFUSED[keyword]
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{1,4}$", "^\\d{3}-\\d{2}$", "^(x|yy)z?$", "^.{2,5}$", "^\\w+@\\w{2,3}$"]),
        }
    if kind == 1:
        return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])}
    low = rng.randrange(4)
    return {"type": "string", "maxLength": low + rng.randrange(6)} | ({"minLength": low} if rng.random() < 0.5 else {})


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "integer", "multipleOf": rng.choice([2, 3, 5, 10])}
    low = rng.randrange(-1000, 1000)
    bounds = {
        rng.choice(["minimum", "exclusiveMinimum"]): low,
        rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randrange(2, 900),
    }
    return {"type": "integer", **bounds}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-50, 50), rng.randrange(3))
    return {"type": "number", "minimum": low, "maximum": round(low + rng.uniform(1, 90), rng.randrange(3))}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"const": rng.choice(WORDS)}]
    )


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, -7, None, True, [1, "x"], {"k": None}], rng.randint(1, 4))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    required = [name for name in names if rng.random() < 0.6]
    if required:
        schema["required"] = required
    extra = rng.randrange(6)
    if extra == 0:
        schema["additionalProperties"] = False
    elif extra == 1:
        return {"type": "object", "additionalProperties": random_schema(rng, 0), "maxProperties": rng.randint(1, 3)}
    elif extra == 2:
        return {
            "type": "object",
            "patternProperties": {"^k[0-9]$": random_schema(rng, 0)},
            "additionalProperties": False,
        }
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    if rng.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [random_schema(rng, 0) for _ in range(rng.randint(1, 3))],
            "items": False,
        }
    schema = {"type": "array", "items": random_schema(rng, depth), "maxItems": low + rng.randrange(3)}
    return schema | ({"minItems": low} if rng.random() < 0.5 else {})


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    keyword = rng.choice(["anyOf", "anyOf", "oneOf"])
    return {keyword: [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _combined(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(50)
    return rng.choice([
        {"allOf": [{"type": "integer"}, {"minimum": low}, {"maximum": low + 9}]},
        {"allOf": [{"type": "string", "maxLength": 6}, {"minLength": 2}]},
        {
            "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
            "allOf": [{"required": ["a"]}], "additionalProperties": False,
        },
    ])  # fmt: skip


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2, "$defs": {"one": random_schema(rng, 0)}}


def rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with the definitions of inner references at its root, each under a name of its own."""
    definitions: dict[str, Any] = {}

    def walk(one: Any) -> Any:
        if isinstance(one, list):
            return [walk(item) for item in one]
        if not isinstance(one, dict):
            return one
        own = one.get("$defs", {}).get("one")
        inner = {key: walk(item) for key, item in one.items() if key != "$defs"}
        if own is not None:
            name = f"d{len(definitions)}"
            definitions[name] = None
            definitions[name] = walk(own)
            inner["items"] = {"$ref": f"#/$defs/{name}"}
        return inner

    walked: dict[str, Any] = walk(schema)
    return walked | ({"$defs": definitions} if definitions else {})


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A pattern whose texts are short."""
    kind = rng.randrange(6) if depth else rng.randrange(3)
    if kind == 0:
        return re.escape("".join(rng.choices(string.ascii_letters + " .-+é", k=rng.randint(1, 4))))
    if kind == 1:
        return rng.choice(["[a-f]", "[^a-z\\n]", "\\d", "\\w", "[0-9A-F]", "."])
    if kind == 2:
        return rng.choice(["\\d{2,4}", "[xyz]{1,3}", "a?", "(?:ab){0,2}"])
    if kind == 3:
        return f"(?:{random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)})"
    if kind == 4:
        return f"(?:{random_regex(rng, depth - 1)}){{1,{rng.randint(1, 3)}}}"
    return random_regex(rng, depth - 1) + random_regex(rng, depth - 1)


def random_ebnf(rng: random.Random) -> tuple[str, str]:
    """(grammar, pattern of the same language)."""
    rules, patterns = [], []
    for index in range(rng.randint(1, 4)):
        words = ["".join(rng.choices("abxyz01", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        most = rng.randint(1, 3)
        rules.append(f"r{index} ::= (" + " | ".join(f'"{word}"' for word in words) + f"){{1,{most}}}")
        patterns.append("(?:" + "|".join(words) + f"){{1,{most}}}")
    root = "root ::= " + " ".join(f"r{index}" for index in range(len(rules)))
    return "\n".join([root, *rules]), "".join(patterns)


@dataclass(slots=True)
class Figures:
    """What came of a corpus; `violations` are (what was asked, text)."""

    num_asked: int = 0
    num_ended: int = 0
    num_cut: int = 0
    num_refused: int = 0
    violations: list[tuple[Any, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_asked} asked, {self.num_refused} refused, {self.num_ended} ended, {self.num_cut} cut, "
            f"{len(self.violations)} violations"
        )


def forms(kind: str, rng: random.Random, count: int) -> list[Any]:
    """What is asked: schemas, patterns, or (grammar, pattern)."""
    if kind == "json":
        return [rooted(random_schema(rng)) for _ in range(count)]
    return [random_regex(rng) if kind == "regex" else random_ebnf(rng) for _ in range(count)]


def run_corpus(llm: LLM, kind: str, count: int, seed: int) -> Figures:
    """Ask for `count` random forms at temperature 1, and judge every answer that ended by itself."""
    rng = random.Random(seed)
    figures = Figures()
    asked, taken = [], []
    for number, form in enumerate(forms(kind, rng, count)):
        figures.num_asked += 1
        given = form[0] if kind == "grammar" else form
        params = SamplingParams(
            max_tokens=NEVER_ENDING, seed=seed + number,
            structured_outputs={kind: given, "disable_any_whitespace": True},
        )  # fmt: skip
        try:
            llm.llm_engine.add_request(str(number), "Once", params)
        except QuireClientError as error:
            assert error.field and error.field.startswith("structured_outputs"), error
            figures.num_refused += 1
            continue
        asked.append(number)
        taken.append(form)
    finals = {}
    while llm.llm_engine.has_unfinished_requests():
        finals |= {one.request_id: one.outputs[0] for one in llm.llm_engine.step() if one.finished}
    for number, form in zip(asked, taken, strict=True):
        _judge(figures, kind, form, finals[str(number)])
    return figures


def _judge(figures: Figures, kind: str, form: Any, answer: Any) -> None:
    if answer.finish_reason == "error":
        figures.num_refused += 1
    elif answer.finish_reason != "stop":
        figures.num_cut += 1
    else:
        figures.num_ended += 1
        if not is_valid(kind, form, answer.text):
            figures.violations.append((form, answer.text))


def is_valid(kind: str, form: Any, text: str) -> bool:
    """By an independent judge: jsonschema, or Python's regular expressions."""
    if kind == "json":
        from jsonschema import Draft202012Validator

        try:
            return bool(Draft202012Validator(form).is_valid(json.loads(text)))
        except ValueError:
            return False
    return re.fullmatch(form[1] if kind == "grammar" else form, text, re.ASCII) is not None


def main() -> None:
    """Run the corpora on leaf and on a model with random weights."""
    parser = argparse.ArgumentParser(description="Random schemas, patterns and grammars, judged from outside.")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = 0
    for name, settings in (("leaf", {}), ("random weights", {"load_format": "dummy"})):
        llm = LLM(max_model_len=1024, max_num_seqs=64, **settings)
        for kind, count in (
            ("json", args.count),
            ("regex", max(1, args.count // 5)),
            ("grammar", max(1, args.count // 5)),
        ):
            figures = run_corpus(llm, kind, count, args.seed)
            print(f"{name}, {kind}: {figures}", flush=True)
            for form, text in figures.violations[:5]:
                print("  violation:", json.dumps(form), repr(text))
            total += len(figures.violations)
        llm.llm_engine.shutdown()
    print(f"violations: {total}")
    raise SystemExit(total > 0)


if __name__ == "__main__":
    main()

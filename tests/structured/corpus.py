"""Random JSON schemas, regular expressions and grammars, and what comes of them in an engine.

`python -m tests.structured.corpus --count 500` is `make test-structured`: each library in turn, and auto, on the
embedded model and on one with random weights. The figures come last.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire import LLM, SamplingParams
from quire.config.structured_outputs import BACKENDS, StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import QuireClientError
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.interface import CompiledGrammar, GrammarError
from quire.structured_output.spec import spec_of
from tests.structured.formats import has_format
from tests.structured.grammar_corpus import RandomGrammar, random_grammar
from tests.structured.libraries import accepts, as_json, backend
from tests.structured.own_forms import differences
from tests.structured.schema_corpus import VALUES, keywords_of, neighbours, schemas

MAX_TOKENS = 400
NUM_SCHEMAS = 500
KINDS = ("json", "regex", "ebnf", "lark")
NUM_NEIGHBOURS = 24
OWN_FORM_WALKS = 40


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


@dataclass(slots=True)
class Figures:
    """What came of a corpus.

    Attributes:
        num_cut: answers that `max_tokens` ended.
        refused: reason -> how often.
        violations: (what was asked, text).
        dropped: (library, schema, value that it lets pass).
    """

    num_asked: int = 0
    num_ended: int = 0
    num_cut: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[Any, str]] = field(default_factory=list)
    dropped: list[tuple[str, Any, Any]] = field(default_factory=list)

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.num_asked + other.num_asked, self.num_ended + other.num_ended, self.num_cut + other.num_cut,
            self.refused + other.refused, self.violations + other.violations, self.dropped + other.dropped,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.num_asked} asked, {self.refused.total()} refused, {self.num_ended} ended, {self.num_cut} cut, "
            f"{len(self.violations)} violations, {len(self.dropped)} dropped"
        )


def forms(kind: str, rng: random.Random, count: int) -> list[Any]:
    """What is asked: schemas, patterns or grammars."""
    if kind == "json":
        return schemas(rng, count)
    return [random_regex(rng) if kind == "regex" else random_grammar(rng) for _ in range(count)]


def asked_for(kind: str, form: Any) -> dict[str, Any]:
    """`structured_outputs` of a request."""
    if isinstance(form, RandomGrammar):
        return {"grammar": form.ebnf() if kind == "ebnf" else form.lark()}
    return {kind: form, "disable_any_whitespace": True}


def run_corpus(llm: LLM, kind: str, count: int, seed: int) -> Figures:
    """Ask for `count` random forms at temperature 1, and judge every answer that ended by itself."""
    figures = Figures()
    asked = forms(kind, random.Random(seed), count)
    taken = []
    for number, form in enumerate(asked):
        figures.num_asked += 1
        params = SamplingParams(
            max_tokens=MAX_TOKENS, seed=seed + number, structured_outputs=asked_for(kind, form)
        )  # fmt: skip
        try:
            llm.llm_engine.add_request(str(number), "Once", params)
            taken.append(number)
        except QuireClientError as error:
            assert error.field and error.field.startswith("structured_outputs"), error
            figures.refused[reason_of(error)] += 1
    finals = {}
    while llm.llm_engine.has_unfinished_requests():
        finals |= {one.request_id: one.outputs[0] for one in llm.llm_engine.step() if one.finished}
    for number in taken:
        _judge(figures, kind, asked[number], finals[str(number)])
    return figures


def _judge(figures: Figures, kind: str, form: Any, answer: Any) -> None:
    if answer.finish_reason == "error":
        figures.refused["when it was compiled or followed"] += 1
    elif answer.finish_reason != "stop":
        figures.num_cut += 1
    else:
        figures.num_ended += 1
        if not is_valid(kind, form, answer.text):
            figures.violations.append((form, answer.text))


def reason_of(error: QuireClientError) -> str:
    """The kind of a refusal: the reason without what differs from request to request."""
    text = re.sub(r"'[^']*'|[0-9]+", "_", str(error.message).partition("(")[2] or str(error.message))
    reasons = {one.rpartition(": ")[2].strip(") ") for one in text.split("; ")}
    return " / ".join(sorted(reasons))[:120]


def is_valid(kind: str, form: Any, text: str) -> bool:
    """By an independent judge: jsonschema, Python's regular expressions, or the grammar's definition."""
    if kind == "json":
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return is_valid_json(form, value)
    if kind == "regex":
        return re.fullmatch(form, text, re.ASCII) is not None
    return bool(form.accepts(text))


def is_valid_json(schema: Any, value: Any) -> bool:
    """By the draft that knows all of the schema's keywords; formats by their syntax."""
    import jsonschema

    used = set(keywords_of(schema))
    is_old = "additionalItems" in used or "$recursiveRef" in used
    kind = jsonschema.Draft201909Validator if is_old else jsonschema.Draft202012Validator
    checker = jsonschema.FormatChecker(formats=())
    checker.checkers = {name: (_format_check(name), ()) for name in used_formats(schema)}  # type: ignore[misc]
    return bool(kind(schema, format_checker=checker).is_valid(value))


def used_formats(schema: Any) -> set[str]:
    """Values of `format`."""
    text = json.dumps(schema)
    return set(re.findall(r'"format": "([^"]*)"', text))


def _format_check(name: str) -> Any:
    return lambda value: not isinstance(value, str) or has_format(name, value)


def probe(kind: str, library: str, count: int, seed: int) -> Figures:
    """Write into the grammars of a corpus what its schemas forbid: nothing of it may pass.

    Args:
        library: forced; or auto.
    """
    rng = random.Random(seed)
    figures = Figures()
    for schema in forms(kind, random.Random(seed), count):
        try:
            config = StructuredOutputsConfig(backend=library, disable_any_whitespace=True)
            params = resolve_structured_outputs(StructuredOutputsParams(json=schema), config)
            spec = spec_of(params)
            grammar = backend(spec.backend).load(spec, backend(spec.backend).compile(spec))
        except (QuireClientError, GrammarError):
            continue
        figures.num_asked += 1
        values = [*VALUES, *_written(grammar, rng)]
        values += [one for value in values[-3:] for one in neighbours(value, rng, NUM_NEIGHBOURS // 3)]
        for value in filter(_is_unicode, values):
            if not is_valid_json(schema, value) and accepts(grammar, as_json(value)):
                figures.dropped.append((spec.backend, schema, value))
    return figures


def _is_unicode(value: Any) -> bool:
    try:
        as_json(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        return False
    return True


def _written(grammar: CompiledGrammar, rng: random.Random) -> list[Any]:
    """A value or two that the grammar allows, written by chance."""
    import numpy as np

    found = []
    for _ in range(2):
        state, written = grammar.start(), bytearray()
        bitmask = np.empty((1, 9), dtype=np.int32)
        while len(written) < 120 and not state.is_terminated():
            state.fill_bitmask(bitmask, 0)
            ids = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
            token_id = int(ids[-1]) if ids[-1] == 256 else int(rng.choice(ids))
            state.accept(token_id)
            if token_id < 256:
                written.append(token_id)
        if state.is_terminated():
            try:
                found.append(json.loads(written))
            except ValueError:
                found.append(written.decode("utf-8", "replace"))
    return found


def knows(library: str, kind: str) -> bool:
    """Whether a library is asked for forms of this kind."""
    return kind in ("json", "regex") or library in ("auto", {"ebnf": "xgrammar", "lark": "guidance"}[kind])


def counts(count: int) -> Iterable[tuple[str, int]]:
    """How many of each kind."""
    return [("json", count), *((kind, max(1, count // 5)) for kind in KINDS[1:])]


def main() -> None:
    """Run the corpora with each library."""
    parser = argparse.ArgumentParser(description="Random schemas, patterns and grammars, judged from outside.")
    parser.add_argument("--count", type=int, default=NUM_SCHEMAS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--libraries", default=",".join(("auto", *BACKENDS)))
    args = parser.parse_args()
    total, start = Figures(), time.perf_counter()
    for library in args.libraries.split(","):
        found = probe("json", library, args.count, args.seed)
        print(
            f"{library}, values that schemas forbid: {found.num_asked} grammars, {len(found.dropped)} dropped",
            flush=True,
        )
        total.dropped += found.dropped
        for model, settings in (("leaf", {}), ("random weights", {"load_format": "dummy"})):
            llm = LLM(max_model_len=1024, max_num_seqs=64, structured_outputs_config={"backend": library}, **settings)
            for kind, count in counts(args.count):
                if knows(library, kind):
                    figures = run_corpus(llm, kind, count, args.seed)
                    seconds = time.perf_counter() - start
                    print(f"{library}, {model}, {kind}: {figures} ({seconds:.0f} s)", flush=True)
                    total += figures
            llm.llm_engine.shutdown()
    num_accepted, refused, wrong = differences(OWN_FORM_WALKS, args.seed)
    print(f"own patterns and grammars: {num_accepted} accepted, {len(refused)} refused, {len(wrong)} texts wrong")
    print(*wrong, sep="\n")
    for reason, times in total.refused.most_common():
        print(f"  refused {times}: {reason}")
    for form, text in total.violations[:20]:
        print("  violation:", json.dumps(form, default=str), repr(text))
    for name, schema, value in total.dropped[:20]:
        print("  dropped:", name, json.dumps(schema), repr(value))
    print(
        f"violations: {len(total.violations)}, silently dropped keywords: {len(total.dropped)}, refused at admission: "
        f"{total.refused.total()} of {total.num_asked}"
    )
    raise SystemExit(bool(total.violations or total.dropped or refused or wrong))


if __name__ == "__main__":
    main()

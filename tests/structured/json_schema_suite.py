"""The official JSON-Schema-Test-Suite through the masks of the grammar libraries, in both directions.

`python -m tests.structured.json_schema_suite` is `make test-json-schema`. It fetches the suite, which is not ours, with
pip: it lies in the source distribution of the package `jsonschema`. An invalid instance must not be reachable in any
of several spellings; a valid one should be reachable in one of them. The figures come last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.structured_outputs import BACKENDS, StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.entrypoints.structured_narrower import narrower_names
from quire.errors import QuireClientError
from quire.models.hub import resolve_model_path
from quire.structured_output.choose import honouring
from quire.structured_output.interface import CompiledGrammar, GrammarError, StructuredOutputBackend, Vocabulary
from quire.structured_output.registry import make_backend
from quire.structured_output.spec import spec_of
from quire.structured_output.vocabulary import read_vocabulary

FOLDER = Path(__file__).resolve().parents[2] / "build" / "json-schema-test-suite"
DRAFTS = ("draft7", "draft2020-12")
MAX_UNREACHABLE = 30
MAX_ORDERS = 24


@dataclass(frozen=True, slots=True)
class Case:
    """A schema of the suite and the instances it is tried with: (description, value, whether it is valid)."""

    file: str
    description: str
    schema: Any
    tests: tuple[tuple[str, Any, bool], ...]

    @property
    def name(self) -> str:
        return f"{self.file}: {self.description}"


@dataclass(slots=True)
class Figures:
    """What came of the suite with one library, or `auto`.

    Attributes:
        refused: (case, reason).
        passed: invalid instances that can be written.
        unreachable: valid instances that cannot.
    """

    num_schemas: int = 0
    num_accepted: int = 0
    num_valid: int = 0
    num_invalid: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)

    def row(self) -> str:
        """Their line of the table."""
        return (
            f"{self.num_accepted} of {self.num_schemas} | {len(self.passed)} of {self.num_invalid} | "
            f"{len(self.unreachable)} of {self.num_valid}"
        )


def fetch(folder: Path = FOLDER) -> Path:
    """The directory of the suite's tests, fetched when it is not there."""
    found = sorted(folder.glob("jsonschema-*/json/tests"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema", "jsonschema"]
        subprocess.run([*get, "-d", str(folder)], check=True)
        for archive in folder.glob("jsonschema-*.tar.gz"):
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        found = sorted(folder.glob("jsonschema-*/json/tests"))
    return found[-1]


def cases(tests: Path) -> Iterator[Case]:
    """Every schema of the drafts, formats included."""
    for draft in DRAFTS:
        files = [*sorted((tests / draft).glob("*.json")), *sorted((tests / draft / "optional/format").glob("*.json"))]
        for file in files:
            for group in json.loads(file.read_text()):
                instances = tuple((one["description"], one["data"], one["valid"]) for one in group["tests"])
                name = f"{draft}/{file.relative_to(tests / draft)}"
                yield Case(name, group["description"], group["schema"], instances)


class Suite:
    """The libraries over one vocabulary, and what of the suite they honour."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ids = {piece: token_id for token_id, piece in reversed(list(enumerate(vocabulary.pieces))) if piece}
        self._longest = max(map(len, self._ids))
        self._made: dict[str, StructuredOutputBackend] = {}

    def run(self, library: str, all_cases: list[Case]) -> Figures:
        """Both directions with `library`, or `auto`."""
        figures = Figures()
        for case in all_cases:
            figures.num_schemas += 1
            grammar = self.grammar(case.schema, library)
            if isinstance(grammar, str):
                figures.refused.append((case.name, grammar))
                continue
            figures.num_accepted += 1
            for description, value, is_valid in case.tests:
                name = f"{case.name}: {description}"
                is_written = any(self.is_reachable(grammar, text) for text in spellings(value, every=not is_valid))
                if is_valid:
                    figures.num_valid += 1
                    figures.unreachable += [] if is_written else [name]
                else:
                    figures.num_invalid += 1
                    figures.passed += [name] if is_written else []
        return figures

    def grammar(self, schema: Any, library: str) -> CompiledGrammar | str:
        """As a request gets it; why not, when it is refused."""
        reason = ""
        try:
            params = StructuredOutputsParams(json=schema if isinstance(schema, dict) else json.dumps(schema))
            for resolved in honouring(params, StructuredOutputsConfig(backend=library)):
                spec = spec_of(resolved)
                if spec.backend not in self._made:
                    self._made[spec.backend] = make_backend(spec.backend, self.vocabulary)
                backend = self._made[spec.backend]
                try:
                    return backend.load(spec, backend.compile(spec))
                except GrammarError as error:
                    reason += f"when compiled, {spec.backend}: {error} "
        except QuireClientError as error:
            return reason or error.message
        return reason

    def is_reachable(self, grammar: CompiledGrammar, text: str) -> bool:
        """Whether masks allow the longest tokens of `text`, or those of its bytes, one after another, then the end."""
        return any(self._is_allowed(grammar, self.tokens(text, size)) for size in (1, self._longest))

    def _is_allowed(self, grammar: CompiledGrammar, token_ids: list[int]) -> bool:
        state = grammar.start()
        line = np.empty((1, self.vocabulary.bitmask_size), dtype=np.int32)
        for token_id in [*token_ids, self.vocabulary.eos_token_id]:
            try:
                state.fill_bitmask(line, 0)
            except GrammarError:
                return False
            if not int(line[0, token_id >> 5]) >> (token_id & 31) & 1 or not state.accept(token_id):
                return False
        return state.is_terminated()

    def tokens(self, text: str, longest: int) -> list[int]:
        """Tokens of a text, of at most so many bytes, each the longest there is."""
        data, at, found = text.encode("utf-8", "surrogatepass"), 0, []
        while at < len(data):
            size = next(size for size in range(longest, 0, -1) if data[at : at + size] in self._ids)
            piece = data[at : at + size]
            found.append(self._ids[piece])
            at += len(piece)
        return found


def spellings(value: Any, *, every: bool) -> Iterator[str]:
    """Texts of a value: with and without spaces, in ASCII, its names in any order; `every`: escaped names, too."""
    for one in _orders(value):
        yield json.dumps(one, ensure_ascii=False)
        yield json.dumps(one, ensure_ascii=False, separators=(",", ":"))
        if every:
            yield json.dumps(one)
            yield json.dumps(_with_marked_names(one)).replace(f'"{_MARK}', '"').replace("\\\\u", "\\u")


_MARK = "\x7f"


def _with_marked_names(value: Any) -> Any:
    """`value` with every character of its names as an escape."""
    if isinstance(value, dict):
        return {_MARK + "".join(map(_escape, name)): _with_marked_names(item) for name, item in value.items()}
    return [_with_marked_names(item) for item in value] if isinstance(value, list) else value


def _escape(char: str) -> str:
    data = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))


def _orders(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict) or len(value) > 4:
        yield value
        return
    for number, names in enumerate(permutations(value)):
        if number < MAX_ORDERS:
            yield {name: value[name] for name in names}


def leaf_vocabulary() -> Vocabulary:
    """Of the embedded model."""
    return read_vocabulary(str(resolve_model_path("leaf", None, None)), 3072, 2)


def main() -> None:
    """Run the suite; fail when something invalid is accepted, or too much that is valid cannot be reached."""
    parser = argparse.ArgumentParser(description="The official JSON-Schema-Test-Suite, in both directions.")
    parser.add_argument("--libraries", default="xgrammar,guidance,auto", help=", ".join(BACKENDS) + ", auto")
    parser.add_argument("--show-refused", action="store_true")
    args = parser.parse_args()
    suite, all_cases = Suite(leaf_vocabulary()), list(cases(fetch()))
    print("library | accepted schemas | invalid accepted | valid not reachable")
    is_right = True
    for library in args.libraries.split(","):
        figures = suite.run(library, all_cases)
        print(f"{library} | {figures.row()}", flush=True)
        for name in figures.passed:
            print(f"  invalid, accepted by {library}: {name}")
        is_right &= not figures.passed
    for name in figures.unreachable:
        print(f"  valid, not reachable: {name}")
    for name, reason in figures.refused if args.show_refused else ():
        print(f"  refused: {name}: {reason[:200]}")
    if library == "auto" and set(figures.unreachable) != narrower_names():
        print("  the list in quire/entrypoints/structured_narrower.py differs:")
        print("  ", sorted(set(figures.unreachable) ^ narrower_names()))
        is_right = False
    print(f"{library}, accepted | invalid accepted | valid not reachable: {figures.row()}")
    raise SystemExit(not is_right or len(figures.unreachable) > MAX_UNREACHABLE)


if __name__ == "__main__":
    main()

"""lm-format-enforcer (https://github.com/noamgat/lm-format-enforcer): parsers of characters, asked about every token.

Only the parsers are the library's. It keys its own walk over tokens by all that was written before, and forgets none
of it; here an answer is where its parser stands, and the last `MAX_ROLLBACK` places before. Its JSON parser would write
some numbers and commas that are no JSON: what it may write is narrowed by `_Json`.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from quire.core.grammar_bitmask import pack_mask
from quire.structured_output.capabilities import BASIC_KEYWORDS, Capabilities
from quire.structured_output.eos_tracking import EosTrackingMatcher
from quire.structured_output.foreign import import_lm_format_enforcer
from quire.structured_output.interface import (
    MAX_ROLLBACK,
    CompiledGrammar,
    GrammarError,
    GrammarSpec,
    Matcher,
    StructuredOutputBackend,
    Vocabulary,
)
from quire.structured_output.schema.keywords import LISTS, MAPS, ONES
from quire.structured_output.schema.lm_format_enforcer import MAX_VALUES, check_subschema
from quire.structured_output.schema.regex import without_anchors
from quire.structured_output.token_trie import TokenTrie

MAX_CACHED_MASKS = 256
MAX_WHITESPACE = 12
"""Whitespace characters in a row."""
MAX_TRANSITIONS = 100_000
PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
"""What stands where a grammar allows any character."""
WHITESPACE = " \t\n\r"
_KEPT = BASIC_KEYWORDS | {"$defs", "definitions"}


class LMFormatEnforcerBackend(StructuredOutputBackend):
    """The automata of patterns cross, as JSON; the rest is made in no time."""

    capabilities = Capabilities(
        module="lmformatenforcer",
        kinds=frozenset(("json", "json_object", "regex", "choice")),
        keywords=BASIC_KEYWORDS,
        max_choices=MAX_VALUES,
        check_subschema=check_subschema,
    )

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._library = import_lm_format_enforcer()
        self._tokens = _Tokens(vocabulary)
        self._lock = Lock()
        self._config = self._library.CharacterLevelParserConfig(
            alphabet=PRINTABLE, max_consecutive_whitespaces=MAX_WHITESPACE, force_json_field_order=False,
            max_json_array_length=0,
        )  # fmt: skip

    def compile(self, spec: GrammarSpec) -> bytes:
        """Make the automata of all patterns, and try the first step."""
        try:
            automata = {pattern: _automaton(self._library, pattern, self._config) for pattern in _patterns(spec)}
            compiled = json.dumps(automata).encode()
            grammar = self.load(spec, compiled).start()
        except GrammarError:
            raise
        except Exception as error:  # of its own classes, of pydantic's and of its regular expressions'
            raise _refusal(error) from None
        grammar.fill_bitmask(np.empty((1, self.vocabulary.bitmask_size), dtype=np.int32), 0)
        return compiled

    def load(self, spec: GrammarSpec, compiled: bytes) -> CompiledGrammar:
        """The parser over automata that are made already."""
        automata = {pattern: self._regex_parser(one) for pattern, one in json.loads(compiled).items()}
        if spec.kind == "regex":
            start = _Text(automata[spec.text])
        elif spec.kind == "choice":
            choices = [self._library.StringParser(text) for text in json.loads(spec.text)]
            start = _Text(self._library.UnionParser(choices))
        elif spec.kind == "json":
            parser = self._json_parser(_for_library(json.loads(spec.text)), automata)
            start = _Json(parser, has_whitespace=spec.any_whitespace)
        else:
            raise GrammarError(f"{spec.kind} is not supported by it")
        return _Compiled(self._tokens, start)

    def _json_parser(self, schema: Any, automata: dict[str, Any]) -> Any:
        # Its cache of patterns is one for all schemas and never emptied: this schema gets its own.
        with self._lock:
            shared = self._library.JsonSchemaParser({"type": "null"}, self._config).context.regex_parser_cache
            shared.update(automata)
            parser = self._library.JsonSchemaParser(schema, self._config)
            shared.clear()
        parser.context.regex_parser_cache = automata
        return parser

    def _regex_parser(self, automaton: dict[str, Any]) -> Any:
        interegular = import_lm_format_enforcer().regexparser.interegular
        symbols = {interegular.fsm.anything_else if key == "" else key: at for key, at in automaton["symbols"].items()}
        states = {int(state): {int(at): to for at, to in line.items()} for state, line in automaton["map"].items()}
        parser = self._library.RegexParser("", self._config)
        parser.context.pattern = interegular.FSM(
            alphabet=interegular.fsm.Alphabet(symbols), states=set(states), initial=automaton["initial"],
            finals=set(automaton["finals"]), map=states,
        )  # fmt: skip
        parser.current_state = automaton["initial"]
        parser.config = self._config  # counts the characters that the automaton does not name
        return parser


def _automaton(library: Any, pattern: str, config: Any) -> dict[str, Any]:
    """A pattern's automaton as JSON values, without the states from which no text can be completed."""
    automaton = library.RegexParser(pattern, config).context.pattern
    sources: dict[int, set[int]] = {}
    for state, line in automaton.map.items():
        for to in line.values():
            sources.setdefault(to, set()).add(state)
    live, found = set(automaton.finals), list(automaton.finals)
    while found:
        new = sources.get(found.pop(), set()) - live
        live |= new
        found += new
    if automaton.initial not in live:
        raise GrammarError("no text matches the pattern")
    kept = {state: {at: to for at, to in automaton.map.get(state, {}).items() if to in live} for state in live}
    if sum(map(len, kept.values())) > MAX_TRANSITIONS:
        raise GrammarError(f"the automaton of the pattern has more than {MAX_TRANSITIONS} transitions")
    symbols = {key if isinstance(key, str) else "": at for key, at in automaton.alphabet.items()}
    return {"symbols": symbols, "initial": automaton.initial, "finals": sorted(automaton.finals), "map": kept}


def _patterns(spec: GrammarSpec) -> set[str]:
    if spec.kind == "regex":
        return {spec.text}
    found: set[str] = set()
    stack = [_for_library(json.loads(spec.text))] if spec.kind == "json" else []
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            if isinstance(one.get("pattern"), str):
                found.add(one["pattern"])
            stack.extend(one.values())
        elif isinstance(one, list):
            stack.extend(one)
    return found


def _for_library(schema: Any) -> Any:
    """`schema` without what forbids nothing, its patterns in a form of which nothing is taken for an anchor."""
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            changed[keyword] = {name: _for_library(item) for name, item in value.items()}
        elif keyword in LISTS and isinstance(value, list):
            changed[keyword] = [_for_library(item) for item in value]
        elif keyword == "pattern":
            changed[keyword] = f"(?:{without_anchors(value)})"
        elif keyword in _KEPT and not (keyword == "additionalProperties" and value is True):
            changed[keyword] = _for_library(value) if keyword in ONES else value
    return changed


class _Tokens:
    """The vocabulary, and what of it stands in a JSON string as it is."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.trie = TokenTrie(vocabulary)
        plain = frozenset(PRINTABLE.encode()) - frozenset(b'"\\')
        self.is_spaced = np.array([piece[:1] == b" " for piece in vocabulary.pieces])
        self.plain_length = np.array([_length(piece, plain) for piece in vocabulary.pieces], dtype=np.int32)
        self.closing_length = np.array(
            [_length(piece[:-1], plain) if piece[-1:] == b'"' else -1 for piece in vocabulary.pieces], dtype=np.int32
        )

    def mask(self, place: _Text) -> np.ndarray:
        """[bitmask_size] int32: what may be written at `place`, and the end."""
        is_allowed = np.zeros(32 * self.vocabulary.bitmask_size, dtype=np.bool_)
        string = place.free_string()
        if string is None:
            is_allowed[self.trie.allowed(place)] = True
        else:
            self._allow_free_string(is_allowed[: self.vocabulary.vocab_size], place, *string)
        is_allowed[self.vocabulary.eos_token_id] = place.is_complete()
        return pack_mask(is_allowed)

    def _allow_free_string(self, is_allowed: np.ndarray, place: _Text, written: int, low: int, high: int) -> None:
        """In a string of any characters, without asking about each: tokens within it, at its end, and beyond."""
        length, closing = self.plain_length, self.closing_length
        is_allowed |= (length > 0) & (length <= high - written)
        is_allowed |= (closing >= max(0, low - written)) & (closing <= high - written)
        if not written:
            is_allowed &= ~self.is_spaced
        if written >= low:
            is_allowed[self.trie.allowed(place, frozenset(b'"'))] = True


def _length(piece: bytes, plain: frozenset[int]) -> int:
    return len(piece) if plain.issuperset(piece) else -1


@dataclass(frozen=True, slots=True)
class _Text:
    """Where a text stands: a parser of characters, and the bytes of one that has just begun."""

    parser: Any
    begun: bytes = b""

    def next_bytes(self) -> frozenset[int]:
        """The bytes that may follow."""
        return _next_bytes(self.parser.get_allowed_characters(), self.forbidden(), self.begun)

    def after(self, byte: int) -> _Text:
        """The place behind one of them."""
        text = _decoded(self.begun + bytes((byte,)))
        if text is None:
            return self.moved(self.parser, self.begun + bytes((byte,)), "")
        return self.moved(self.parser.add_character(text), b"", text)

    def moved(self, parser: Any, begun: bytes, char: str) -> _Text:
        """This kind of place, elsewhere; `char` is what was written, or empty."""
        return _Text(parser, begun)

    def forbidden(self) -> str:
        """Characters that are not written, although the parser would take them."""
        return ""

    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return not self.begun and bool(self.parser.can_end())

    def cache_key(self) -> Any:
        """Equal where everything that may follow is equal; None = not known."""
        return None if self.begun else self.parser.cache_key()

    def free_string(self) -> tuple[int, int, int] | None:
        """Within a JSON string of any characters: how many it has, and must have at least and at most."""
        return None


@dataclass(frozen=True, slots=True)
class _Json(_Text):
    """A place in JSON, where the parser may write less than it would.

    It allows escapes that it counts wrongly, drops spaces at the beginning of a string, and takes `{"a":1,}`, `1.e5`
    and integers such as `1e-5` and `-0.5` for right: none of these is written.

    Attributes:
        has_whitespace: whitespace between values is allowed.
        in_string: the place is within quotes.
        last: the last character that is no whitespace; within a string, just the last one.
    """

    has_whitespace: bool = True
    in_string: bool = False
    last: str = ""

    def moved(self, parser: Any, begun: bytes, char: str) -> _Text:
        """Behind `char`."""
        in_string = self.in_string != (char == '"')
        last = char if char and (in_string or char not in WHITESPACE) else self.last
        return _Json(parser, begun, self.has_whitespace, in_string, last)

    def forbidden(self) -> str:
        """What would be no JSON, or not what the parser takes it for."""
        if self.in_string:
            return "\\" + WHITESPACE if self.last == '"' else "\\"
        found = "" if self.has_whitespace else WHITESPACE
        if self.last == ",":
            return found + "}]"
        if self.last == "-":
            return found + "0"
        return found + "eE" if self.last.isdigit() or self.last == "." else found

    def is_complete(self) -> bool:
        """Whether the value may end here."""
        return not self.begun and not self.in_string and bool(self.parser.can_end())

    def cache_key(self) -> Any:
        """The library knows none."""
        return None

    def free_string(self) -> tuple[int, int, int] | None:
        """By the library's own mark."""
        key = self.parser.shortcut_key() if self.in_string and not self.begun else None
        return None if key is None or key[0] != "json_freetext" else tuple(key[1:])


@lru_cache(maxsize=4096)
def _next_bytes(chars: str, forbidden: str, begun: bytes) -> frozenset[int]:
    """The bytes by which one of `chars` begins, or goes on after `begun`."""
    encoded = (char.encode() for char in chars if char not in forbidden)
    return frozenset(one[len(begun)] for one in encoded if len(one) > len(begun) and one.startswith(begun))


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _Compiled(CompiledGrammar):
    """The place at the beginning, and masks of places that come again."""

    def __init__(self, tokens: _Tokens, place: _Text) -> None:
        self.tokens = tokens
        self._place = place
        self._masks: OrderedDict[Any, np.ndarray] = OrderedDict()

    def start(self) -> Matcher:
        return _LMFormatEnforcer(self, self._place)

    def mask(self, place: _Text) -> np.ndarray:
        key = place.cache_key()
        if key is None:
            return self.tokens.mask(place)
        if key not in self._masks:
            self._masks[key] = self.tokens.mask(place)
        self._masks.move_to_end(key)
        if len(self._masks) > MAX_CACHED_MASKS:
            self._masks.popitem(last=False)
        return self._masks[key]


class _LMFormatEnforcer(EosTrackingMatcher):
    def __init__(self, compiled: _Compiled, place: _Text) -> None:
        super().__init__(compiled.tokens.vocabulary.eos_token_id)
        self._compiled = compiled
        self._places = deque([place], maxlen=MAX_ROLLBACK + 1)

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        try:
            bitmask[row] = self._compiled.mask(self._places[-1])
        except Exception as error:
            raise _refusal(error) from None

    def _is_complete(self) -> bool:
        return self._places[-1].is_complete()

    def _advance(self, token_id: int) -> bool:
        place = self._places[-1]
        piece = self._compiled.tokens.vocabulary.pieces[token_id]
        try:
            for byte in piece:
                if byte not in place.next_bytes():
                    return False
                place = place.after(byte)
        except Exception:  # it meets what it does not know within a schema when it comes to it
            return False
        self._places.append(place)
        return bool(piece)

    def _take_back(self, num_tokens: int) -> None:
        if num_tokens >= len(self._places):
            raise GrammarError(f"{num_tokens} tokens are more than can be taken back")
        for _ in range(num_tokens):
            self._places.pop()


def _refusal(error: Exception) -> GrammarError:
    return GrammarError(" ".join(f"{type(error).__name__}: {error}".split())[:500])


BACKEND = LMFormatEnforcerBackend

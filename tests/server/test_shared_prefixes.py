"""A system prompt that the operator declares is computed once for all tenants; everything else is each one's own."""

from __future__ import annotations

import json

import pytest

from quire.config.build import build_config
from quire.core.inputs import TokensPrompt
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.server.chat.prompts import PromptReader
from quire.server.chat.shared_prefixes import SharedPrefixes, read_shared_prefixes
from quire.server.http.prompt_workers import PromptWorkers
from tests.server.engines import ScriptedEngine, SteppedEngine, scripted_config
from tests.server.servers import RunningServer, server_config
from tests.server.test_protocol import CHAT, post
from tests.server.test_safety import bearer

SYSTEM = "You are the assistant of a shop that sells paper by the ream and the quire. " * 4
BLOCK_SIZE = 16
KEYS = "red=red-key-1234\nblue=blue-key-1234\n"


def declare(path, **entries):
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    (folder / "keys").write_text(KEYS)
    shared = declare(folder / "prefixes.yaml", shop={"system": SYSTEM}, ids={"token_ids": list(range(500, 540))})
    config = build_config(model="leaf", num_gpu_blocks_override=256, block_size=BLOCK_SIZE, packing_cache=False)
    stepped = SteppedEngine(LLMEngine.from_config(config))
    with RunningServer(stepped, api_key_file=str(folder / "keys"), shared_prefixes=shared) as running:
        yield running
    stepped.shutdown()


def cached(server: RunningServer, path: str, key: str, **body: object) -> int:
    answer = post(server, path, {"max_tokens": 2, "temperature": 0, **body}, headers=bearer(key)).json()
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def chat(server: RunningServer, key: str, system: str, question: str) -> int:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return cached(server, CHAT, key, messages=messages)


def test_a_declared_system_prompt_is_shared_to_its_last_full_page_and_no_further(server):
    reader = server.state.prompts
    pages = len(reader.constant_prefix(system=SYSTEM)) // BLOCK_SIZE
    question = "What does a quire of the finest paper cost, and how many sheets are in it? " * 3
    assert pages >= 4
    assert chat(server, "red-key-1234", SYSTEM, question) == 0
    assert chat(server, "blue-key-1234", SYSTEM, question) == pages * BLOCK_SIZE
    own = chat(server, "blue-key-1234", SYSTEM, question)
    assert own > pages * BLOCK_SIZE, "the question is found by who asked it"
    assert chat(server, "red-key-1234", SYSTEM, question) == own


def test_a_system_prompt_that_is_not_declared_is_not_shared(server):
    other = SYSTEM.replace("paper", "cloth")
    assert [chat(server, key, other, "Hello") for key in ("red-key-1234", "blue-key-1234")] == [0, 0]
    assert chat(server, "blue-key-1234", other, "Hello") > 0


def test_a_clients_own_salt_holds_after_the_declared_pages(server):
    prompt = [*range(500, 540), *range(600, 640)]
    ask = {"path": "/v1/completions", "key": "red-key-1234", "prompt": prompt}
    found = [cached(server, **ask, cache_salt=salt) for salt in ("a", "b", "a")]
    assert found == [0, 32, 64]


def test_the_longest_declared_prefix_counts():
    prefixes = SharedPrefixes({"short": [1, 2], "long": [1, 2, 3, 4], "other": [9]})
    cases = {(1, 2, 3, 4, 5): 4, (1, 2, 3, 5): 2, (1,): 0, (2, 1): 0, (9,): 1, (1, 2): 2}
    assert {ids: prefixes.num_shared_tokens(ids) for ids in cases} == cases
    prompt = TokensPrompt((5, 6), "text")
    assert prefixes.marked(prompt) is prompt and prefixes.marked(TokensPrompt((9, 9))).num_shared_tokens == 1


@pytest.mark.parametrize("text", ["You are a poet.", "One\n\n", "x", "Ends in a space "])
def test_what_follows_a_text_never_changes_its_declared_tokens(text):
    engine = ScriptedEngine()
    reader = PromptReader(engine, server_config().api, PromptWorkers())
    ids = reader.constant_prefix(text=text)
    for rest in ("", " And", "more", "\nNext", "7", "!"):
        full = engine.tokenizer.encode(text + rest, True)
        assert full[: len(ids) - 1] == ids[:-1], "at most the last token may join what follows"


BAD_ENTRIES = {
    "not a mapping": ({"a": "text"}, "one of"),
    "two forms": ({"a": {"system": "x", "text": "y"}}, "one of"),
    "unknown form": ({"a": {"sytem": "x"}}, "system"),
    "empty": ({"a": {"system": ""}}, "empty"),
    "a number": ({"a": {"text": 5}}, "text"),
    "an id that is none": ({"a": {"token_ids": [1, 10**6]}}, "token_ids"),
    "no ids": ({"a": {"token_ids": []}}, "longer"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "word"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_declaration_is_refused_by_name(tmp_path, entries, word):
    engine = ScriptedEngine()
    reader = PromptReader(engine, server_config().api, PromptWorkers())
    with pytest.raises(ConfigError) as caught:
        read_shared_prefixes(declare(tmp_path / "file", **entries), engine, reader)
    assert caught.value.field == "shared_prefixes" and word in str(caught.value)


def test_a_file_that_is_missing_or_useless_is_refused(tmp_path):
    engine = ScriptedEngine()
    reader = PromptReader(engine, server_config().api, PromptWorkers())
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shared_prefixes(str(tmp_path / "none"), engine, reader)
    without = ScriptedEngine(config=scripted_config(enable_prefix_caching=False))
    with pytest.raises(ConfigError, match="prefix caching"):
        read_shared_prefixes(declare(tmp_path / "file", a={"text": "x"}), without, reader)

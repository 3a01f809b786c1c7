"""Blocks of a declared prefix are found under every salt, all others under their own alone: over random prompts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.engine_messages import EngineCoreRequest
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.test_manager import BLOCK_SIZE, GROUP, Rows, make_manager

PREFIX = list(range(100, 110))  # two blocks of 4 and a half
TOKENS = st.sampled_from([1, 2])
PROMPTS = st.tuples(st.sampled_from([0, 5, 8, len(PREFIX)]), st.lists(TOKENS, max_size=14)).map(
    lambda parts: PREFIX[: parts[0]] + parts[1] or [1]
)


def request(tokens: list[int], salt: str | None) -> Request:
    """As the server sends it: marked when the prompt begins with the whole prefix."""
    message = EngineCoreRequest(
        handle=0, request_id="r", prompt_token_ids=np.array(tokens, dtype=np.int32), seed=0, cache_salt=salt,
        num_shared_tokens=len(PREFIX) if tokens[: len(PREFIX)] == PREFIX else 0,
        sampling_params=SamplingParams(max_tokens=4),
    )  # fmt: skip
    return Request.from_message(message)


def new_manager() -> KVCacheManager:
    assert GROUP.spec.block_size == BLOCK_SIZE
    return make_manager(num_blocks=200)


def serve(kv: KVCacheManager, tokens: list[int], salt: str | None, answer: list[int] | None = None) -> int:
    """Run a request with a given answer to its end; how many of its tokens were found in the cache."""
    rows, made = Rows(kv), request(tokens, salt)
    kv.note_arrival(made)
    prefix = kv.get_computed_blocks(made)
    kv.place(0, made, prefix, len(tokens) + len(answer or ()))
    everything = tokens + (answer or [])
    rows.token_ids[0, : len(everything)] = everything
    kv.cache_full_blocks(np.array([0]), np.array([len(everything)]), rows.token_ids)
    kv.free(0)
    return prefix.num_tokens


def test_the_second_tenant_finds_exactly_the_pages_wholly_inside_the_prefix():
    kv = new_manager()
    prompt = PREFIX + [1] * 10
    assert [serve(kv, prompt, "red"), serve(kv, prompt, "blue")] == [0, 8]
    assert [serve(kv, prompt, "red"), serve(kv, prompt, "blue")] == [16, 16], "its own pages are found after them"
    assert serve(kv, prompt, None) == 8


def test_a_beginning_of_the_prefix_that_goes_on_otherwise_is_not_shared():
    kv = new_manager()
    serve(kv, PREFIX + [1] * 4, "red")
    assert serve(kv, PREFIX[:9] + [1] * 5, "blue") == 0


def test_an_answer_that_completes_the_prefix_is_not_shared():
    kv = new_manager()
    serve(kv, PREFIX[:4], "red", answer=[*PREFIX[4:], 1, 1, 1])
    assert serve(kv, PREFIX + [1], "blue") == 0


@settings(max_examples=150, deadline=None)
@given(others=st.lists(st.tuples(PROMPTS, st.lists(TOKENS, max_size=6)), max_size=5), prompt=PROMPTS)
def test_what_a_tenant_finds_depends_on_others_by_the_declared_pages_alone(others, prompt):
    kv = new_manager()
    for tokens, answer in others:
        serve(kv, tokens, "red", answer)
    declared_was_used = any(tokens[: len(PREFIX)] == PREFIX for tokens, _ in others)
    is_declared = prompt[: len(PREFIX)] == PREFIX
    shared = len(PREFIX) // BLOCK_SIZE * BLOCK_SIZE if declared_was_used and is_declared else 0
    assert serve(kv, prompt, "blue") == shared
    assert serve(kv, prompt, "blue") == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE, "its own are found"


@settings(max_examples=100, deadline=None)
@given(own=st.lists(PROMPTS, max_size=3), others=st.lists(PROMPTS, max_size=4), prompt=PROMPTS)
def test_others_change_nothing_when_the_tenant_has_used_the_prefix_itself(own, others, prompt):
    found = []
    for before in (own, others + own, own + others):
        kv = new_manager()
        serve(kv, PREFIX + [1] * 4, "blue")
        for tokens in before:
            serve(kv, tokens, "blue" if tokens in own else "red")
        found.append(serve(kv, prompt, "blue"))
    assert len(set(found)) == 1

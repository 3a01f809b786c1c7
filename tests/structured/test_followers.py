"""Expensive grammars are followed by processes: with the same masks, within a budget, and only while somebody waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from quire.models.hub import resolve_model_path
from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.follow_messages import FollowReply, FollowStart
from quire.structured_output.followers import MAX_FOLLOWERS, Follower, Followers
from quire.structured_output.interface import GrammarSpec
from quire.structured_output.registry import make_backend
from quire.structured_output.vocabulary import read_vocabulary
from tests.structured.libraries import needs_libraries
from tests.structured.walks import allowed

pytestmark = [
    needs_libraries,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of memory need /proc"),
]
TIMEOUT_S = 120.0
EOS, VOCAB_SIZE = 2, 3072
MODEL = str(resolve_model_path("leaf", None, None))
PLAIN = GrammarSpec(kind="regex", text="[a-f]{3}", backend="xgrammar")
AMBIGUOUS = GrammarSpec(kind="grammar", text='root ::= s\ns ::= s s | s s s | [a-z] | ""', backend="xgrammar")


def setup(cpu_s: float) -> WorkerSetup:
    return WorkerSetup(MODEL, VOCAB_SIZE, EOS, cpu_s, 400 << 20)


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    made = Followers(setup(0.1))
    yield made
    made.close()


def begin(
    followers: Followers, spec: GrammarSpec, token_ids: list[int], tenant: str = ""
) -> tuple[Follower, SimpleQueue[FollowReply]]:
    replies: SimpleQueue[FollowReply] = SimpleQueue()
    return followers.begin(FollowStart(spec=spec, token_ids=token_ids), tenant, replies.put), replies


def letters() -> dict[str, int]:
    pieces = read_vocabulary(MODEL, VOCAB_SIZE, EOS).pieces
    return {piece.decode(): token_id for token_id, piece in enumerate(pieces) if len(piece) == 1 and piece.isalpha()}


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines", "lm-format-enforcer"])
def test_a_process_gives_the_masks_that_the_library_gives_here(followers: Followers, backend: str):
    vocabulary = read_vocabulary(MODEL, VOCAB_SIZE, EOS)
    spec = GrammarSpec(kind="regex", text="[a-f]{3}", backend=backend)
    library = make_backend(backend, vocabulary)
    grammar = library.load(spec, library.compile(spec)).start()
    line = np.empty((1, vocabulary.bitmask_size), dtype=np.int32)
    follower, replies = begin(followers, spec, [])
    for token_id in (letters()["a"], letters()["f"], letters()["c"], EOS):
        reply = replies.get(timeout=TIMEOUT_S)
        assert reply.error is None and not follower.is_terminated
        grammar.fill_bitmask(line, 0)
        assert allowed(follower.line, VOCAB_SIZE).tolist() == allowed(line[0], VOCAB_SIZE).tolist()
        assert grammar.accept(token_id)
        follower.push(token_id)
    replies.get(timeout=TIMEOUT_S)
    assert follower.is_terminated
    follower.close()


def test_a_token_that_the_grammar_does_not_allow_is_named(followers: Followers):
    follower, replies = begin(followers, PLAIN, [letters()["z"]])
    assert replies.get(timeout=TIMEOUT_S).refused_id == letters()["z"]
    follower.close()


def test_a_grammar_over_its_budget_ends_its_own_process_and_others_go_on(followers: Followers):
    plain, plain_replies = begin(followers, PLAIN, [])
    assert plain_replies.get(timeout=TIMEOUT_S).error is None
    dear, dear_replies = begin(followers, AMBIGUOUS, [letters()["a"]] * 400)
    assert dear_replies.get(timeout=TIMEOUT_S).error == "it took more than 1 s of CPU time, or 400 MiB"
    plain.push(letters()["a"])
    assert plain_replies.get(timeout=TIMEOUT_S).error is None
    plain.close()
    dear.close()


def test_whoever_leaves_ends_what_is_computed_for_it_and_makes_room_for_the_next():
    followers = Followers(setup(1e6))
    try:
        dear = [begin(followers, AMBIGUOUS, [letters()["a"]] * 4000) for _ in range(MAX_FOLLOWERS)]
        _, replies = begin(followers, PLAIN, [])
        for follower, _ in dear:
            follower.close()
        assert replies.get(timeout=TIMEOUT_S).error is None
        assert all(replies.empty() for _, replies in dear), "nobody waits for them"
        assert followers._process is not None
        while len(children(followers._process.pid)) > 1:
            os.sched_yield()
    finally:
        followers.close()


def test_a_tenant_with_many_expensive_grammars_leaves_places_to_the_tenants_that_come_later(followers: Followers):
    crowd = [begin(followers, PLAIN, [], "crowd") for _ in range(MAX_FOLLOWERS + 1)]
    for _, replies in crowd[: MAX_FOLLOWERS // 2]:
        assert replies.get(timeout=TIMEOUT_S).error is None
    late = [begin(followers, PLAIN, [], name) for name in ("second", "third", "second")]
    for _, replies in late:
        assert replies.get(timeout=TIMEOUT_S).error is None
    assert all(replies.empty() for _, replies in crowd[MAX_FOLLOWERS // 2 :]), "it has its share"
    for follower, _ in late:
        follower.close()
    crowd[0][0].close()
    assert crowd[MAX_FOLLOWERS // 2][1].get(timeout=TIMEOUT_S).error is None
    for follower, _ in crowd:
        follower.close()


def children(pid: int) -> list[int]:
    """Of a process with one thread."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

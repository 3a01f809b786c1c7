"""Ranks that a launcher has started, each with a script, which is a thread here; `make test-launcher` has processes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams, envs
from quire.distributed.rendezvous import Rendezvous
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.executor.launched import FollowedRank
from tests.parallel.circumstances import SETTINGS

PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(8, 60))}]
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, logprobs=2)


class Scripts:
    """Scripts of ranks as threads of this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        patch.setattr(envs, "launcher_variables", lambda: self._own.variables)
        patch.setattr(Rendezvous, "start_world", lambda _: None)  # is of the process

    def run(self, script: Callable[[int], Any], size: int = 2) -> list[Any]:
        """What the script of each rank returns, or raises."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        found: list[Any] = [None] * size

        def start(rank: int) -> None:
            self._own.variables = {
                "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            try:
                found[rank] = script(rank)
            except QuireError as error:
                found[rank] = error

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(monkeypatch)


def launched(**settings: Any) -> LLM:
    given = {"tensor_parallel_size": 2, "num_threads": 1, **SETTINGS, **settings}
    return LLM("leaf", distributed_executor_backend="external_launcher", **given)


def answers(llm: LLM, prompts: list[Any] = PROMPTS) -> list[Any]:
    found = [one.outputs[0] for one in llm.generate(prompts, PARAMS, use_tqdm=False)]
    return [(list(one.token_ids), one.cumulative_logprob, one.logprobs) for one in found]


def everything(llm: LLM) -> list[Any]:
    with llm:
        found = [answers(llm)]
        with pytest.raises(QuireError) as refused:  # by the engine core, which rank 0 has
            llm.llm_engine._client.add_request(too_long(llm))
        return [*found, refused.value.message, answers(llm), llm.reset_prefix_cache(), answers(llm)]


def too_long(llm: LLM) -> Any:
    request = llm.llm_engine._front.prepare("long", PROMPTS[0], PARAMS).messages[0]
    object.__setattr__(request, "prompt_token_ids", request.prompt_token_ids.repeat(4000))
    return request


def test_every_script_gets_the_answers_and_errors_of_one_process(scripts: Scripts):
    expected = everything(LLM("leaf", **SETTINGS))
    for sizes in ({}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}):
        assert scripts.run(lambda _, sizes=sizes: everything(launched(**sizes))) == [expected, expected]


def test_with_replicas_each_group_of_ranks_answers_its_own_prompts(scripts: Scripts):
    expected = answers(LLM("leaf", **SETTINGS), PROMPTS[1:])
    settings = {"tensor_parallel_size": 1, "data_parallel_size": 2}
    found = scripts.run(lambda rank: answers(launched(**settings), PROMPTS[rank:]))
    assert found[1] == expected and len(found[0]) == 2


def test_scripts_that_diverge_are_told_which_rank_does_what(scripts: Scripts):
    def script(rank: int) -> Any:
        llm = launched()
        with pytest.raises(EngineDeadError) as caught:
            answers(llm, PROMPTS[: 2 - rank])
        with pytest.raises(EngineDeadError):
            answers(llm)
        return caught.value.message

    told = "the script of rank 1 calls for a step, and that of rank 0 for request 1 with a prompt of 52 tokens"
    found = scripts.run(script)
    assert [told in one for one in found] == [True, True], found


def test_the_end_of_a_rank_is_an_error_that_names_it(scripts: Scripts):
    def script(rank: int) -> Any:
        llm = launched()
        if rank:
            return llm.shutdown()
        while True:
            answers(llm)

    error = scripts.run(script)[0]
    assert isinstance(error, EngineDeadError) and "rank 1" in error.message and "has ended" in error.message


def test_no_script_goes_on_before_all_ranks_have_what_the_call_came_to(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch
):
    follow, has_it = FollowedRank.follow, threading.Event()

    def slowly(self: FollowedRank) -> Any:
        end = follow(self)
        if self.rank == 2 and end.is_last:
            time.sleep(0.3)  # the others would end in the meantime, and rank 2 would report that
            has_it.set()
        return end

    monkeypatch.setattr(FollowedRank, "follow", slowly)

    def script(rank: int) -> bool:
        llm = launched(tensor_parallel_size=1, pipeline_parallel_size=3)
        answers(llm, PROMPTS[:1])
        return has_it.is_set()

    assert scripts.run(script, size=3) == [True, True, True]


def test_ranks_with_other_settings_are_refused_on_all_of_them(scripts: Scripts):
    for error in scripts.run(lambda rank: launched(seed=rank)):
        assert isinstance(error, ConfigError) and "its model.seed is 1, and that of rank 0 0" in error.message


def test_servers_say_that_they_start_their_ranks_themselves():
    with pytest.raises(ConfigError, match="is for scripts that create an LLM on every rank"):
        AsyncLLM.from_engine_args({"model": "leaf", "distributed_executor_backend": "external_launcher"})

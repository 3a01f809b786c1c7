"""Blocks leave the caches of several ranks and come back whole: to a disk, to host memory, through a connector."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.distributed.shared_pages import SharedPages, make_shared_pages
from quire.errors import CommunicationError, UnsupportedError
from quire.kv_transfer import CONTRACT_VERSION, KVConnector
from tests.e2e.test_kv_disk import NUM_COMPUTED, NUM_FULL, Core
from tests.effort import IS_FULL, effort
from tests.models.checkpoints import make_checkpoint
from tests.parallel.ranks import ranks_as_threads

TWO_RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}


def answer(path: Path | None, **settings: Any) -> tuple[list[int], list[bytes], int]:
    with ranks_as_threads():
        core = Core(path, **({} if path else {"kv_disk": None}), **settings)
    try:
        return core.answer(0)
    finally:
        core.core.shutdown()


@pytest.mark.parametrize(
    "sizes",
    effort(
        (STAGES,),
        (TWO_RANKS, {**TWO_RANKS, **STAGES}, {"pipeline_parallel_size": 3, "pipeline_layer_partition": "3,1,3"}),
    ),
)
def test_ranks_read_from_disk_what_as_many_ranks_wrote_and_never_what_one_did(tmp_path: Path, sizes: dict[str, Any]):
    tokens, logprobs, num_computed = answer(tmp_path)
    assert num_computed == NUM_COMPUTED
    assert answer(tmp_path, **sizes) == (tokens, logprobs, NUM_COMPUTED)
    assert answer(tmp_path, **sizes) == (tokens, logprobs, NUM_COMPUTED - NUM_FULL)
    shared = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    sizes = {**sizes, "kv_disk": None, "kv_transfer_config": shared}
    assert answer(tmp_path, **sizes) == (tokens, logprobs, NUM_COMPUTED)
    assert answer(tmp_path, **sizes) == (tokens, logprobs, NUM_COMPUTED - NUM_FULL)


@pytest.mark.skipif(not IS_FULL, reason="a model of 70 MB; make test-full")
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_meet_while_hidden_states_larger_than_a_mailbox_are_on_their_way(tmp_path: Path, num_stages: int):
    """1 MiB, and log-probabilities of a prompt need 4 KiB of each of its tokens."""
    make_checkpoint("llama", tmp_path, hidden_size=1024, num_hidden_layers=4, std=0.02)
    prompts = [{"prompt_token_ids": [(7 * i * j + 3 * i) % 300 + 5 for j in range(400 + 90 * i)]} for i in range(4)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    shared = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}

    def found(**more: Any) -> list[tuple[Any, ...]]:
        settings = {"max_model_len": 800, "num_gpu_blocks_override": 250, "max_num_batched_tokens": 512}
        with ranks_as_threads(), LLM(str(tmp_path), num_threads=1, dtype="float32", **settings, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(tuple(one.outputs[0].token_ids), repr(one.prompt_logprobs)) for one in outputs]

    assert found(pipeline_parallel_size=num_stages, kv_transfer_config=shared) == found()


class HookedConnector(KVConnector):
    quire_contract = CONTRACT_VERSION
    has_layer_hooks = True


def test_a_connector_that_is_called_around_layers_is_refused():
    hooked = {"kv_connector": "HookedConnector", "kv_connector_module_path": __name__}
    with pytest.raises(UnsupportedError, match="called around every layer"):
        answer(None, **STAGES, kv_transfer_config=hooked)


def test_pages_are_the_same_memory_where_the_same_sizes_are_taken():
    (fd,) = make_shared_pages(1)
    try:
        mine, theirs = SharedPages(fd, is_owner=True), SharedPages(fd, is_owner=False)
        first, second = mine.take(100), mine.take(5000)
        first[99], second[4999] = 7, 8
        assert theirs.take(100)[99] == 7 and theirs.take(5000)[4999] == 8
        with pytest.raises(CommunicationError, match="differ in size"):
            theirs.take(1)
    finally:
        os.close(fd)

"""Pages of a real model in a dictionary: loaded again they give the same bits, and are not computed twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.config.build import build_config
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.kv_transfer import KVTransferMeta, KVTransferResults
from quire.engine.config_lookup import resolve_config
from quire.engine.core import EngineCore
from quire.engine.core_factory import build_core
from quire.platforms.detect import detect_platform
from quire.utils.phases import PhaseTimer
from quire.worker.kv_tier import CacheBlocks, KVTierWorker
from tests.unit.dictionary_tier import DictionaryTier
from tests.unit.scheduler.harness import make_request

BLOCK_SIZE, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 16, 70, 20
PROMPT = [(i * 37) % 900 + 5 for i in range(NUM_PROMPT_TOKENS)]


class DictionaryWorker(KVTierWorker):
    """Copies in the step that asks for it; what is asynchronous is reported with the step after."""

    def __init__(self) -> None:
        self.kept: dict[bytes, list[torch.Tensor]] = {}
        self._due: list[int] = []
        self._ended: list[int] = []

    def register_kv_caches(self, pages: CacheBlocks) -> None:
        self._pages = pages

    def start_transfers(self, meta: KVTransferMeta) -> None:
        for save in meta.saves:
            for i, key in enumerate(save.keys):
                self.kept[key] = self._pages.read(save.block_ids[i : i + 1])
        for load in meta.loads:
            for i, key in enumerate(load.keys):
                self._pages.write(load.block_ids[i : i + 1], self.kept[key])
        self._due += [one.transfer_id for one in (*meta.saves, *meta.loads)]

    def get_finished(self) -> KVTransferResults:
        ended, self._ended, self._due = self._ended, self._due, []
        return KVTransferResults(tuple(ended))


class Core:
    """An engine core with the tier; counts the tokens it computes."""

    def __init__(self) -> None:
        self.num_computed = 0
        self.worker = DictionaryWorker()
        platform = detect_platform("cpu")
        config = build_config(model="leaf", block_size=BLOCK_SIZE, max_model_len=256, num_gpu_blocks_override=40)
        config, _ = resolve_config(config, platform)
        tier = DictionaryTier(BLOCK_SIZE, lambda handle: handle % 2 > 0)
        self.core: EngineCore = build_core(config, platform, PhaseTimer(), on_step=self._count, kv_tier=tier)
        self.core.call_worker("register_kv_tier", self.worker)

    def _count(self, num_tokens: int) -> None:
        self.num_computed += num_tokens

    def answer(self, handle: int) -> tuple[list[int], list[np.ndarray], int]:
        """Tokens of `PROMPT`'s answer, their log-probabilities, and how many tokens were computed for it."""
        before = self.num_computed
        request = make_request(handle, PROMPT, max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, logprobs=3)
        self.core.add_request(dataclasses.replace(request, seed=7))
        outputs: list[EngineCoreOutputs] = []
        while self.core.has_unfinished_requests():
            outputs += [one for one in [self.core.step()] if one is not None]
        for _ in range(2):  # what it leaves is saved
            self.core.step()
        assert self.core.reset_prefix_cache(), "a page is lost"
        logprobs = [one.logprobs.logprobs for one in outputs if one.logprobs is not None]
        return [token for one in outputs for token in one.new_token_ids], logprobs, self.num_computed - before


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    core = Core()
    yield core
    core.core.shutdown()


def test_loaded_pages_give_the_same_bits_as_computed_ones_and_are_not_computed_again(core):
    tokens, logprobs, num_computed = core.answer(0)
    assert num_computed == NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS - 1
    assert len(core.worker.kept) == num_computed // BLOCK_SIZE
    for handle in (2, 3):  # in the step, and before it
        again, again_logprobs, num_again = core.answer(handle)
        assert again == tokens
        assert [one.tobytes() for one in again_logprobs] == [one.tobytes() for one in logprobs]
        assert num_again == num_computed - NUM_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE

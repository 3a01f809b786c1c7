"""The cache on a disk, with a real model: loaded blocks give the same bits, and nothing else is ever loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.core.engine_messages import EngineCoreOutputs
from quire.engine.config_lookup import resolve_config
from quire.engine.core import EngineCore
from quire.engine.core_factory import build_core
from quire.engine.llm_engine import LLMEngine
from quire.errors import QuireError
from quire.platforms.detect import detect_platform
from quire.utils.phases import PhaseTimer
from tests.unit.scheduler.harness import make_request

BLOCK_SIZE, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 16, 70, 20
PROMPT = [(i * 37) % 900 + 5 for i in range(NUM_PROMPT_TOKENS)]
NUM_COMPUTED = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS - 1
NUM_FULL = NUM_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE


class Core:
    """An engine core over a directory; counts the tokens it computes."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.num_computed = self.num_preemptions = 0
        self.faults: set[str] = set()
        platform = detect_platform("cpu")
        given: dict[str, Any] = {"max_model_len": 256, "kv_disk": str(path), **settings}
        config = build_config(
            model="leaf", block_size=BLOCK_SIZE, num_gpu_blocks_override=given.pop("num_blocks", 40), **given
        )  # fmt: skip
        config, _ = resolve_config(config, platform)
        self.core: EngineCore = build_core(config, platform, PhaseTimer(), on_step=self._count)

    def _count(self, num_tokens: int) -> None:
        self.num_computed += num_tokens

    def answer(self, handle: int, salt: str | None = None) -> tuple[list[int], list[bytes], int]:
        """Tokens of `PROMPT`'s answer, their log-probabilities, and how many tokens were computed for it."""
        before = self.num_computed
        request = make_request(handle, PROMPT, max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, logprobs=3)
        self.core.add_request(dataclasses.replace(request, seed=7, cache_salt=salt))
        outputs: list[EngineCoreOutputs] = []
        while self.core.has_unfinished_requests():
            outputs += [one for one in [self.core.step()] if one is not None]
        assert self.core.reset_prefix_cache(), "a block is lost"
        self.miss = next((event.cache_miss for one in outputs for event in one.events if event.cache_miss), None)
        stats = [one.stats for one in outputs]
        self.external = tuple(
            sum(getattr(one, f"external_prefix_cache_{name}") for one in stats) for name in ("queries", "hits")
        )
        self.faults.update(kind for one in outputs if one.stats.offload for kind in one.stats.offload.faults)
        logprobs = [one.logprobs.logprobs.tobytes() for one in outputs if one.logprobs is not None]
        return [token for one in outputs for token in one.new_token_ids], logprobs, self.num_computed - before

    def run(self, prompts: dict[int, list[int]], max_tokens: int) -> dict[int, list[int]]:
        """The greedy answers to several prompts at once, by handle."""
        for handle, prompt in prompts.items():
            self.core.add_request(make_request(handle, prompt, max_tokens=max_tokens, temperature=0.0))
        answers: dict[int, list[int]] = {handle: [] for handle in prompts}
        while self.core.has_unfinished_requests():
            outputs = self.core.step()
            if outputs is not None:
                self.num_preemptions += outputs.stats.num_preemptions
                for handle, token in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
                    answers[handle].append(token)
        return answers


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Core]]:
    started: list[Core] = []

    def make(**settings: Any) -> Core:
        started.append(Core(tmp_path / "kv", **settings))
        return started[-1]

    yield make
    for one in started:
        one.core.shutdown()


@pytest.mark.parametrize("backend", ["native_cpu", "torch_reference"])
def test_after_a_restart_and_in_a_second_process_the_prefix_is_loaded_and_gives_the_same_bits(start, backend):
    first = start(attention_backend=backend)
    tokens, logprobs, num_computed = first.answer(0)
    assert num_computed == NUM_COMPUTED
    for core in (first, start(attention_backend=backend)):
        assert core.answer(1) == (tokens, logprobs, NUM_COMPUTED - NUM_FULL)
        assert core.miss is None and core.external == (NUM_PROMPT_TOKENS, NUM_FULL)


@pytest.mark.parametrize("kv_disk", [False, True], ids=["alone", "before a disk"])
def test_host_memory_gives_the_same_bits(start, tmp_path, kv_disk):
    settings = {} if kv_disk else {"kv_disk": None}
    core = start(kv_offloading_size=0.01, kv_offloading_policy="arc", **settings)
    tokens, logprobs, num_computed = core.answer(0)
    assert num_computed == NUM_COMPUTED
    assert core.answer(1) == (tokens, logprobs, NUM_COMPUTED - NUM_FULL)
    assert (tmp_path / "kv").exists() is kv_disk


def test_a_connector_beside_it_is_asked_for_what_it_has_not_and_both_store(start, tmp_path):
    shared = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    tokens, logprobs, _ = start(kv_disk=None, kv_transfer_config=shared).answer(0)
    loaded = tokens, logprobs, NUM_COMPUTED - NUM_FULL
    assert start(kv_transfer_config=shared).answer(1) == loaded, "from the connector"
    assert start().answer(2) == loaded, "from the disk, where it was stored meanwhile"


def test_what_preempted_requests_have_computed_is_loaded_from_host_memory(start):
    settings = {"kv_disk": None, "num_blocks": 14, "scheduler_reserve_full_isl": False, "preemption_mode": "recompute"}
    alone = start(kv_disk=None)
    expected = {handle: alone.run({handle: PROMPT[handle:]}, 60)[handle] for handle in range(3)}
    num_computed = {}
    for size in (0.0, 0.01):
        core = start(kv_offloading_size=size, **settings)
        assert core.run({handle: PROMPT[handle:] for handle in range(3)}, 60) == expected
        assert core.num_preemptions >= 2
        num_computed[size] = core.num_computed
    once = sum(NUM_PROMPT_TOKENS - handle + 59 for handle in range(3))
    assert once < num_computed[0.01] < once + 2 * BLOCK_SIZE and num_computed[0.01] < num_computed[0.0]


def test_other_weights_layouts_and_salts_are_never_read(start):
    computed = NUM_COMPUTED
    first = start()
    assert first.answer(0, salt="a")[2] == computed
    assert first.answer(1, salt="a")[2] == computed - NUM_FULL
    assert first.answer(2, salt="b")[2] == computed and first.answer(3)[2] == computed
    for settings in (
        {"quantization": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"max_model_len": 200},
        {"load_format": "dummy"},
    ):
        other = start(**settings)
        assert other.answer(0)[2] == computed, settings
        assert str(other.miss.reason) == "other_digest", settings
        assert other.answer(1)[2] == computed - NUM_FULL, settings


def test_encrypted_blocks_are_read_with_their_key_and_others_are_not_found(start, tmp_path):
    pytest.importorskip("cryptography")
    paths = [tmp_path / "one", tmp_path / "other"]
    for number, path in enumerate(paths):
        path.touch(0o600)
        path.write_text(f"{number + 7:064x}")
    tokens, logprobs, _ = start(kv_disk_key_file=str(paths[0])).answer(0)
    assert start(kv_disk_key_file=str(paths[0])).answer(1) == (tokens, logprobs, NUM_COMPUTED - NUM_FULL)
    for settings in ({"kv_disk_key_file": str(paths[1])}, {}):
        core = start(**settings)
        assert core.answer(2) == (tokens, logprobs, NUM_COMPUTED) and not core.faults
    with pytest.raises(QuireError, match="kv_disk_key_file has no effect without kv_disk"):
        start(kv_disk=None, kv_disk_key_file=str(paths[0]))


def test_whatever_happened_to_the_files_the_answer_is_the_same(start, tmp_path):
    tokens, logprobs, _ = start().answer(0)
    files = sorted((tmp_path / "kv").rglob("*.kv"))
    rng = np.random.default_rng(5)
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data if number % 2 else data[: len(data) // 2])
    again = start()
    assert again.answer(0) == (tokens, logprobs, NUM_COMPUTED)
    assert str(again.miss.reason) == "load_failed"
    assert again.answer(1) == (tokens, logprobs, NUM_COMPUTED - NUM_FULL), "what was damaged is stored anew"
    assert "wrong_size" in again.faults


def test_what_an_offline_engine_answers_is_there_for_the_next_one(tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for num_cached in (0, 64):
        llm = LLM("leaf", block_size=16, max_model_len=256, num_gpu_blocks_override=40, kv_disk=str(tmp_path / "kv"))
        output = llm.generate({"prompt_token_ids": PROMPT}, params)[0]
        assert output.num_cached_tokens == num_cached
        llm.shutdown()


def test_a_planned_end_of_a_core_of_its_own_loses_nothing(tmp_path):
    prompts = [[7 * i + j for j in range(200)] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    settings: dict[str, Any] = {
        "model": "leaf", "block_size": 16, "max_model_len": 256, "kv_disk": str(tmp_path / "kv"),
        "num_gpu_blocks_override": 400,
    }  # fmt: skip
    engine = LLMEngine.from_config(build_config(**settings), in_process=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()
    with LLM(**settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [192] * len(prompts)


@pytest.mark.parametrize(
    "settings", [{"enable_prefix_caching": False}, {"flight_recorder": "/nowhere"}, {"kv_disk_size": 5}]
)
def test_settings_that_do_not_go_together_are_refused_by_name(start, settings):
    with pytest.raises(QuireError) as error:
        start(**settings)
    assert error.value.field in ("kv_disk", "kv_disk_size") and error.value.hint

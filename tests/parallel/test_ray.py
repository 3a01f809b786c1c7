"""Ranks that Ray places, by a fake of its contract. `make test-ray` has real clusters."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError, UnsupportedError
from quire.executor import ray_rank
from tests.parallel.circumstances import SETTINGS
from tests.unit.executor.fake_ray import FakeRay, fake_ray

PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(8, 60))}]
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=1, logprobs=2)


def ray_llm(num_ranks: int = 2, **settings: Any) -> LLM:
    return LLM("leaf", tensor_parallel_size=num_ranks, distributed_executor_backend="ray", **SETTINGS | settings)


def outputs(llm: LLM) -> list[Any]:
    found = [one.outputs[0] for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [(list(one.token_ids), one.cumulative_logprob, one.logprobs) for one in found]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM("leaf", **SETTINGS) as llm:
        return outputs(llm)


def places(ray: FakeRay) -> list[int]:
    return [actor.node for actor in ray.actors]


def test_ranks_on_two_machines_answer_as_one_and_the_end_of_one_ends_the_group(expected: list[Any]):
    with fake_ray(2, 1) as ray, ray_llm(3, num_threads=1) as llm:
        assert places(ray) == [0, 1] and ray.free == [0, 0]
        assert outputs(llm) == expected
        ray.kill(ray.actors[1])
        with pytest.raises(EngineDeadError, match="rank 2|another machine"):
            while True:
                outputs(llm)
    assert ray.free == [2, 1]


def test_the_ranks_of_a_stage_stay_on_one_machine_and_stages_may_be_on_several(expected: list[Any]):
    with fake_ray(2, 2) as ray, ray_llm(2, pipeline_parallel_size=2, num_threads=1) as llm:
        assert places(ray) == [0, 1, 1]
        assert outputs(llm) == expected


def test_a_cluster_that_is_too_small_says_what_it_has():
    with fake_ray(1, 4) as ray:
        with pytest.raises(ConfigError) as caught:
            ray_llm(3, num_threads=3)
        assert caught.value.message == (
            "the Ray cluster does not have the CPUs for 3 ranks of 3, of which the first is on this machine "
            "(127.0.0.1): there are 1 on 10.0.0.0, 4 on 10.0.0.1; 5 of them free"
        )
        assert "ray start --address" in str(caught.value) and ray.free == [1, 4]


def test_another_version_of_quire_on_a_machine_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_rank.RayRank, "look", lambda *_: other_version())
    with fake_ray(1, 1) as ray, pytest.raises(ConfigError, match="Quire is 0.0.9 on there .10.0.0.9. and"):
        ray_llm(2, num_threads=1)
    assert ray.free == [1, 1]


def other_version() -> bytes:
    return ray_rank.msgspec.msgpack.encode(ray_rank.PlaceInfo("node1", "10.0.0.9", "there", 1, "0.0.9"))


def test_what_keeps_a_rank_from_loading_is_raised(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise ConfigError("this machine lacks the model")

    monkeypatch.setattr(ray_rank.RayRank, "_load", refuse)
    with fake_ray(2) as ray, pytest.raises(ConfigError, match="lacks the model"):
        ray_llm(2, num_threads=1)
    assert ray.free == [2]


def test_without_a_cluster_and_without_ray_the_error_has_the_fix(monkeypatch: pytest.MonkeyPatch):
    with fake_ray(), pytest.raises(ConfigError, match="needs a Ray cluster that this machine is part of") as caught:
        ray_llm(2)
    assert "ray start --head" in str(caught.value)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray, which is not installed") as caught:
        ray_llm(2)
    assert "quire[ray]" in str(caught.value)


def test_blocks_outside_of_the_cache_are_kept_on_one_machine_and_refused_on_several(expected: list[Any], tmp_path: Any):
    with fake_ray(2), ray_llm(2, num_threads=1, kv_disk=str(tmp_path)) as llm:
        assert outputs(llm) == expected
    assert any(tmp_path.rglob("*"))
    with fake_ray(1, 1) as ray, pytest.raises(UnsupportedError, match=r"ranks are on several machines \(2 here\)"):
        ray_llm(2, num_threads=1, kv_disk=str(tmp_path))
    assert ray.free == [1, 1]

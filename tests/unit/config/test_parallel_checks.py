"""What several ranks cannot do is refused by its name; threads and executor follow the number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.config.build import build_config
from quire.config.expert_placement import place_experts
from quire.config.model_arch import MoEArch
from quire.config.resolve import resolve
from quire.errors import ConfigError, QuireClientError
from tests.unit.config.test_resolve import make_arch, make_platform

NATIVE = {"avx2": None}


def resolved(**settings: Any) -> dict[str, tuple[Any, str]]:
    config = build_config(**{"tensor_parallel_size": 2, "dtype": "float32", **settings})
    _, decisions = resolve(config, make_platform(), make_arch(), kernel_tiers=NATIVE)
    return {decision.name: (decision.value, decision.reason) for decision in decisions}


def test_cores_are_divided_by_ranks_and_each_gets_a_process():
    values = resolved()
    assert values["num_threads"] == (1, "2 usable cores, divided by 2 ranks")
    assert values["distributed_executor_backend"] == ("mp", "2 ranks on this machine")
    assert resolved(tensor_parallel_size=8)["num_threads"][0] == 1
    assert "num_threads" not in resolved(num_threads=3)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("attention_backend", {"attention_backend": "torch_reference"}),
        ("quantization_report", {"quantization_report": True}),
        ("distributed_executor_backend", {"distributed_executor_backend": "uni"}),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_by_name(field: str, settings: dict[str, Any]):
    with pytest.raises(QuireClientError) as caught:
        resolved(**settings)
    assert caught.value.field == field and "tensor_parallel_size" in f"{caught.value.message} {caught.value.hint}"


def test_stages_are_ranks_too_and_divide_the_layers():
    stages: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    assert resolved(**stages)["distributed_executor_backend"] == ("mp", "2 ranks on this machine")
    with pytest.raises(ConfigError, match="has 3 stages of together 3 layers; pipeline_parallel_size is 2"):
        resolved(**stages, pipeline_layer_partition="1,1,1")
    with pytest.raises(ConfigError, match="tensor_parallel_size=32 and pipeline_parallel_size=4 are 128 ranks"):
        resolved(tensor_parallel_size=32, pipeline_parallel_size=4)


def test_one_rank_may_have_an_executor_of_several():
    assert resolved(tensor_parallel_size=1, distributed_executor_backend="mp")["num_threads"] == (2, "usable cores")
    with pytest.raises(ConfigError, match="out of range"):
        build_config(tensor_parallel_size=65)


@pytest.mark.parametrize(
    ("strategy", "own"),
    [("linear", [(0, 1, 2), (3, 4), (5, 6)]), ("round_robin", [(0, 3, 6), (1, 4), (2, 5)]),
     ("[2, 0, 0, 1, 0, 2, 2]", [(1, 2, 4), (3,), (0, 5, 6)])],
)  # fmt: skip
def test_every_expert_is_on_one_rank_and_in_one_slot(tmp_path: Path, strategy: str, own: list[tuple[int, ...]]):
    if strategy.startswith("["):
        (tmp_path / "ranks.json").write_text(strategy)
        strategy = str(tmp_path / "ranks.json")
    placement = place_experts(strategy, 7, 3)
    assert [placement.own(rank) for rank in range(3)] == own
    assert sorted(placement.slots or range(7)) == list(range(7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[0, 1", "is not a list of ranks|cannot be read"), ("[0, 0, 0]", "has 3 ranks for 4 experts"),
        ("[0, 0, 0, 2]", "names rank 2 of 2"), ("[0, 0, 0, 0]", "rank 1 has none"), (None, "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_places_no_expert_is_refused(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "ranks.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        place_experts(str(path), 4, 2)
    assert caught.value.field == "expert_placement_strategy"


def test_whole_experts_are_refused_where_there_are_none_or_too_few_and_what_lock_step_does_not_have():
    with pytest.raises(ConfigError, match="has no experts"):
        resolved(enable_expert_parallel=True)
    layer = make_arch().layers[0]
    few = dataclasses.replace(layer, mlp=None, moe=MoEArch(num_experts=3, num_chosen=1, intermediate_size=32))
    arch = dataclasses.replace(make_arch(), layers=(few, few))
    for settings, message in (
        ({"tensor_parallel_size": 4}, "rank 3 has none of 3 experts"),
        ({"data_parallel_size": 4}, "rank 3 has none of 3 experts"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "rank 3 has none of 3 experts"),
        ({"data_parallel_size": 65}, "data_parallel_size=65 are 65 ranks, more than 64"),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, "pipeline_parallel_size is not supported where"),
        ({"data_parallel_size": 2, "distributed_executor_backend": "ray"}, "share memory of one machine"),
        (
            {"data_parallel_size": 2, "speculative_config": {"method": "draft_model", "model": "/x"}},
            "speculative_config is not supported where replicas share experts",
        ),
        ({"data_parallel_size": 2, "attention_backend": "torch_reference"}, "not supported with data_parallel_size=2"),
    ):
        config = build_config(enable_expert_parallel=True, dtype="float32", **settings)
        with pytest.raises(QuireClientError, match=message):
            resolve(config, make_platform(), arch, kernel_tiers=NATIVE)

"""Layers are divided among stages evenly, or as asked; what shares a cache stays together."""

from __future__ import annotations

import dataclasses

import pytest

from quire.config.model_arch import ModelArch
from quire.config.pipeline import divide_layers
from quire.errors import ConfigError
from tests.unit.config.test_resolve import make_arch


def arch_of(num_layers: int, *, shares: dict[int, int] | None = None) -> ModelArch:
    """`shares`: layer -> the layer whose keys and values it reads."""
    arch = make_arch()
    layers = []
    for number in range(num_layers):
        attention = arch.layers[0].attention
        assert attention is not None
        attention = dataclasses.replace(attention, shares_cache_of=(shares or {}).get(number))
        layers.append(dataclasses.replace(arch.layers[0], attention=attention))
    return dataclasses.replace(arch, layers=tuple(layers))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "partition", "counts"),
    [(8, 1, None, [8]), (8, 4, None, [2, 2, 2, 2]), (7, 3, None, [2, 2, 3]), (5, 5, None, [1] * 5),
     (8, 3, "1, 3,4", [1, 3, 4])],
)  # fmt: skip
def test_every_layer_is_in_one_stage(num_layers: int, num_stages: int, partition: str | None, counts: list[int]):
    stages = divide_layers(arch_of(num_layers), num_stages, partition)
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_layers_that_read_the_cache_of_another_are_in_its_stage():
    arch = arch_of(8, shares={5: 3, 7: 4})
    assert divide_layers(arch, 2) == (range(3), range(3, 8))
    assert divide_layers(arch, 4) == (range(1), range(1, 2), range(2, 3), range(3, 8))
    with pytest.raises(ConfigError, match="divides the model at layer 5, but layer 5 reads") as caught:
        divide_layers(arch, 2, "5,3")
    assert caught.value.field == "pipeline_layer_partition"
    with pytest.raises(ConfigError, match="needs 4 places.*there are 3") as caught:
        divide_layers(arch, 5)
    assert caught.value.hint == "use pipeline_parallel_size <= 4"


@pytest.mark.parametrize("partition", ["", "4", "4,0,4", "4,5", "4;4", "-4,12", "4,4,", "9" * 6000])
def test_a_partition_that_does_not_fit_is_refused(partition: str):
    with pytest.raises(ConfigError) as caught:
        divide_layers(arch_of(8), 2, partition)
    assert caught.value.field == "pipeline_layer_partition" and caught.value.hint

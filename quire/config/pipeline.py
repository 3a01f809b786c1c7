"""Which layers each pipeline stage has. Called by `config.resolve` and by workers. Pure."""

from __future__ import annotations

import re

from quire.config.model_arch import ModelArch
from quire.errors import ConfigError

FIELD = "pipeline_layer_partition"


def divide_layers(arch: ModelArch, num_stages: int, partition: str | None = None) -> tuple[range, ...]:
    """The layers of each stage, in order; every stage has some.

    Evenly by number without `partition`, earlier stages having fewer, as the first one has the embedding and the output
    projection, too. A layer that reads another's keys and values is in the same stage.

    Args:
        partition: number of layers of each stage, such as "20,12"; None = evenly.

    Raises:
        ConfigError: it does not fit the model.
    """
    borders = _even_borders(arch, num_stages) if partition is None else _given_borders(arch, num_stages, partition)
    starts = [0, *borders]
    return tuple(range(begin, end) for begin, end in zip(starts, [*borders, arch.num_layers], strict=True))


def _even_borders(arch: ModelArch, num_stages: int) -> list[int]:
    """Those of the possible ones that are nearest to even ones."""
    possible = [border for border in range(1, arch.num_layers) if _splitting(arch, border) is None]
    if len(possible) < num_stages - 1:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} needs {num_stages - 1} places to divide the {arch.num_layers} layers "
            f"of {arch.architecture} at, there are {len(possible)}",
            hint=f"use pipeline_parallel_size <= {len(possible) + 1}", field="pipeline_parallel_size",
        )  # fmt: skip
    borders: list[int] = []
    for stage in range(1, num_stages):
        left = len(possible) - (num_stages - 1 - stage)  # later stages need some as well
        candidates = [border for border in possible[:left] if not borders or border > borders[-1]]
        even = arch.num_layers * stage // num_stages
        borders.append(min(candidates, key=lambda border: abs(border - even)))
    return borders


def _given_borders(arch: ModelArch, num_stages: int, partition: str) -> list[int]:
    counts = parse_partition(partition)
    if len(counts) != num_stages or sum(counts) != arch.num_layers:
        raise ConfigError(
            f"{FIELD}={partition!r} has {len(counts)} stages of together {sum(counts)} layers; "
            f"pipeline_parallel_size is {num_stages}, the model has {arch.num_layers} layers",
            hint="give one number for each stage, that add up to the layers; or leave it out", field=FIELD,
        )  # fmt: skip
    borders = [sum(counts[:stage]) for stage in range(1, num_stages)]
    for border in borders:
        layer = _splitting(arch, border)
        if layer is not None:
            raise ConfigError(
                f"{FIELD}={partition!r} divides the model at layer {border}, but layer {layer} reads the keys and "
                "values of an earlier one, which must be in the same stage",
                hint="divide elsewhere, or leave it out", field=FIELD,
            )  # fmt: skip
    return borders


def parse_partition(partition: str) -> tuple[int, ...]:
    """The numbers of a text such as "20,12", each at least 1.

    Raises:
        ConfigError: it is something else.
    """
    parts = partition.split(",")
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]{0,4}\s*", part, re.ASCII) for part in parts):
        raise ConfigError(
            f"{FIELD}={partition[:100]!r} is not a list of numbers of layers",
            hint='give one number for each stage, such as "20,12"', field=FIELD,
        )  # fmt: skip
    return tuple(int(part) for part in parts)


def _splitting(arch: ModelArch, border: int) -> int | None:
    """A layer from `border` on that reads the cache of one before it; None = there is none."""
    for number, layer in enumerate(arch.layers[border:], border):
        source = None if layer.attention is None else layer.attention.shares_cache_of
        if source is not None and source < border:
            return number
    return None

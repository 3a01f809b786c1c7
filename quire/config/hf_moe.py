"""What the `config.json` files of mixtures of experts have in common. Called by their families. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quire.config.hf_config import check_divides
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import ModelArch, MoEArch, RouterArch
from quire.config.model_family import LLAMA_NAMES, TensorNames

MAX_EXPERTS = 4096
MAX_CHOSEN = 64
NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")

# Mixtures whose module is the layer's `mlp`.
MLP_MIXTURE_NAMES: TensorNames = (
    *LLAMA_NAMES,
    (r"\.moe\.router\.correction$", ".mlp.gate.e_score_correction_bias"),
    (r"\.moe\.router\.", ".mlp.gate."),
    (r"\.moe\.shared_gate\.", ".mlp.shared_expert_gate."),
    (r"\.moe\.", ".mlp."),
)


def read_num_experts(config: FieldReader) -> int:
    """Experts of a layer, under one of the names that checkpoints use."""
    named = [name for name in NUM_EXPERTS_NAMES if config.has(name)]
    return config.integer(named[0] if named else NUM_EXPERTS_NAMES[0], 1, MAX_EXPERTS)


def read_num_chosen(config: FieldReader, num_experts: int) -> int:
    """Experts of a token."""
    return config.integer("num_experts_per_tok", 1, min(num_experts, MAX_CHOSEN))


def read_grouped_router(config: FieldReader, num_experts: int, num_chosen: int, router: RouterArch) -> RouterArch:
    """`router` with the groups of `n_group` and `topk_group`.

    Raises:
        ModelError: groups that do not divide the experts, or hold too few of them.
    """
    num_groups = config.integer("n_group", 1, num_experts, 1)
    check_divides(config, "n_group", num_groups, "the number of experts", num_experts)
    num_chosen_groups = config.integer("topk_group", 1, num_groups, 1)
    if num_experts // num_groups * num_chosen_groups < num_chosen:
        raise config.error(
            "topk_group",
            f"is {num_chosen_groups}, whose groups have fewer than {num_chosen} experts",
            "correct it, n_group or num_experts_per_tok",
        )
    return dataclasses.replace(router, num_groups=num_groups, num_chosen_groups=num_chosen_groups)


def with_experts(arch: ModelArch, moe: MoEArch, has_experts: Callable[[int], bool] = lambda layer: True) -> ModelArch:
    """The model with a mixture in the place of the MLPs of some layers."""
    layers = (
        dataclasses.replace(layer, mlp=None, moe=moe) if has_experts(number) else layer
        for number, layer in enumerate(arch.layers)
    )
    return dataclasses.replace(arch, layers=tuple(layers))

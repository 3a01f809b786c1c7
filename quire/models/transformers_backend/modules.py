"""Puts Quire's projections, token tables and experts in the place of a class's own modules.

Called by `model` on a model whose parameters have no memory yet. Torch's products depend on the batch by rounding;
Quire's give the same bits in any batch, and are what quantization works on. No state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.layers.options import LayerOptions
from quire.layers.weight_target import TensorTarget, WeightTarget
from quire.models.transformers_backend.experts import EXPERTS, Experts, holds_experts
from quire.models.transformers_backend.linear import FlatLinear, FlatTable, MatrixWeight, OutputTable
from quire.models.transformers_backend.names import CheckpointNames


def replace_modules(
    model: nn.Module, embedding: nn.Module, head: nn.Module, is_tied: bool, options: LayerOptions
) -> bool:
    """Replace what is known, and give memory to the rest; returns whether token table and head are one object now.

    Args:
        embedding, head: of `model`: its token table and its output projection.
        is_tied: they have one weight.
    """
    names = {module: name for name, module in model.named_modules()}
    table = None
    for module, name in names.items():
        if module is embedding and type(module) is nn.Embedding:
            table = FlatTable(module.num_embeddings, module.embedding_dim, options)
            _put(model, name, table)
        elif holds_experts(module):
            _move_experts(module, options)
        elif type(module) is nn.Linear and module is not head:
            _put(model, name, FlatLinear(module.in_features, module.out_features, module.bias is not None, options))
    is_shared = is_tied and table is not None and type(head) is nn.Linear
    if type(head) is nn.Linear:
        if table is None or not is_shared:
            table = FlatTable(head.out_features, head.in_features, options)
        bias = None if head.bias is None else options.parameter(head.out_features)
        _put(model, names[head], OutputTable(table, bias))
    _materialize(model, options)
    return is_shared


def targets(model: nn.Module, prefix: str, names: CheckpointNames) -> Iterator[tuple[str, WeightTarget]]:
    """The checkpoint's name of each tensor, and where it goes; tied ones under each name."""
    inside = {id(part) for one in model.modules() if isinstance(one, Experts | OutputTable) for part in one.modules()}
    for name, module in model.named_modules(prefix=prefix, remove_duplicate=False):
        saved = names.saved(f"{name}.")[:-1]
        if isinstance(module, OutputTable):
            yield from module.targets(saved)
        elif isinstance(module, Experts):
            yield from module.targets(name.removesuffix(f".{EXPERTS}"), names)
        elif id(module) in inside:
            continue
        elif isinstance(module, Linear):
            yield from module.targets(saved)
        else:
            yield from ((names.saved(own), target) for own, target in _own_tensors(name, module))


def _own_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, WeightTarget]]:
    for own, parameter in module.named_parameters(name, recurse=False):
        yield own, TensorTarget(parameter.data)
    for own, buffer in module.named_buffers(name, recurse=False):
        if own.rpartition(".")[2] not in module._non_persistent_buffers_set:
            yield own, TensorTarget(buffer)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _move_experts(module: nn.Module, options: LayerOptions) -> None:
    experts = Experts(module, options)
    for name, _ in list(module.named_parameters(recurse=False)):
        delattr(module, name)
    module.add_module(EXPERTS, experts)


def _materialize(model: nn.Module, options: LayerOptions) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=options.device)
            if values.dim() == 2 and not isinstance(module, nn.Embedding):
                delattr(module, name)  # torch takes no parameters of other classes than its own
                module.register_buffer(name, MatrixWeight.of(values, options.kernels))
            else:
                module.register_parameter(name, nn.Parameter(values, requires_grad=False))


class BothTargets(WeightTarget):
    """Two places of one tensor, where a class ties what cannot be one object here."""

    def __init__(self, first: WeightTarget, second: WeightTarget) -> None:
        self.first, self.second = first, second
        self.shape = first.shape

    def load(self, tensor: torch.Tensor) -> bool:
        """Fill both."""
        return self.first.load(tensor) and self.second.load(tensor)

    def stored(self) -> torch.Tensor:
        """The first."""
        return self.first.stored()

"""Quantization: how a plugin keeps and multiplies the weights, in the place of the layers' own way.

Derived from by packages (docs/how-to/plugins.md); `QuantizedKernels` puts one into a model. No state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from quire.config.model import OWN_QUANTIZATIONS
from quire.layers.delegation import delegate_operations
from quire.layers.experts import ExpertKernels
from quire.layers.head_linear import HeadLinearMethod
from quire.layers.kernels import LayerKernels
from quire.layers.linear_method import LinearMethod
from quire.plugins import QUANTIZATION, load_plugin, unknown_choice


class Quantization(ABC):
    """A format of weights, made from those of an unquantized checkpoint while they are loaded.

    Args:
        kernels: what computes the layers without it.
        dtype: of activations.
    """

    def __init__(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        self.kernels = kernels
        self.dtype = dtype

    @abstractmethod
    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """How a projection's weight is stored and multiplied."""

    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """The same for the table of token vectors; as it is without quantization."""
        return self.kernels.table_method(vocab_size, hidden_size)


class QuantizedKernels(LayerKernels):
    """Other kernels, whose weights a `Quantization` keeps. Such weights are not kept on disk."""

    def __init__(self, kernels: LayerKernels, quantization: Quantization) -> None:
        self._kernels = kernels
        self._quantization = quantization

    def packing(self) -> Mapping[str, str | int] | None:
        """None: the cache of packed weights cannot tell which version of the plugin made them."""
        return None

    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """The plugin's."""
        return self._quantization.linear_method(output_size, input_size)

    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """The plugin's."""
        return self._quantization.table_method(vocab_size, hidden_size)

    def fine_method(self, output_size: int, input_size: int) -> LinearMethod:
        """As a table."""
        return self.table_method(output_size, input_size)

    def head_linear_method(self) -> HeadLinearMethod:
        """As without quantization."""
        return self._kernels.head_linear_method()

    def dense_method(self) -> LinearMethod:
        """As without quantization."""
        return self._kernels.dense_method()

    def experts(self) -> ExpertKernels:
        """As without quantization."""
        return self._kernels.experts()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As without quantization."""
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As without quantization."""
        return self._kernels.add_rms_norm(x, residual, weight, eps)


delegate_operations(QuantizedKernels)


def with_quantization(kernels: LayerKernels, name: str | None, dtype: torch.dtype) -> LayerKernels:
    """The kernels of a model whose setting `quantization` is `name`: a plugin's on `kernels`, or these themselves.

    Raises:
        ConfigError: no package has the plugin, or it cannot be used.
    """
    if name is None or name in OWN_QUANTIZATIONS:
        return kernels
    return QuantizedKernels(kernels, quantization_class(name)(kernels, dtype))


def quantization_class(name: str) -> type[Quantization]:
    """A plugin's format.

    Raises:
        ConfigError: no package has it, or it cannot be used.
    """
    found: type[Quantization] | None = load_plugin(QUANTIZATION, name, Quantization)
    if found is None:
        raise unknown_choice(QUANTIZATION, name, OWN_QUANTIZATIONS)
    return found

"""GPTQ, AWQ and pack-quantized: integers of 4 or 8 bits in words of 32, with a scale and a zero point for each group.

Used by `models.quantized_checkpoint`. No state. What they become: `StoredWeight` of format "int4", and of "int8" where
zero points are in the middle.

Source: Frantar et al. 2023 (GPTQ), section 3; Lin et al. 2024 (AWQ), section 3; the files themselves: AutoGPTQ,
GPTQModel, AutoAWQ (version gemm) and compressed-tensors (format pack-quantized).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from quire.config.quantized_checkpoint import WeightScheme
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.models.stored_layouts.module_tensors import (
    DAMAGED,
    SCALE_DTYPES,
    Matrix,
    ModuleTensors,
    StoredLayout,
    num_groups,
)
from quire.models.stored_layouts.words import grouped_order, pack_nibbles, unpack_bytes

WORD_BITS = 32
MAX_INPUT_SIZE = 1 << 20
# AWQ (gemm): the output that each nibble of a word belongs to, from the lowest on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class PackedMatrix:
    """What the layouts of this file have in common.

    Attributes:
        codes: [output_size, input_size * num_bits / 8] uint8, the lower half first; inputs as the checkpoint has them.
        zeros: [output_size, num_groups] uint8.
        scales: likewise, floats.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor


class PackedLayout(StoredLayout):
    """Of one checkpoint.

    Attributes:
        groups_end: of the name of the tensor with the group of each input, which a module may have.
    """

    groups_end: ClassVar[str]

    @abstractmethod
    def scheme_of(self, tensors: ModuleTensors) -> tuple[WeightScheme, tuple[int, int]]:
        """The scheme and the shape (output_size, input_size), after every header was checked."""

    @abstractmethod
    def unpack(self, tensors: ModuleTensors, scheme: WeightScheme, shape: tuple[int, int]) -> PackedMatrix:
        """The tensors in one form."""

    def matrix(self, tensors: ModuleTensors) -> Matrix:
        """By the shapes of its tensors, and by the order of its inputs."""
        scheme, shape = self.scheme_of(tensors)
        is_reordered = self._order(tensors, shape[1], scheme.group_size) is not None
        return Matrix(shape, _format(scheme, is_reordered=is_reordered))

    def read(self, tensors: ModuleTensors) -> StoredWeight | torch.Tensor:
        """With the inputs of a group side by side."""
        scheme, shape = self.scheme_of(tensors)
        packed = self.unpack(tensors, scheme, shape)
        codes, order = packed.codes, self._order(tensors, shape[1], scheme.group_size)
        weight_format = _format(scheme, is_reordered=order is not None)
        if order is not None:
            wide = unpack_bytes(codes, scheme.num_bits, shape[1])[:, order]
            codes = pack_nibbles(wide) if scheme.num_bits == 4 else wide
        if weight_format is not None and scheme.num_bits == 4:
            parts = {"codes": codes, "scales": packed.scales, "zeros": packed.zeros}
            return StoredWeight(weight_format, shape, parts, order)
        if weight_format is not None:
            if bool((packed.zeros != 128).any()):
                raise tensors.error(self.ends[0], "is said to be symmetric, but has zero points", DAMAGED)
            parts = {"codes": (codes ^ 128).view(torch.int8), "scales": packed.scales.float()}
            return StoredWeight(weight_format, shape, parts, order)
        numbers = dequantized(codes, packed.zeros, packed.scales, scheme.group_size)
        return numbers if order is None else numbers[:, torch.argsort(order)]

    def _order(self, tensors: ModuleTensors, input_size: int, group_size: int) -> torch.Tensor | None:
        """The order of the inputs that brings groups together; None = the groups are in order."""
        if not tensors.has(self.groups_end):
            return None
        groups = tensors.tensor(self.groups_end)
        if bool((groups == -1).all()):
            return None  # as compressed-tensors makes it, before groups are assigned
        count = num_groups(input_size, group_size)
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            raise tensors.error(self.groups_end, f"has groups outside 0 .. {count - 1}", DAMAGED)
        order, are_whole = grouped_order(groups.long(), group_size or input_size)
        if not are_whole:
            raise tensors.error(self.groups_end, f"does not give each group its {group_size} inputs", DAMAGED)
        return order


def dequantized(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """(code - zero) * scale of codes of 8 bits: [output_size, input_size] float32."""
    size = codes.shape[1]
    repeats = group_size or size
    wide_zeros = zeros.int().repeat_interleave(repeats, dim=1)[:, :size]
    wide_scales = scales.float().repeat_interleave(repeats, dim=1)[:, :size]
    return (codes.int() - wide_zeros).float() * wide_scales


class GptqLayout(PackedLayout):
    """Words hold consecutive inputs of an output; zero points, of version 1 less one, consecutive outputs."""

    ends = (".qweight", ".qzeros", ".scales", ".g_idx")
    groups_end = ".g_idx"

    def scheme_of(self, tensors: ModuleTensors) -> tuple[WeightScheme, tuple[int, int]]:
        """By `qweight`."""
        (scheme,) = self.schemes
        per_word = WORD_BITS // scheme.num_bits
        num_words, output_size = tensors.entry(".qweight", (torch.int32,), (None, None)).shape
        input_size = num_words * per_word
        groups = num_groups(input_size, scheme.group_size)
        tensors.entry(".scales", SCALE_DTYPES, (groups, output_size))
        tensors.entry(".qzeros", (torch.int32,), (groups, -(-output_size // per_word)))
        if tensors.has(".g_idx"):
            tensors.entry(".g_idx", (torch.int32, torch.int64), (input_size,))
        return scheme, (output_size, input_size)

    def unpack(self, tensors: ModuleTensors, scheme: WeightScheme, shape: tuple[int, int]) -> PackedMatrix:
        """Transposed, and with the zero points as they are meant."""
        codes = tensors.tensor(".qweight").t().contiguous().view(torch.uint8)
        words = tensors.tensor(".qzeros")
        if scheme.packing == "gptq":
            # Written by subtracting one from every field of a word at once, borrows included: so it is undone.
            words = words + (0x11111111 if scheme.num_bits == 4 else 0x01010101)
        zeros = unpack_bytes(words.contiguous().view(torch.uint8), scheme.num_bits, shape[0])
        return PackedMatrix(codes, zeros.t().contiguous(), tensors.finite(".scales").t().contiguous())


class AwqLayout(PackedLayout):
    """Words hold eight outputs of an input, the even ones first."""

    ends = (".qweight", ".qzeros", ".scales")
    groups_end = ""

    def scheme_of(self, tensors: ModuleTensors) -> tuple[WeightScheme, tuple[int, int]]:
        """By `qweight`."""
        (scheme,) = self.schemes
        input_size, num_words = tensors.entry(".qweight", (torch.int32,), (None, None)).shape
        groups = num_groups(input_size, scheme.group_size)
        tensors.entry(".scales", SCALE_DTYPES, (groups, num_words * 8))
        tensors.entry(".qzeros", (torch.int32,), (groups, num_words))
        return scheme, (num_words * 8, input_size)

    def unpack(self, tensors: ModuleTensors, scheme: WeightScheme, shape: tuple[int, int]) -> PackedMatrix:
        """Transposed, the outputs in order."""
        codes = pack_nibbles(_awq_outputs(tensors.tensor(".qweight")).t())
        zeros = _awq_outputs(tensors.tensor(".qzeros")).t().contiguous()
        return PackedMatrix(codes, zeros, tensors.finite(".scales").t().contiguous())


def _awq_outputs(words: torch.Tensor) -> torch.Tensor:
    """[n, num_words] int32 -> [n, num_words * 8] uint8."""
    nibbles = unpack_bytes(words.contiguous().view(torch.uint8), 4, words.shape[1] * 8)
    order = torch.tensor(AWQ_ORDER).argsort()
    return nibbles.view(words.shape[0], -1, 8)[:, :, order].flatten(1)


class PackQuantizedLayout(PackedLayout):
    """compressed-tensors: words hold consecutive inputs; zero points, where there are some, consecutive outputs."""

    ends = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
    groups_end = ".weight_g_idx"

    def scheme_of(self, tensors: ModuleTensors) -> tuple[WeightScheme, tuple[int, int]]:
        """The scheme whose bits and groups give the shapes that are there."""
        output_size, num_words = tensors.entry(".weight_packed", (torch.int32,), (None, None)).shape
        scales = tensors.entry(".weight_scale", SCALE_DTYPES, (output_size, None)).shape
        tensors.entry(".weight_shape", (torch.int64, torch.int32), (2,))
        rows, input_size = (int(size) for size in tensors.tensor(".weight_shape"))
        if rows != output_size or not 1 <= input_size <= MAX_INPUT_SIZE:
            raise tensors.error(".weight_shape", f"is [{rows}, {input_size}], with {output_size} rows of weights")
        for scheme in self.schemes:
            has_words = -(-input_size * scheme.num_bits // WORD_BITS) == num_words
            has_groups = num_groups(input_size, scheme.group_size) == scales[1]
            has_zeros = scheme.is_symmetric != tensors.has(".weight_zero_point")
            if scheme.packing == "pack-quantized" and has_words and has_groups and has_zeros:
                break
        else:
            raise tensors.error(
                ".weight_packed",
                f"has {num_words} words and {scales[1]} scales a row for {input_size} inputs, "
                f"{'with' if tensors.has('.weight_zero_point') else 'without'} zero points: no config_groups say so",
            )
        if not scheme.is_symmetric:
            self._check_zeros(tensors, scheme, output_size, scales[1])
        if tensors.has(".weight_g_idx"):
            tensors.entry(".weight_g_idx", (torch.int32, torch.int64), (input_size,))
        return scheme, (output_size, input_size)

    def _check_zeros(self, tensors: ModuleTensors, scheme: WeightScheme, output_size: int, groups: int) -> None:
        """Packed like the weights, or, by older writers, not."""
        if tensors.entry(".weight_zero_point", (torch.int32, torch.int8)).dtype == torch.int8:
            tensors.entry(".weight_zero_point", (torch.int8,), (output_size, groups))
        else:
            num_words = -(-output_size * scheme.num_bits // WORD_BITS)
            tensors.entry(".weight_zero_point", (torch.int32,), (num_words, groups))

    def unpack(self, tensors: ModuleTensors, scheme: WeightScheme, shape: tuple[int, int]) -> PackedMatrix:
        """Numbers are kept plus half of their range, as zero points are."""
        codes = tensors.tensor(".weight_packed").contiguous().view(torch.uint8)
        codes = codes[:, : -(-shape[1] * scheme.num_bits // 8)].contiguous()
        scales, middle = tensors.finite(".weight_scale"), 1 << (scheme.num_bits - 1)
        if scheme.is_symmetric:
            zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
        elif (given := tensors.tensor(".weight_zero_point")).dtype == torch.int8:
            zeros = (given.int() + middle).to(torch.uint8)
        else:
            words = given.t().contiguous().view(torch.uint8)
            zeros = unpack_bytes(words, scheme.num_bits, shape[0]).t().contiguous()
        return PackedMatrix(codes, zeros, scales.contiguous())


def _format(scheme: WeightScheme, *, is_reordered: bool) -> WeightFormat | None:
    if scheme.num_bits == 4:
        return WeightFormat("int4", scheme.group_size, is_reordered)
    return WeightFormat("int8", scheme.group_size, is_reordered) if scheme.is_symmetric else None

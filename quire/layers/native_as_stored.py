"""Weights that stay in the format in which a checkpoint stores them, whichever each tensor has.

Made by `native`. A fused projection may hold rows in several formats, as where a GGUF file has values in 6 bits beside
queries in 4: it is divided into segments, each a weight of its own with one product into its columns of the output.
Segments are made when the first tensor is loaded; until then the formats are noted (`WeightTarget.expect`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from quire.kernels.native import elementwise
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.experts import ExpertLinear, ExpertsMethod, LoopedExperts
from quire.layers.linear_method import LinearMethod
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.layers.weight_target import WeightTarget

Formats = Callable[[WeightFormat | None], LinearMethod]


@dataclass(slots=True)
class Expected:
    """The formats of a matrix's rows, noted before any is loaded.

    Attributes:
        ranges: first row -> number of rows and format; rows in no range are plain numbers.
    """

    num_rows: int
    ranges: dict[int, tuple[int, WeightFormat]] = field(default_factory=dict)

    def note(self, first_row: int, num_rows: int, weight_format: WeightFormat | None) -> None:
        """Rows of one tensor."""
        self.ranges.pop(first_row, None)
        if weight_format is not None:
            self.ranges[first_row] = num_rows, weight_format

    def runs(self) -> Iterator[tuple[int, int, WeightFormat | None]]:
        """(first row, number of rows, format) of rows that one weight can hold, in order."""
        begin, end = 0, 0
        current: WeightFormat | None = None
        for first_row, num_rows, weight_format in self._pieces():
            if end > begin and (weight_format != current or (current is not None and current.is_reordered)):
                yield begin, end - begin, current
                begin = end
            current, end = weight_format, first_row + num_rows
        yield begin, end - begin, current

    def _pieces(self) -> Iterator[tuple[int, int, WeightFormat | None]]:
        row = 0
        for first_row, (num_rows, weight_format) in sorted(self.ranges.items()):
            if first_row > row:
                yield row, first_row - row, None
            yield first_row, num_rows, weight_format
            row = first_row + num_rows
        if row < self.num_rows:
            yield row, self.num_rows - row, None


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a layer that are one weight: `module` holds it as `method` wants."""

    first_row: int
    num_rows: int
    method: LinearMethod
    module: nn.Module


class LaterTarget(WeightTarget):
    """Rows whose place is made when the first tensor of their layer is loaded.

    Args:
        expect: notes their format.
        find: makes the places if need be, and gives theirs.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        expect: Callable[[WeightFormat | None], None],
        find: Callable[[], WeightTarget],
    ) -> None:
        self.shape = shape
        self._expect = expect
        self._find = find

    def expect(self, weight_format: WeightFormat | None) -> None:
        """Note the format."""
        self._expect(weight_format)

    def load(self, tensor: torch.Tensor) -> bool:
        """Into their place."""
        return self._find().load(tensor)

    def load_stored(self, weight: StoredWeight) -> bool:
        """Into their place."""
        return self._find().load_stored(weight)

    def stored(self) -> torch.Tensor:
        """What their place holds."""
        return self._find().stored()


@dataclass(frozen=True)
class AsStoredMethod(LinearMethod):
    """A projection's weight in the checkpoint's formats.

    Attributes:
        runtime: tier and threads.
        formats: how the rows of each format are stored and multiplied; of None, plain numbers.
    """

    runtime: NativeRuntime
    formats: Formats

    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Nothing is stored yet."""
        layer.segments = nn.ModuleList()
        layer.__dict__["expected"] = Expected(output_size)
        layer.__dict__["own_segments"] = []
        layer.__dict__["input_size"] = input_size
        layer.__dict__["make_weights"] = lambda method, module, num_rows: method.create_weights(
            module, num_rows, input_size, dtype, device
        )

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """A place in a segment."""
        expected: Expected = layer.__dict__["expected"]

        def find() -> WeightTarget:
            for segment in self._made(layer):
                if segment.first_row <= first_row < segment.first_row + segment.num_rows:
                    return segment.method.row_target(segment.module, first_row - segment.first_row, num_rows)
            raise AssertionError("segments cover all rows")

        return LaterTarget(
            (num_rows, layer.__dict__["input_size"]),
            lambda weight_format: expected.note(first_row, num_rows, weight_format),
            find,
        )

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """One product, or one for each segment."""
        segments: list[Segment] = layer.__dict__["own_segments"]
        if len(segments) == 1:
            return segments[0].method.apply(segments[0].module, x, bias, out_dtype)
        last = segments[-1]
        out = self.runtime.empty(len(x), last.first_row + last.num_rows, dtype=out_dtype)
        for segment in segments:
            end = segment.first_row + segment.num_rows
            own_bias = None if bias is None else bias[segment.first_row : end]
            segment.method.apply_into(segment.module, x, own_bias, out[:, segment.first_row : end])
        return out

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Gates and ups together where they are one weight."""
        segments: list[Segment] = layer.__dict__["own_segments"]
        if len(segments) == 1:
            return segments[0].method.apply_gated(segments[0].module, x, bias)
        return elementwise.silu_and_mul(self.runtime, self.apply(layer, x, bias, x.dtype))

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """Of a table, which is one tensor."""
        segment: Segment
        (segment,) = layer.__dict__["own_segments"]
        return segment.method.gather_rows(segment.module, row_ids)

    def _made(self, layer: nn.Module) -> list[Segment]:
        segments: list[Segment] = layer.__dict__["own_segments"]
        if not segments:
            for first_row, num_rows, weight_format in layer.__dict__["expected"].runs():
                method, module = self.formats(weight_format), nn.Module()
                layer.__dict__["make_weights"](method, module, num_rows)
                layer.get_submodule("segments").add_module(str(len(segments)), module)
                segments.append(Segment(first_row, num_rows, method, module))
        return segments


@dataclass(frozen=True)
class AsStoredExperts(ExpertsMethod):
    """The weights of a layer's experts in the checkpoint's formats.

    Where all experts have one format for all their rows they are one weight with one product; elsewhere each expert is
    a weight of its own, one after the other.

    Attributes:
        formats: as of `AsStoredMethod`.
        experts_of: how experts of one format are stored and multiplied.
        each: how one expert's weight is.
    """

    formats: Formats
    experts_of: Callable[[LinearMethod], ExpertsMethod]
    each: AsStoredMethod

    def create_weights(self, layer: ExpertLinear, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing is stored yet."""
        layer.__dict__["expected"] = [Expected(layer.output_size) for _ in range(layer.num_experts)]
        layer.__dict__["make_weights"] = lambda method: method.create_weights(layer, dtype, device)

    def row_target(self, layer: ExpertLinear, expert: int, first_row: int, num_rows: int) -> WeightTarget:
        """A place that is made with the others."""
        expected: list[Expected] = layer.__dict__["expected"]
        return LaterTarget(
            (num_rows, layer.input_size),
            lambda weight_format: expected[expert].note(first_row, num_rows, weight_format),
            lambda: self._made(layer).row_target(layer, expert, first_row, num_rows),
        )

    def apply(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """As they are stored."""
        method: ExpertsMethod = layer.__dict__["as_stored"]
        return method.apply(layer, x, rows, starts)

    def apply_gated(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """As they are stored."""
        method: ExpertsMethod = layer.__dict__["as_stored"]
        return method.apply_gated(layer, x, rows, starts)

    def _made(self, layer: ExpertLinear) -> ExpertsMethod:
        made: ExpertsMethod | None = layer.__dict__.get("as_stored")
        if made is None:
            expected: list[Expected] = layer.__dict__["expected"]
            runs = {tuple(of_expert.runs()) for of_expert in expected}
            (run, *others) = next(iter(runs))
            is_uniform = len(runs) == 1 and not others and not (run[2] is not None and run[2].is_reordered)
            made = self.experts_of(self.formats(run[2])) if is_uniform else LoopedExperts(self.each)
            layer.__dict__["make_weights"](made)
            if not is_uniform:
                self._hand_down(layer, made, expected)
            layer.__dict__["as_stored"] = made
        return made

    def _hand_down(self, layer: ExpertLinear, made: ExpertsMethod, expected: list[Expected]) -> None:
        for expert, of_expert in enumerate(expected):
            for first_row, (num_rows, weight_format) in of_expert.ranges.items():
                made.row_target(layer, expert, first_row, num_rows).expect(weight_format)

"""Layers whose weights stay in the formats of a checkpoint: fused rows of several formats, and experts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from quire.config.model_arch import RouterArch
from quire.kernels.native import quant
from quire.kernels.native.arena import HugeArena
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.experts import ExpertKernels, ExpertLinear
from quire.layers.linear import MergedLinear
from quire.layers.linear_method import LinearMethod
from quire.layers.native import NativeKernels, PackedLinearMethod, QuantizedLinearMethod
from quire.layers.native_as_stored import AsStoredExperts, AsStoredMethod, Expected
from quire.layers.native_experts import PackedExperts
from quire.layers.options import LayerOptions
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.layers.weight_target import LaterRows, ReorderedTarget, SideBySide, SpreadTarget, WeightTarget
from quire.models.expert_layouts import StackedTarget

INPUTS = 70
EIGHT, FOUR = WeightFormat("int8"), WeightFormat("int4", 32)
Q8 = WeightFormat("Q8_0")
RUNTIME = NativeRuntime("portable")
CPU = torch.device("cpu")


def method_of(weight_format: WeightFormat | None) -> LinearMethod:
    """Formats of this program in the place of a checkpoint's."""
    if weight_format is None:
        return PackedLinearMethod(RUNTIME, HugeArena())
    return QuantizedLinearMethod(
        RUNTIME, HugeArena(), quant.INT8 if weight_format == EIGHT else quant.INT4, torch.float32
    )


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def merged(formats: Mapping[str, WeightFormat | None], *, bias: bool = False) -> MergedLinear:
    """A projection of several parts of 37 outputs, each loaded in its format."""
    options = LayerOptions(torch.float32, CPU, NativeKernels(RUNTIME, torch.float32))
    sizes = dict.fromkeys(formats, 37)
    layer = MergedLinear(INPUTS, sizes, bias=bias, options=options, method=AsStoredMethod(RUNTIME, method_of))
    targets = dict(layer.targets("mlp.all"))
    for name, weight_format in formats.items():
        targets[f"mlp.{name}.weight"].expect(weight_format)
    for seed, target in enumerate(targets.values()):
        assert target.load(randn(*target.shape, seed=seed))
    return layer


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "formats",
    [{"a": EIGHT, "b": FOUR, "c": EIGHT}, {"a": None, "b": EIGHT, "c": None}, {"a": FOUR, "b": FOUR, "c": FOUR}],
    ids=["three segments", "between plain rows", "one segment"],
)
def test_a_fused_projection_has_the_bits_of_its_parts_side_by_side(formats: dict[str, WeightFormat | None], bias: bool):
    layer, x = merged(formats, bias=bias), randn(5, INPUTS)
    outputs = []
    for seed, weight_format in enumerate(formats.values()):
        options = LayerOptions(torch.float32, CPU, NativeKernels(RUNTIME, torch.float32))
        alone = MergedLinear(INPUTS, {"a": 37}, bias=bias, options=options, method=method_of(weight_format))
        stride = 2 if bias else 1
        for place, target in enumerate(dict(alone.targets("mlp.all")).values()):
            assert target.load(randn(*target.shape, seed=stride * seed + place))
        outputs.append(alone(x))
    assert torch.equal(layer(x), torch.cat(outputs, dim=1))
    has_one_format = len(set(formats.values())) == 1
    assert len(list(layer.get_submodule("segments").children())) == (1 if has_one_format else 3)
    assert layer(x[:0]).shape == (0, 111)


def test_gates_and_ups_of_different_formats_have_the_bits_of_the_product_then_the_gate():
    layer, x = merged({"gate_proj": FOUR, "up_proj": EIGHT}), randn(3, INPUTS)
    gates, ups = layer(x).chunk(2, dim=1)
    torch.testing.assert_close(layer.forward_gated(x), torch.nn.functional.silu(gates) * ups)


def test_neighbours_of_one_format_are_one_weight_unless_their_columns_are_in_an_order_of_their_own():
    expected, reordered = Expected(100), WeightFormat("int4", 32, is_reordered=True)
    for first_row, num_rows, weight_format in ((60, 20, EIGHT), (10, 20, FOUR), (30, 30, FOUR)):
        expected.note(first_row, num_rows, weight_format)
    assert list(expected.runs()) == [(0, 10, None), (10, 50, FOUR), (60, 20, EIGHT), (80, 20, None)]
    expected.note(10, 20, reordered)
    expected.note(30, 30, reordered)
    expected.note(60, 20, None)
    assert list(expected.runs()) == [(0, 10, None), (10, 20, reordered), (30, 30, reordered), (60, 40, None)]
    assert list(Expected(7).runs()) == [(0, 7, None)]


@pytest.mark.parametrize(
    "formats",
    [
        {0: (EIGHT, EIGHT), 1: (EIGHT, EIGHT)},
        {0: (EIGHT, FOUR), 1: (EIGHT, FOUR)},
        {0: (EIGHT, EIGHT), 1: (None, None)},
    ],
    ids=["of one format", "gates and ups differ", "one is plain"],
)
def test_experts_compute_what_each_would_alone(formats: dict[int, tuple[WeightFormat | None, WeightFormat | None]]):
    each = AsStoredMethod(RUNTIME, method_of)
    method = AsStoredExperts(
        method_of,
        lambda own: PackedExperts(RUNTIME, own, own.format if isinstance(own, QuantizedLinearMethod) else None),
        each,
    )
    with torch.no_grad():
        layer = ExpertLinear(2, INPUTS, 64, method, torch.float32, CPU, bias=False)
        targets: dict[tuple[int, int], WeightTarget] = {}
        for expert, of_expert in formats.items():
            for part, weight_format in enumerate(of_expert):
                targets[expert, part] = method.row_target(layer, expert, 32 * part, 32)
                targets[expert, part].expect(weight_format)
        for (expert, part), target in targets.items():
            assert target.load(randn(32, INPUTS, seed=2 * expert + part))
    x = randn(4, INPUTS)
    routing = ExpertKernels().route(randn(4, 2), 1, None, RouterArch())
    output = layer(x, routing, are_rows=False)
    gated = layer.forward_gated(x, routing, are_rows=False)
    for expert, (gate_format, up_format) in formats.items():
        own = routing.rows[routing.starts[expert] : routing.starts[expert + 1]].long()
        parts = []
        for part, weight_format in enumerate((gate_format, up_format)):
            alone = torch.nn.Module()
            method_of(weight_format).create_weights(alone, 32, INPUTS, torch.float32, CPU)
            assert method_of(weight_format).row_target(alone, 0, 32).load(randn(32, INPUTS, seed=2 * expert + part))
            parts.append(method_of(weight_format).apply(alone, x[own], None, torch.float32))
        rows = slice(int(routing.starts[expert]), int(routing.starts[expert + 1]))
        assert torch.equal(output[rows], torch.cat(parts, dim=1))
        torch.testing.assert_close(gated[rows], torch.nn.functional.silu(parts[0]) * parts[1])


class Kept(WeightTarget):
    """Keeps what it is given."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.formats: list[WeightFormat | None] = []
        self.given: list[torch.Tensor | StoredWeight] = []

    def expect(self, weight_format: WeightFormat | None) -> None:
        self.formats.append(weight_format)

    def load(self, tensor: torch.Tensor) -> bool:
        self.given.append(tensor)
        return True

    def load_stored(self, weight: StoredWeight) -> bool:
        self.given.append(weight)
        return True

    def stored(self) -> torch.Tensor:
        raise NotImplementedError


def stored(num_rows: int, input_size: int = 64) -> StoredWeight:
    """Rows of Q8_0, whose scales are 1 and whose codes are small numbers."""
    blocks = torch.randint(-9, 9, (num_rows, input_size // 32, 34), generator=torch.Generator().manual_seed(0))
    blocks = blocks.to(torch.int8).view(torch.uint8)
    blocks[..., :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    return StoredWeight(Q8, (num_rows, input_size), {"blocks": blocks.flatten(1)})


def test_targets_hand_rows_on_as_they_are_stored():
    weight, rows = stored(6), torch.tensor([5, 3, 1])
    kept = Kept(3, 64)
    ReorderedTarget(kept, rows).expect(Q8)
    ReorderedTarget(kept, rows).load_stored(weight)
    LaterRows(kept, 3).load_stored(weight)
    places = Kept(6, 64), Kept(6, 64)
    SpreadTarget(places).expect(Q8)
    SpreadTarget(places).load_stored(weight)
    stacked = Kept(2, 64), Kept(2, 64), Kept(2, 64)
    StackedTarget(stacked).expect(Q8)
    StackedTarget(stacked).load_stored(weight)
    assert kept.formats == places[1].formats == stacked[2].formats == [Q8]
    given = [*kept.given, places[1].given[0], stacked[2].given[0]]
    wanted = [rows, slice(3, None), slice(None), slice(4, None)]
    for got, index in zip(given, wanted, strict=True):
        assert isinstance(got, StoredWeight)
        assert torch.equal(got.dequantize(), weight.dequantize()[index]) and got.shape == got.dequantize().shape


def test_a_matrix_that_is_stored_transposed_is_given_as_numbers():
    kept = Kept(64, 6)
    target = ReorderedTarget(kept, None, is_transposed=True)
    target.expect(Q8)
    assert target.shape == (6, 64) and target.load_stored(stored(6)) and kept.formats == [None]
    assert torch.equal(kept.given[0], stored(6).dequantize().t())


def test_columns_of_another_order_are_put_back():
    weight = stored(2)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    moved = StoredWeight(Q8, weight.shape, weight.parts, order)
    assert torch.equal(moved.dequantize()[:, order], weight.dequantize())


def test_a_matrix_is_split_by_columns_as_numbers():
    left, right = Kept(6, 24), Kept(6, 40)
    target = SideBySide((left, right))
    assert target.shape == (6, 64)
    target.expect(Q8)
    assert target.load_stored(stored(6)) and left.formats == right.formats == [None]
    assert torch.equal(torch.cat([left.given[0], right.given[0]], 1), stored(6).dequantize())

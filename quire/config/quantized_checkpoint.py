"""How the weights of a quantized checkpoint are stored: `quantization_config` of its config.json, read and checked.

Called by the registry of families; the result is part of the `ModelArch`, read by `models.quantized_checkpoint`. Pure.
A module's own tensors (their names, dtypes and shapes) decide which scheme it has; they must fit one of these. Patterns
of names (`targets`, `ignore`) are checked for their form and never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.config.hf_fields import FieldReader
from quire.errors import ModelError

__all__ = ["CHECKPOINT_FORMATS", "CheckpointQuantization", "WeightScheme", "checkpoint_format", "read_quantization"]

INT4_GROUPS = (32, 64, 128)
INT8_GROUPS = (32, 64, 128)
# Of a group in memory: a scale of 32 bits and a zero point.
SCALE_BYTES = 5
UNQUANTIZED = "use the model's unquantized checkpoint, or one in GPTQ, AWQ, compressed-tensors, FP8 or NF4"

# Values of `--quantization` that mean a format of checkpoints, as users of vLLM know them -> the method.
CHECKPOINT_FORMATS: Mapping[str, str] = {
    "gptq": "gptq", "gptq_marlin": "gptq", "auto_gptq": "gptq",
    "awq": "awq", "awq_marlin": "awq", "auto_awq": "awq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8", "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4",
    "bitsandbytes": "bitsandbytes",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How the weights of some modules are stored.

    Attributes:
        packing: the layout of their tensors: "gptq", "gptq_v2", "awq", "pack-quantized", "plain" (one number in each
            element), "blocks" (scales of blocks of rows and inputs), "nf4", "int8_rows" (bitsandbytes) or "mxfp4".
        kind: of the numbers: "int", "fp8", "nf4" or "mxfp4".
        num_bits: 4 or 8.
        group_size: inputs that share a scale; 0 = all of a row, or of the matrix.
        is_symmetric: without zero points.
        block_rows: rows that share a scale; 0 = one.
    """

    packing: str
    kind: str
    num_bits: int
    group_size: int = 0
    is_symmetric: bool = True
    block_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """A checkpoint's quantization.

    Attributes:
        method: "gptq", "awq", "compressed-tensors", "fp8", "mxfp4" or "bitsandbytes".
        schemes: the different ones that its modules have.
        has_static_inputs: modules come with the scales of their inputs; Quire measures those itself, row by row.
    """

    method: str
    schemes: tuple[WeightScheme, ...]
    has_static_inputs: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """In memory, scales included, of the scheme that takes the most."""
        of_schemes = [
            scheme.num_bits / 8 + (SCALE_BYTES / scheme.group_size if scheme.group_size else 0.01)
            for scheme in self.schemes
        ]
        return max(of_schemes, default=2.0)


def checkpoint_format(quantization: str | None) -> str | None:
    """The method that a value of `--quantization` asks for; None where it names no format of checkpoints."""
    return None if quantization is None else CHECKPOINT_FORMATS.get(quantization)


def read_quantization(raw: Mapping[str, object]) -> CheckpointQuantization | None:
    """What a `config.json` says about its weights; None = they are plain numbers.

    Raises:
        ModelError: a format that is not supported, or a field that is missing, of the wrong type or out of range.
    """
    for name in ("quantization_config", "compression_config"):
        value = raw.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {name} is not an object", hint=UNQUANTIZED, field=name)
        config = FieldReader(value, f"config.json: {name}")
        method = value.get("quant_method", "compressed-tensors" if name == "compression_config" else None)
        if method is None and (value.get("load_in_4bit") or value.get("load_in_8bit")):
            method = "bitsandbytes"  # written before the field existed
        reader = _READERS.get(method) if isinstance(method, str) else None
        if reader is None:
            raise config.error(
                "quant_method", f"is {str(method)[:40]!r}, a quantization that Quire does not support",
                f"{UNQUANTIZED}; read are {', '.join(_READERS)}",
            )  # fmt: skip
        return reader(config)
    return None


def _gptq(config: FieldReader) -> CheckpointQuantization:
    num_bits = _bits(config, "bits", (4, 8), None)
    packing = config.text("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    config.flag("desc_act", False)
    dynamic = config.raw.get("dynamic")
    if isinstance(dynamic, Mapping) and any(not str(pattern).startswith("-:") for pattern in dynamic):
        raise config.error("dynamic", "gives some modules other bits or groups", UNQUANTIZED)
    scheme = WeightScheme(
        packing=packing, kind="int", num_bits=num_bits, group_size=_group_size(config, "group_size", num_bits),
        is_symmetric=config.flag("sym", True),
    )  # fmt: skip
    return CheckpointQuantization(method="gptq", schemes=(scheme,))


def _awq(config: FieldReader) -> CheckpointQuantization:
    version = config.raw.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise config.error("version", f"is {str(version)[:40]!r}, of which Quire reads only gemm", UNQUANTIZED)
    bits_name = "bits" if config.has("bits") else "w_bit"
    group_name = "group_size" if config.has("group_size") else "q_group_size"
    num_bits = _bits(config, bits_name, (4,), None)
    config.texts("modules_to_not_convert")
    scheme = WeightScheme(
        packing="awq", kind="int", num_bits=num_bits, group_size=_group_size(config, group_name, num_bits),
        is_symmetric=not config.flag("zero_point", True),
    )  # fmt: skip
    return CheckpointQuantization(method="awq", schemes=(scheme,))


def _fp8(config: FieldReader) -> CheckpointQuantization:
    config.text("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    activations = config.text("activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.integers("weight_block_size", 1, 1 << 16)
    if block:
        return _with_static_inputs("fp8", (_block_scheme(config, "weight_block_size", block),), activations)
    return _with_static_inputs("fp8", (WeightScheme(packing="plain", kind="fp8", num_bits=8),), activations)


def _block_scheme(config: FieldReader, name: str, block: tuple[int, ...]) -> WeightScheme:
    if len(block) != 2 or block[1] % 32:
        raise config.error(name, f"is {list(block)[:4]}", "two numbers are needed, the second a multiple of 32")
    return WeightScheme(packing="blocks", kind="fp8", num_bits=8, group_size=block[1], block_rows=block[0])


def _fbgemm(config: FieldReader) -> CheckpointQuantization:
    return CheckpointQuantization(method="fp8", schemes=(WeightScheme(packing="plain", kind="fp8", num_bits=8),))


def _with_static_inputs(method: str, schemes: tuple[WeightScheme, ...], activations: str) -> CheckpointQuantization:
    return CheckpointQuantization(method=method, schemes=schemes, has_static_inputs=activations == "static")


def _mxfp4(config: FieldReader) -> CheckpointQuantization:
    scheme = WeightScheme(packing="mxfp4", kind="mxfp4", num_bits=4, group_size=32)
    return CheckpointQuantization(method="mxfp4", schemes=(scheme,))


def _bitsandbytes(config: FieldReader) -> CheckpointQuantization:
    if config.flag("load_in_8bit", False) or config.flag("_load_in_8bit", False):
        scheme = WeightScheme(packing="int8_rows", kind="int", num_bits=8)
    else:
        config.text("bnb_4bit_quant_type", ("nf4",), "nf4")
        scheme = WeightScheme(packing="nf4", kind="nf4", num_bits=4, group_size=64)
    return CheckpointQuantization(method="bitsandbytes", schemes=(scheme,))


def _compressed_tensors(config: FieldReader) -> CheckpointQuantization:
    _refuse_objects(config)
    whole = config.text("format", _FORMATS, "dense")
    config.texts("ignore")
    groups = config.raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise config.error("config_groups", "is missing or empty", "it must describe at least one group of modules")
    schemes: dict[WeightScheme, None] = {}
    has_static_inputs = False
    for name, value in groups.items():
        group = _object(value, f"{config.source}: config_groups.{str(name)[:80]}")
        group.texts("targets")
        own = group.text("format", _FORMATS, "dense" if whole == "mixed-precision" else whole)
        scheme = _group_scheme(group, own)
        if scheme is not None:
            schemes[scheme] = None
        inputs = group.optional_object("input_activations")
        if inputs is not None and inputs.raw.get("dynamic", False) is False:
            has_static_inputs = True
    return CheckpointQuantization(
        method="compressed-tensors", schemes=tuple(schemes), has_static_inputs=has_static_inputs
    )


# Formats of compressed-tensors. Weights of "dense" are plain numbers, already rounded; "mixed-precision" means that
# every group has one of its own.
_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision",
)  # fmt: skip


def _refuse_objects(config: FieldReader) -> None:
    """Refuses what changes the meaning of the tensors and is not computed."""
    sparsity = config.optional_object("sparsity_config")
    if sparsity is not None and sparsity.raw.get("format", "dense") != "dense":
        raise config.error("sparsity_config", "stores sparse weights, which Quire does not read", UNQUANTIZED)
    transform = config.optional_object("transform_config")
    if transform is not None and transform.raw.get("config_groups"):
        raise config.error("transform_config", "rotates weights, which Quire does not compute", UNQUANTIZED)


def _group_scheme(group: FieldReader, own_format: str) -> WeightScheme | None:
    weights = group.optional_object("weights")
    if weights is None or own_format == "dense":
        return None
    kind = weights.text("type", ("int", "float"), "int")
    num_bits = _bits(weights, "num_bits", (8,) if kind == "float" else (4, 8), 8)
    strategy = weights.text("strategy", ("tensor", "channel", "group", "block"), "")
    group_size = _group_size(weights, "group_size", num_bits)
    if strategy == "group" and not group_size:
        raise weights.error("group_size", "is missing", "strategy is group: give the inputs that share a scale")
    weights.text("actorder", ("group", "weight", "dynamic", "static"), "")
    if kind == "float":
        if strategy == "block":
            block = weights.raw.get("block_structure")
            if isinstance(block, str) and re.fullmatch(r"[0-9]{1,5}x[0-9]{1,5}", block):
                weights = FieldReader({"block_structure": [int(n) for n in block.split("x")]}, weights.source)
            return _block_scheme(weights, "block_structure", weights.integers("block_structure", 1, 1 << 16))
        if group_size:
            raise weights.error("strategy", "is group, with numbers in FP8, which Quire does not read", UNQUANTIZED)
        return WeightScheme(packing="plain", kind="fp8", num_bits=8)
    if strategy == "block":
        raise weights.error("strategy", "is block, with integers, which Quire does not read", UNQUANTIZED)
    packing = "pack-quantized" if own_format == "pack-quantized" else "plain"
    is_symmetric = weights.flag("symmetric", True)
    return WeightScheme(
        packing=packing, kind="int", num_bits=num_bits, group_size=group_size, is_symmetric=is_symmetric
    )


def _object(value: object, source: str) -> FieldReader:
    if not isinstance(value, Mapping):
        raise ModelError(f"{source} is not an object", hint="correct config.json", field="config_groups")
    return FieldReader(value, source)


def _bits(config: FieldReader, name: str, known: tuple[int, ...], default: int | None) -> int:
    num_bits = config.integer(name, 1, 64, default)
    if num_bits not in known:
        raise config.error(
            name, f"is {num_bits}, of which Quire reads {' and '.join(map(str, known))}", UNQUANTIZED
        )  # fmt: skip
    return num_bits


def _group_size(config: FieldReader, name: str, num_bits: int) -> int:
    """Inputs that share a scale; -1 and nothing at all mean all of a row, which is 0 here."""
    group_size = config.optional_integer(name, -1, 1 << 20)
    if group_size is None or group_size == -1:
        return 0
    known = INT4_GROUPS if num_bits == 4 else INT8_GROUPS
    if group_size not in known:
        raise config.error(
            name, f"is {group_size}, of which Quire reads {', '.join(map(str, known))} and -1", UNQUANTIZED
        )
    return group_size


_READERS: Mapping[str, Callable[[FieldReader], CheckpointQuantization]] = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4, "bitsandbytes": _bitsandbytes,
}  # fmt: skip

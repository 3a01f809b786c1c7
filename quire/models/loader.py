"""Builds a model and fills it with weights. Called by the worker; owns nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.selector import select_backend
from quire.config.model import LoadConfig
from quire.config.model_arch import ModelArch
from quire.config.quantized_checkpoint import CheckpointQuantization
from quire.distributed.parallel_context import ParallelContext
from quire.errors import UnsupportedError
from quire.formats.gguf_file import is_gguf
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.options import LayerOptions
from quire.models.checkpoint import Checkpoint
from quire.models.gguf_checkpoint import GGUFCheckpoint
from quire.models.interfaces import BuildContext, CausalLM
from quire.models.packing_cache import PackingCache
from quire.models.packing_key import packing_key
from quire.models.parts.attention import attention_params
from quire.models.quantized_checkpoint import QuantizedCheckpoint
from quire.models.registry import build_model, model_family, origin_of
from quire.models.weight_files import find_weight_files
from quire.models.weights import SafetensorsCheckpoint, load_weights, open_safetensors

MIN_KEPT_BYTES = 64 << 20
# Of numbers drawn for a dummy tensor: a prime, so that no two rows are the same.
DUMMY_PERIOD = 1_048_573


def load_model(
    arch: ModelArch,
    model_path: str,
    load: LoadConfig,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelContext,
    backend: AttentionBackend | None,
    max_model_len: int,
    seed: int,
    kernels: LayerKernels | None = None,
    packing_cache: PackingCache | None = None,
    reports_error: bool = False,
) -> CausalLM:
    """The model of `arch`, ready to run.

    Args:
        model_path: directory with the safetensors files; not looked at when `load_format` is "dummy".
        dtype: of parameters and activations; checkpoint tensors are converted.
        backend: for every attention layer; None = the first that fits.
        max_model_len: longest sequence, in tokens.
        seed: of dummy weights.
        kernels: what computes the layers; None = torch.
        packing_cache: where weights in the form of `kernels` are kept.
        reports_error: log how far each stored tensor is from the checkpoint's.

    Raises:
        ModelError: unknown architecture, or weights (WeightsError) that are malformed or not this model's.
        ConfigError: no attention backend fits.
        UnsupportedError: more ranks than the kernels divide the model over.
    """
    family = model_family(arch)
    layers = kernels or TorchKernels()
    if parallel.tensor_parallel_size != (1 if layers.shards is None else layers.shards.size):
        raise UnsupportedError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} is not supported by the kernels of this device",
            hint="use tensor_parallel_size=1, or the native CPU kernels",
            field="tensor_parallel_size",
        )
    is_dummy, checkpoint = load.load_format == "dummy", None
    if not is_dummy and not arch.config_json:  # of transformers' classes some are refused while they are built
        checkpoint = open_checkpoint(Path(model_path), arch.quantization)
    if checkpoint.is_quantized if checkpoint is not None else arch.quantization is not None and not is_dummy:
        layers = layers.as_stored()
    build = BuildContext(
        arch=arch,
        family=family,
        options=LayerOptions(dtype, device, layers),
        parallel=parallel,
        backend=backend or select_backend("auto", attention_params_of(arch), dtype, device),
        max_model_len=max_model_len,
    )
    with torch.no_grad():
        model = build_model(build)
        if checkpoint is None and not is_dummy:
            checkpoint = open_checkpoint(Path(model_path), arch.quantization)
        if checkpoint is None:
            fill_dummy_weights(model, arch.initializer_range, seed, dtype)
        else:
            read_checkpoint = partial(
                load_weights, checkpoint, Path(model_path), model.checkpoint_targets(), ignored=model.ignored_tensors(),
                prefixes=family.prefixes, reports_error=reports_error,
            )  # fmt: skip
            packing = None if checkpoint.is_quantized else layers.packing()
            if packing is not None:
                packing = {**packing, **origin_of(arch)}
            if packing is not None and parallel.stage is not None:
                packing = {**packing, "layers": f"{parallel.stage.layers.start}-{parallel.stage.layers.stop}"}
            load_through_cache(packing_cache, Path(model_path), packing, model, read_checkpoint)
    return model


def open_checkpoint(path: Path, quantization: CheckpointQuantization | None = None) -> Checkpoint:
    """The weights at a path, with every header checked.

    Args:
        quantization: what config.json says about them.

    Raises:
        WeightsError: no weights that can be read, or malformed ones.
    """
    if is_gguf(path):
        return GGUFCheckpoint(path)
    if quantization is not None:
        return QuantizedCheckpoint(open_safetensors(path), quantization)
    return SafetensorsCheckpoint(path)


def load_through_cache(
    cache: PackingCache | None,
    model_path: Path,
    packing: Mapping[str, str | int] | None,
    model: CausalLM,
    read_checkpoint: Callable[[], None],
) -> None:
    """Fill the model from its packed weights on disk, or by `read_checkpoint`, and keep them for the next start.

    They are written while the model is already in use: nothing changes its weights.
    Small models are not kept: they are packed in less time than it takes to check them.
    """
    stored = model.stored_tensors()
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in stored.values())
    if cache is None or packing is None or num_bytes < MIN_KEPT_BYTES:
        read_checkpoint()
        return
    key = packing_key(find_weight_files(model_path)[1], packing)
    if cache.open(key, into=stored) is None:
        read_checkpoint()
        cache.write_behind(key, stored)


def attention_params_of(arch: ModelArch) -> list[AttentionParams]:
    """What the attention backend must serve: each kind of layer once."""
    return list(dict.fromkeys(map(attention_params, arch.attention_layers)))


def fill_dummy_weights(model: CausalLM, std: float, seed: int, dtype: torch.dtype) -> None:
    """Random weights that depend on the seed and each tensor's checkpoint name alone: gains 1, the rest normal.

    A large tensor repeats its beginning: to draw a billion numbers takes ten seconds.
    """
    for name, target in model.checkpoint_targets().items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        if target.neutral is not None:
            target.load(torch.full(target.shape, target.neutral, dtype=dtype))
            continue
        size = math.prod(target.shape)
        drawn = torch.empty(min(size, DUMMY_PERIOD)).normal_(0.0, std, generator=generator).to(dtype)
        target.load(drawn.repeat(-(-size // len(drawn)))[:size].view(target.shape))

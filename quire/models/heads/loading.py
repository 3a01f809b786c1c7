"""Builds heads and fills them with weights: EAGLE's from a directory of their own, MTP's from the target's checkpoint.

Called by `worker.drafting.loading`. Only safetensors files are read. Layouts are those of published checkpoints:

    EAGLE-1     a Llama's config.json of one layer; `fc` [hidden, 2 * hidden], `layers.0.*`, mostly without input norm
    EAGLE-3     the same with `draft_vocab_size`; `fc` [hidden, 3 * hidden], `midlayer.*`, `norm`, `lm_head`, `d2t`
    Qwen3-Next  `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.layers.0.*`, `mtp.norm`
    DeepSeek V3 the layer behind the last one: `eh_proj`, `enorm`, `hnorm`, `shared_head.norm` beside a usual layer
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.attention.backend import AttentionBackend
from quire.config.families.registry import FAMILIES, parse_config
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import LayerArch, ModelArch
from quire.distributed.parallel_context import ParallelContext
from quire.layers.options import LayerOptions
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import DecoderForCausalLM
from quire.models.heads.feature_head import Eagle3Head, FeatureHead, FusedHead, FusedNames
from quire.models.heads.files import check_sizes, read_head_config, wrong_heads
from quire.models.heads.medusa import PREFIXES, MedusaHeads, read_medusa
from quire.models.interfaces import BuildContext
from quire.models.loader import open_checkpoint
from quire.models.registry import model_family
from quire.models.weights import load_weights

PREFIXES_OF_EAGLE = ("", "model.")
HIDDEN_NORM = ".hidden_norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBuild:
    """What heads are built for: a target with its shape and path, and how it is computed."""

    target: DecoderForCausalLM
    arch: ModelArch
    model_path: Path
    options: LayerOptions
    backend: AttentionBackend
    max_model_len: int

    def context(self, arch: ModelArch) -> BuildContext:
        """For a head of this shape."""
        return BuildContext(
            arch=arch, family=model_family(arch), options=self.options, parallel=ParallelContext(),
            backend=self.backend, max_model_len=self.max_model_len,
        )  # fmt: skip


def load_medusa(path: Path, build: HeadBuild) -> MedusaHeads:
    """The Medusa heads in `path`.

    Raises:
        ConfigError, ModelError: they are malformed, or those of another model.
    """
    arch, checkpoint = read_medusa(path, build.arch), open_checkpoint(path)
    with torch.no_grad():
        heads = MedusaHeads(arch, build.arch.hidden_size, build.arch.vocab_size, build.options)
        load_weights(checkpoint, path, heads.checkpoint_targets(), ignored=heads.ignored_tensors(), prefixes=PREFIXES)
    return heads.eval()


def load_eagle(path: Path, build: HeadBuild, *, is_eagle3: bool) -> FeatureHead:
    """The EAGLE head in `path`. Raises as `load_medusa`."""
    config = read_head_config(path)
    check_sizes(config, build.arch)
    named = FieldReader(config).texts("architectures")
    known = named[0] if named and named[0] in FAMILIES and not is_eagle3 else "LlamaForCausalLM"
    arch = parse_config({**config, "architectures": [known], "num_hidden_layers": 1})
    checkpoint = open_checkpoint(path)
    with torch.no_grad():
        make = _eagle3 if is_eagle3 else _eagle
        head = make(config, arch, checkpoint, build)
        ignored = (r"(^|\.)embed_tokens\.weight$", r"^(d2t|t2d)$", *(() if is_eagle3 else (r"(^|\.)lm_head\.weight$",)))
        load_weights(checkpoint, path, head.checkpoint_targets(), ignored=ignored, prefixes=PREFIXES_OF_EAGLE)
    return head.eval()


def _eagle(config: Mapping[str, object], arch: ModelArch, checkpoint: Checkpoint, build: HeadBuild) -> FeatureHead:
    layer, norm = arch.layers[0], arch.layers[0].ffn_norm
    assert norm is not None, "a Llama's layer has one"
    if not _has(checkpoint, "layers.0.input_layernorm.weight"):
        layer = dataclasses.replace(layer, mixer_norm=None)
    return FusedHead(
        build.context(arch), build.target, layer, FusedNames(layer="layers.0", projection="fc"), norm,
        has_bias=_has(checkpoint, "fc.bias"),
    )  # fmt: skip


def _eagle3(config: Mapping[str, object], arch: ModelArch, checkpoint: Checkpoint, build: HeadBuild) -> FeatureHead:
    norms = [name for name in checkpoint.entries if name.endswith(HIDDEN_NORM)]
    if len(norms) != 1:
        raise wrong_heads(
            f"{len(norms)} layers have a hidden_norm, an EAGLE-3 head has one", "use method eagle for an EAGLE-1 head"
        )
    draft_vocab_size = FieldReader(config).integer("draft_vocab_size", 1, arch.vocab_size, arch.vocab_size)
    offsets = _read_offsets(checkpoint, draft_vocab_size, arch.vocab_size)
    layer = arch.layers[0]
    assert layer.attention is not None, "a Llama's layer has attention"
    layer = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, input_size=2 * arch.hidden_size))
    return Eagle3Head(
        build.context(arch), build.target, layer, norms[0][: -len(HIDDEN_NORM)].removeprefix("model."),
        read_aux_layers(config, build.arch.num_layers), draft_vocab_size, offsets,
        has_projection=_has(checkpoint, "lm_head.weight"), fusion_has_bias=_has(checkpoint, "fc.bias"),
    )  # fmt: skip


def _has(checkpoint: Checkpoint, name: str) -> bool:
    return any(prefix + name in checkpoint.entries for prefix in PREFIXES_OF_EAGLE)


def _read_offsets(checkpoint: Checkpoint, draft_vocab_size: int, vocab_size: int) -> np.ndarray | None:
    """`d2t`: what is added to an id of the draft vocabulary.

    Raises:
        ModelError: it leads outside the target's vocabulary, or is missing where it is needed.
    """
    if "d2t" not in checkpoint.entries:
        if draft_vocab_size != vocab_size:
            raise wrong_heads(f"draft_vocab_size={draft_vocab_size} needs a tensor d2t", "download all files")
        return None
    tensor = checkpoint.read("d2t")
    assert isinstance(tensor, torch.Tensor), "integers are plain"
    offsets: np.ndarray = tensor.to(torch.int64).numpy().copy()
    ids = np.arange(len(offsets)) + offsets if offsets.ndim == 1 else np.empty(0)
    if len(ids) != draft_vocab_size or ids.min() < 0 or ids.max() >= vocab_size:
        raise wrong_heads("tensor d2t does not map the draft vocabulary to the target's", "download the head again")
    return offsets


def read_aux_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    """The layers of the target before which an EAGLE-3 head takes the states.

    `eagle_config` counts the layers that the states come out of, the field without it those that they go into.

    Raises:
        ModelError: they are not three rising layers of the target.
    """
    inner = config.get("eagle_config")
    name, shift, given = "eagle_aux_hidden_state_layer_ids", 0, config.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(inner, Mapping) and inner.get(name) is not None:
        given, shift = inner[name], 1
    layers = [2, num_layers // 2, num_layers - 3] if given is None else given
    is_list = isinstance(layers, (list, tuple)) and all(type(one) is int for one in layers)
    found = tuple(int(one) + shift for one in layers) if is_list and isinstance(layers, (list, tuple)) else ()
    is_rising = all(0 < a < b for a, b in itertools.pairwise(found))
    if len(found) != 3 or not is_rising or found[-1] >= num_layers:
        raise wrong_heads(
            f"{name} gives states before layers {found or given}, of a model of {num_layers} layers",
            "use a head that was trained for this very model",
        )
    return found


def load_mtp(build: HeadBuild) -> FeatureHead:
    """The head that ships in the target's checkpoint.

    Raises:
        ModelError: it ships none, or malformed ones.
    """
    checkpoint = open_checkpoint(build.model_path, build.arch.quantization)
    if checkpoint.is_quantized:
        options = build.options
        as_stored = LayerOptions(options.dtype, options.device, options.kernels.as_stored())
        build = dataclasses.replace(build, options=as_stored)
    behind = f"model.layers.{build.arch.num_layers}"
    if "mtp.fc.weight" in checkpoint.entries:
        names = FusedNames(
            layer="mtp.layers.0", projection="mtp.fc", embedding_norm="mtp.pre_fc_norm_embedding",
            feature_norm="mtp.pre_fc_norm_hidden", output_norm="mtp.norm",
        )  # fmt: skip
        others: tuple[str, ...] = (r"^(?!mtp\.)", r"^mtp\.(embed_tokens|lm_head)\.", r"^mtp\.layers\.[1-9]")
    elif f"{behind}.eh_proj.weight" in checkpoint.entries:
        names = FusedNames(
            layer=behind, projection=f"{behind}.eh_proj", embedding_norm=f"{behind}.enorm",
            feature_norm=f"{behind}.hnorm", output_norm=f"{behind}.shared_head.norm",
        )  # fmt: skip
        pattern = behind.replace(".", r"\.")
        others = (rf"^(?!{pattern}\.)", rf"^{pattern}\.(embed_tokens|shared_head\.head)\.")
    else:
        raise wrong_heads(
            "method mtp needs heads in the model's own checkpoint, and this one has none",
            "use another method, such as suffix",
        )
    layer, norm = _attention_layer(build.arch), build.arch.head.norm
    assert norm is not None, "families with such heads have a final norm"
    with torch.no_grad():
        head = FusedHead(
            build.context(build.arch), build.target, layer, names, norm, feeds_normed=names.layer.startswith("mtp.")
        )
        load_weights(checkpoint, build.model_path, head.checkpoint_targets(), ignored=others)
    return head.eval()


def _attention_layer(arch: ModelArch) -> LayerArch:
    """The layer that a head resembles: the last one that is not recurrent."""
    return next(
        layer for layer in reversed(arch.layers) if layer.attention is not None or layer.latent_attention is not None
    )

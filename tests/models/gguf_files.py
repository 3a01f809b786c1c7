"""GGUF files made from tiny checkpoints in Hugging Face format, with the numbers that they mean.

Used by the tests of GGUF. Names, metadata and order of rows are those of llama.cpp's converter.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quire.formats.block_formats import BLOCK_FORMATS
from tests.models.gguf_quantizers import Floats, dequantize, quantize

Numbers = dict[str, torch.Tensor]  # names of the checkpoint -> what the file means, float32


@dataclass(frozen=True)
class Arch:
    """How the converter writes a family.

    Attributes:
        name: `general.architecture`.
        pairs_rotary: rows of queries and keys are in the order of interleaved pairs.
        norm_offset: added to the gains of norms.
        has_window: writes the length of sliding windows.
    """

    name: str
    pairs_rotary: bool = False
    norm_offset: float = 0.0
    has_window: bool = False


ARCHS: Mapping[str, Arch] = {
    "llama": Arch("llama", pairs_rotary=True),
    "mistral": Arch("llama", pairs_rotary=True),
    "mixtral": Arch("llama", pairs_rotary=True),
    "qwen2": Arch("qwen2"),
    "qwen2_moe": Arch("qwen2moe"),
    "qwen3": Arch("qwen3"),
    "qwen3_moe": Arch("qwen3moe"),
    "gemma": Arch("gemma", norm_offset=1.0),
    "gemma2": Arch("gemma2", norm_offset=1.0, has_window=True),
    "gemma3_text": Arch("gemma3", norm_offset=1.0, has_window=True),
}
"""By `model_type` of config.json."""

MIXES: Mapping[str, Mapping[str, str]] = {
    "Q4_K_M": {
        r"^output\.": "Q6_K",
        r"\.[02468]\.(attn_v|ffn_down)": "Q6_K",
        r"": "Q4_K",
    },
    "every type": {
        r"^output\.": "Q6_K",
        r"^token_embd\.": "Q8_0",
        r"attn_q\.": "Q2_K",
        r"attn_k\.": "Q4_0",
        r"attn_v\.": "Q5_1",
        r"attn_output\.": "Q3_K",
        r"ffn_gate": "IQ4_XS",
        r"ffn_up": "Q5_K",
        r"0\.ffn_down": "MXFP4",
        r"ffn_down": "IQ4_NL",
        r"": "Q4_K",
    },
}
"""Pattern of a tensor's name in the file -> its type; the first that is found counts."""

# As llama-quantize does where rows are not of whole blocks of 256.
SMALLER_BLOCKS = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight$")


def make_gguf(
    checkpoint: Path,
    path: Path,
    types: str | Mapping[str, str] = "Q4_K_M",
    *,
    tensors_per_file: int = 0,
    metadata: Mapping[str, Any] | None = None,
    add_tokenizer: Callable[[gguf.GGUFWriter, Path], None] | None = None,
) -> Numbers:
    """Write a checkpoint as a GGUF file, and return the numbers that it means, by the checkpoint's names.

    Args:
        checkpoint: directory with config.json, safetensors files and a tokenizer.
        path: of the file; split files get numbers in their names as llama.cpp's have.
        types: a name in `MIXES`, a type for all matrices, or patterns of names in the file -> types. Vectors and
            routers are F32, and rows that the type's blocks do not divide get one with smaller blocks.
        tensors_per_file: 0 = one file.
        metadata: further strings, numbers, booleans and lists under their full keys; None takes a key away.
        add_tokenizer: writes the tokenizer's metadata; by default that of a byte-level BPE.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch.name, split_max_tensors=tensors_per_file)
    _add_config(writer, config, arch)
    (add_tokenizer or add_byte_level_bpe)(writer, checkpoint)
    _add_metadata(writer, metadata or {})
    by_pattern = MIXES.get(types, {"": types}) if isinstance(types, str) else types
    meant: Numbers = {}
    for name, sources, values in _tensors(load_tensors(checkpoint), config, arch):
        type_name = _type_of(name, values, by_pattern)
        blocks = quantize(values, type_name)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[type_name])
        for source, found in _by_source(dequantize(blocks, type_name), sources):
            meant[source] = torch.from_numpy(_as_in_checkpoint(found, source, config, arch))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def load_tensors(checkpoint: Path) -> Numbers:
    """All tensors of a checkpoint's safetensors files."""
    return {
        name: tensor for path in sorted(checkpoint.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def write_plain(checkpoint: Path, numbers: Numbers, directory: Path) -> Path:
    """A float32 checkpoint like another, with other numbers; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            shutil.copy(file, directory / file.name)
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    config["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config))
    wide = {name: tensor.float().contiguous() for name, tensor in numbers.items()}
    save_file(wide, directory / "model.safetensors", {"format": "pt"})
    return directory


def _type_of(name: str, values: Floats, by_pattern: Mapping[str, str]) -> str:
    if values.ndim == 1 or "ffn_gate_inp" in name:
        return "F32"
    type_name = next((one for pattern, one in by_pattern.items() if re.search(pattern, name)), "F32")
    if values.shape[-1] % BLOCK_FORMATS[type_name].block_size:
        type_name = SMALLER_BLOCKS.get(type_name, "F16")
    return type_name if values.shape[-1] % BLOCK_FORMATS[type_name].block_size == 0 else "F16"


def _tensors(tensors: Numbers, config: dict[str, Any], arch: Arch) -> list[tuple[str, list[str], Floats]]:
    """(name in the file, the checkpoint's tensors in it, numbers) of everything that the file has."""
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch.name)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    experts: dict[str, list[str]] = {}
    found = []
    for source in tensors:
        if match := EXPERT.match(source):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", []).append(source)
        elif not (source == "lm_head.weight" and config.get("tie_word_embeddings")):
            values = _as_in_file(tensors[source].float().numpy(), source, config, arch)
            found.append((_file_name(names, source), [source], values))
    for source, parts in experts.items():
        parts.sort(key=lambda part: int(EXPERT.match(part)[2]))  # type: ignore[index]
        found.append((_file_name(names, source), parts, np.stack([tensors[part].float().numpy() for part in parts])))
    if (factors := _rope_factors(config)) is not None:
        found.append(("rope_freqs.weight", [], factors))
    return found


def _file_name(names: gguf.TensorNameMap, source: str) -> str:
    # Mixtral's experts are known to the converter by the names that it gives them while it stacks them.
    source = re.sub(r"^model\.(layers\.\d+)\.block_sparse_moe\.experts\.", r"\1.feed_forward.experts.", source)
    name = names.get_name(source, try_suffixes=(".weight", ".bias"))
    assert name is not None, f"the gguf package does not know {source}"
    return name


def _by_source(values: Floats, sources: list[str]) -> list[tuple[str, Floats]]:
    return list(zip(sources, values, strict=True)) if len(sources) > 1 else [(source, values) for source in sources]


def _num_rotary_heads(source: str, config: dict[str, Any], arch: Arch) -> int | None:
    if not arch.pairs_rotary:
        return None
    if re.search(r"\.q_proj\.(weight|bias)$", source):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if re.search(r"\.k_proj\.(weight|bias)$", source) else None


def _as_in_file(values: Floats, source: str, config: dict[str, Any], arch: Arch) -> Floats:
    """The converter's order of rows (a pair's two halves follow each other) and its gains of norms."""
    if (num_heads := _num_rotary_heads(source, config, arch)) is not None:
        halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values + np.float32(arch.norm_offset) if source.endswith("norm.weight") else values


def _as_in_checkpoint(values: Floats, source: str, config: dict[str, Any], arch: Arch) -> Floats:
    if (num_heads := _num_rotary_heads(source, config, arch)) is not None:
        pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    return values - np.float32(arch.norm_offset) if source.endswith("norm.weight") else values


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    parameters = config.get("rope_parameters") or {}
    return {**rope, **parameters.get("full_attention", parameters)}


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope_factors(config: dict[str, Any]) -> Floats | None:
    """By what Llama 3 divides each frequency."""
    rope, head_size = _rope(config), _head_size(config)
    if rope.get("rope_type") != "llama3":
        return None
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(0, head_size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (pair / head_size)
        smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
        factors.append(1 / ((1 - min(max(smooth, 0), 1)) / factor + min(max(smooth, 0), 1)))
    return np.array(factors, np.float32)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], arch: Arch) -> None:
    writer.add_name("tiny")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(_head_size(config))
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch.has_window:
        writer.add_sliding_window(config["sliding_window"])
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for field, add in OPTIONAL_FIELDS.items():
        if config.get(field) is not None:
            getattr(writer, add)(config[field])


OPTIONAL_FIELDS = {
    "num_local_experts": "add_expert_count",
    "num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
}
"""Field of config.json -> method of the writer, for what only some families have."""


def add_byte_level_bpe(writer: gguf.GGUFWriter, checkpoint: Path, pre: str = "gpt-2") -> None:
    """The tokenizer of a checkpoint, a byte-level BPE.

    Args:
        pre: `tokenizer.ggml.pre`, how text is cut into words.
    """
    data = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config = json.loads((checkpoint / "config.json").read_text())
    added = {one["content"]: one for one in data["added_tokens"]}
    vocab = {**data["model"]["vocab"], **{content: one["id"] for content, one in added.items()}}
    by_id = {number: token for token, number in vocab.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([int(_token_type(number, by_id, added)) for number in range(len(tokens))])
    merges = [one if isinstance(one, str) else " ".join(one) for one in data["model"]["merges"]]
    writer.add_token_merges(merges)
    for role in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{role}_token")
        content = token["content"] if isinstance(token, dict) else token
        if content in vocab:
            getattr(writer, f"add_{role}_token_id")(vocab[content])
    writer.add_add_bos_token(bool(settings.get("add_bos_token", False)))
    template = checkpoint / "chat_template.jinja"
    if template.exists() or settings.get("chat_template"):
        writer.add_chat_template(template.read_text() if template.exists() else settings["chat_template"])


def _token_type(number: int, by_id: dict[int, str], added: dict[str, dict[str, Any]]) -> gguf.TokenType:
    token = by_id.get(number)
    if token is None:
        return gguf.TokenType.UNUSED
    if token not in added:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added[token]["special"] else gguf.TokenType.USER_DEFINED


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            adders[type(value)](key, value)

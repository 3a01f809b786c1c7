"""Writes the tiny checkpoints of `families.cases` as GGUF files, as `gguf_families` says, and writes files anew.

Names of tensors are looked up in the `gguf` package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from tests.models.gguf_families import FAMILIES, Config, Family, Tensors, of_full_layers, rope

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight$")
HEAD_NORM = re.compile(r"(.*\.[qk]_layernorm)\.norms\.(\d+)\.weight$")

COMMON_KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "intermediate_size":
    "feed_forward_length", "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon", "num_local_experts": "expert_count",
    "num_experts": "expert_count", "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip


def write_family(case: str, checkpoint: Path, path: Path) -> None:
    """Write the GGUF file of a checkpoint of `families.cases`."""
    family = FAMILIES[case]
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, family.name)
    for key, value in _metadata(family, config).items():
        _add(writer, f"{family.name}.{key}", value)
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(number, int(_metadata(family, config)["block_count"]))
    for name, values in _tensors(family, config, checkpoint):
        known = name[1:] if name.startswith("=") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, f"the gguf package does not know {name}"
        writer.add_tensor(known, values.float().contiguous().numpy())
    for name, factors in _rope_factors(config).items():
        writer.add_tensor(name, torch.tensor(factors, dtype=torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(family: Family, config: Config) -> dict[str, Any]:
    fields = {**COMMON_KEYS, **family.keys}
    found: dict[str, Any] = {"context_length": 1 << 20} if "mamba" in family.name else {}
    found |= {key: config[name] for name, key in fields.items() if config.get(name) is not None}
    if config.get("head_dim") is not None:
        found["attention.value_length"] = config["head_dim"]
    scaling = rope(config)
    if "rope_theta" in scaling:
        found["rope.freq_base"] = float(scaling["rope_theta"])
    if scaling.get("rope_type") in ("linear", "yarn", "longrope"):
        found["rope.scaling.type"] = scaling["rope_type"]
        for name, key in (("factor", "factor"), ("original_max_position_embeddings", "original_context_length")):
            if scaling.get(name) is not None and scaling["rope_type"] != "longrope":
                found[f"rope.scaling.{key}"] = scaling[name]
        for name in ("beta_fast", "beta_slow"):
            if scaling.get(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = float(scaling[name])
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if scaling.get("rope_type") == "longrope" and original:
        found["rope.scaling.original_context_length"] = original
    if family.name.startswith("lfm2"):
        heads = config["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads if kind != "conv" else 0 for kind in config["layer_types"]]
        found["rope.freq_base"] = float(scaling.get("rope_theta", 1e6))
    return {**found, **family.more(config)}


def _tensors(family: Family, config: Config, checkpoint: Path) -> Tensors:
    experts: dict[str, dict[int, torch.Tensor]] = {}
    tensors = {name: value for path in sorted(checkpoint.glob("*.safetensors")) for name, value in
               load_file(path).items()}  # fmt: skip
    for source, given in tensors.items():
        if source == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        for name, values in family.change(source, given, config):
            if match := EXPERT.match(name):
                experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
            elif match := HEAD_NORM.match(name):
                experts.setdefault(f"{match[1]}.weight", {})[int(match[2])] = values
            elif match := re.match(r"(.*\.mlp\.experts)\.gate_up_proj$", name):
                gates, ups = values.chunk(2, dim=1)
                yield f"{match[1]}.gate_proj.weight", gates
                yield f"{match[1]}.up_proj.weight", ups
            elif name.endswith(".mlp.experts.down_proj"):
                yield f"{name}.weight", values
            else:
                yield name, values
    for name, parts in experts.items():
        # Mixtral's and LFM2's are known to the converter by the names that it gives them while it stacks them.
        known = re.sub(r"^model\.(layers\.\d+)\.(block_sparse_moe|feed_forward)\.", r"\1.feed_forward.", name)
        yield known if family.name in ("llama", "lfm2moe") else name, torch.stack([parts[i] for i in range(len(parts))])


def _rope_factors(config: Config) -> dict[str, list[float]]:
    scaling = rope(config)
    if scaling.get("rope_type") == "proportional":
        num_pairs = of_full_layers(config, "global_head_dim", "head_dim") // 2
        num_rotated = int(num_pairs * scaling["partial_rotary_factor"])
        return {"rope_freqs.weight": [1.0] * num_rotated + [1e30] * (num_pairs - num_rotated)}
    if scaling.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{kind}.weight": scaling[f"{kind}_factor"] for kind in ("long", "short")}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def rewrite(path: Path, changed: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write a float32 file anew, with other tensors."""
    given = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(changed, given.fields["general.architecture"].contents())
    for key, found in given.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            _add(writer, key, found.contents())
    tensors = {one.name: torch.from_numpy(one.data.copy()) for one in given.tensors}
    for name, values in change(tensors).items():
        writer.add_tensor(name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_pairs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gates and ups of all experts as one tensor."""
    for name in [name for name in tensors if ".ffn_gate_exps." in name]:
        gates, ups = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = torch.cat([gates, ups], dim=1)
    return tensors


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor for each expert."""
    for name in [name for name in tensors if "_exps." in name]:
        for expert, values in enumerate(tensors.pop(name)):
            tensors[name.replace("_exps.", f".{expert}.")] = values
    return tensors

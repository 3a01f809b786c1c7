"""How llama.cpp's converter writes the families of `families.cases` as GGUF: what it does to tensors, and its keys.

Written after its sources, and independent of `quire.models.gguf`. Files are written by `gguf_family_files`; quantized
files of the common families by `gguf_files`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Config = dict[str, Any]
Tensors = Iterator[tuple[str, torch.Tensor]]
# (name in the checkpoint, numbers, config) -> names that the `gguf` package knows or that begin with "=", and numbers.
Change = Callable[[str, torch.Tensor, Config], Tensors]


def as_it_is(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """No difference."""
    yield name, values


def pairs(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """The halves of a head's rotated rows in turns: pairs become neighbours."""
    for end, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if re.search(rf"\.{end}\.(weight|bias)$", name):
            halves = values.reshape(config[heads], 2, -1, *values.shape[1:])
            values = halves.transpose(1, 2).reshape(values.shape)
    yield name, values


def whole_gains(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Gains that are stored less one are made whole."""
    yield name, values + 1 if name.endswith(("norm.weight", "layernorm.weight")) else values


def transposed(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """GPT-2's matrices."""
    is_matrix = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
    yield name, values.t() if is_matrix else values


def by_head(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """[head][query, key, value] -> queries, keys, values (GPT-NeoX, BLOOM)."""
    if "query_key_value" in name:
        heads = config.get("num_attention_heads") or config["n_head"]
        values = values.reshape(heads, 3, -1, *values.shape[1:]).transpose(0, 1).reshape(values.shape)
    yield name.removeprefix("transformer."), values


def by_group(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """[key/value head][its queries, key, value] -> queries, keys, values (Falcon)."""
    if "query_key_value" in name:
        heads = config["num_attention_heads"]
        groups = (config.get("num_kv_heads") or heads) if config.get("new_decoder_architecture") else 1
        parts = values.reshape(groups, heads // groups + 2, config["hidden_size"] // heads, *values.shape[1:])
        split = (parts[:, :-2], parts[:, -2], parts[:, -1])
        values = torch.cat([part.reshape(-1, *values.shape[1:]) for part in split])
    yield name, values


def granite_moe(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Gates and ups of all experts apart."""
    if name.endswith("block_sparse_moe.input_linear.weight"):
        layer = name.split(".")[2]
        gates, ups = values.chunk(2, dim=1)
        yield f"=blk.{layer}.ffn_gate_exps.weight", gates
        yield f"=blk.{layer}.ffn_up_exps.weight", ups
        return
    yield from pairs(name, values, config)


def gpt_oss(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Gates and ups, which take turns, apart; matrices [output_size, input_size]."""
    if name.endswith("sinks"):
        yield f"{name}.weight", values
    elif match := re.match(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?$", name):
        stem, end = match[1], "bias" if match[3] else "weight"
        wide = values if match[3] else values.transpose(1, 2)
        if match[2] == "down_proj":
            yield f"{stem}.down_proj.{end}", wide
        else:
            yield f"{stem}.gate_proj.{end}", wide[:, ::2]
            yield f"{stem}.up_proj.{end}", wide[:, 1::2]
    else:
        yield name, values


def mamba(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Decays themselves; the convolution without its dimension of one."""
    if name.endswith(".A_log"):
        values = -values.exp()
    yield name, values.squeeze(1) if "conv1d.weight" in name else values


def mamba2(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Heads' numbers as columns, the norm by group."""
    ((name, values),) = mamba(name, values, config)
    if name.endswith((".A_log", ".D")):
        values = values[:, None]
    elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        values = values.view(config["n_groups"], -1)
    yield re.sub(r"\.dt_bias$", ".dt_proj.bias", name), values


def gemma4(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Factors have names of their own."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"=blk.{layer}.ffn_gate_inp.scale", values
    elif name.endswith("router.per_expert_scale"):
        yield f"=blk.{layer}.ffn_down_exps.scale", values
    elif name.endswith("layer_scalar") or re.search(r"\.experts\.(gate_up_proj|down_proj)$", name):
        yield f"{name}.weight", values
    else:
        yield name, values


def short_conv(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """The convolution without its dimension of one."""
    yield name.replace(".expert_bias", ".expert_bias.bias"), values.squeeze(1) if "conv.conv" in name else values


def qwen3_next(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Queries, keys and values in one tensor, output gates in another."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("in_proj_qkvz.weight"):
        heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
        size = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
        parts = values.view(heads, -1, values.shape[1]).split([keys, keys, size, size], dim=1)
        query, key, value, gate = (part.reshape(-1, values.shape[1]) for part in parts)
        yield f"=blk.{layer}.attn_qkv.weight", torch.cat([query, key, value])
        yield f"=blk.{layer}.attn_gate.weight", gate
        return
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    ((name, values),) = mamba(name, values, config)
    yield re.sub(r"\.dt_bias$", ".dt_proj.bias", name), values


def qwen3_5(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """The first value heads of all key heads, then the second ones."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * keys * config["linear_key_head_dim"]

    def tiled(rows: torch.Tensor, num: int = heads) -> torch.Tensor:
        by_head = rows.reshape(keys, num // keys, rows.shape[0] // num, *rows.shape[1:])
        return by_head.transpose(0, 1).reshape(rows.shape)

    if ".linear_attn." in name:
        end = name.rpartition(".linear_attn.")[2]
        if end in ("in_proj_qkv.weight", "conv1d.weight"):
            values = torch.cat([values[:first], tiled(values[first:])])
        elif end in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            values = tiled(values)
        elif end == "out_proj.weight":
            values = tiled(values.t().contiguous()).t()
    yield from qwen3_next(name, values, config)


def granite_hybrid(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """Mamba 2, mixtures with a shared expert, reordered rows of attention."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gates, ups = values.chunk(2)
        yield f"=blk.{layer}.ffn_gate_shexp.weight", gates
        yield f"=blk.{layer}.ffn_up_shexp.weight", ups
    elif ".mamba." in name:
        yield from mamba2(name, values, {"n_groups": config["mamba_n_groups"]})
    else:
        yield from granite_moe(name, values, config)


def deepseek(name: str, values: torch.Tensor, config: Config) -> Tensors:
    """What latents are projected to: keys, transposed, and values."""
    if name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, own = values.view(config["num_attention_heads"], sum(sizes), -1).split(sizes, dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), own
        return
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


@dataclass(frozen=True)
class Family:
    """How the converter writes a family.

    Attributes:
        name: `general.architecture`.
        change: what it does to a tensor.
        keys: field of config.json -> key without the architecture, beside the common ones.
        more: further keys.
    """

    name: str
    change: Change = as_it_is
    keys: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Config], Mapping[str, Any]] = lambda config: {}


GRANITE = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
}  # fmt: skip
SSM = {"conv_kernel": "ssm.conv_kernel", "state_size": "ssm.state_size"}
DELTA_NET = {
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
}  # fmt: skip
GPT2 = {"n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count",
        "n_positions": "context_length"}  # fmt: skip


WINDOWS = "attention.sliding_window_pattern"


def window_pattern(config: Config) -> dict[str, Any]:
    """Which layers have windows."""
    return {WINDOWS: [kind == "sliding_attention" for kind in config["layer_types"]]}


def rope(config: Config) -> dict[str, Any]:
    """The rotary parameters of layers without windows."""
    parameters = config.get("rope_parameters") or {}
    return {**parameters.get("full_attention", parameters)}


def rotated(config: Config, share: float = 1.0) -> dict[str, Any]:
    """`rope.dimension_count`."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope.dimension_count": int(size * rope(config).get("partial_rotary_factor", share))}


def of_full_layers(config: Config, name: str, field: str) -> Any:
    """What Gemma 4's layers without windows have, which newer configs say by layer."""
    by_layer = (config.get("per_layer_config") or {}).values()
    return next((own[field] for own in by_layer if field in own), config.get(name))


def gemma4_keys(config: Config) -> dict[str, Any]:
    """What differs between layers with a window and without."""
    num_layers, size = config["num_hidden_layers"], config["intermediate_size"]
    first_shared = num_layers - config["num_kv_shared_layers"]
    head_size = of_full_layers(config, "global_head_dim", "head_dim")
    keys = {
        "attention.key_length": head_size, "attention.value_length": head_size,
        "attention.key_length_swa": config["head_dim"], "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"], **window_pattern(config),
    }  # fmt: skip
    if config.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [size if layer < first_shared else 2 * size for layer in range(num_layers)]
    full_heads = of_full_layers(config, "num_global_key_value_heads", "num_key_value_heads")
    if full_heads:
        counts = (full_heads, config["num_key_value_heads"])
        keys["attention.head_count_kv"] = [counts[windowed] for windowed in window_pattern(config)[WINDOWS]]
    return keys


def delta_net(config: Config) -> dict[str, Any]:
    """Sizes of Gated DeltaNet."""
    return {
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config.get("full_attention_interval", 4), **rotated(config, 0.25),
    }  # fmt: skip


def granite_hybrid_keys(config: Config) -> dict[str, Any]:
    """Which layers have attention; those of models with states are not rotated."""
    kinds = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] if kind else 0 for kind in kinds],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"], "rope.scaling.finetuned": False,
    }  # fmt: skip


def deepseek_keys(config: Config) -> dict[str, Any]:
    """Sizes of heads, before and after they are projected from the latent."""
    latent, rope_size = config["kv_lora_rank"], config["qk_rope_head_dim"]
    weight = rope(config).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1, "attention.key_length": latent + rope_size, "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_size, "rope.dimension_count": rope_size,
        **({} if weight is None else {"rope.scaling.yarn_log_multiplier": 0.1 * weight}),
    }  # fmt: skip


SHARED = {
    "n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
}  # fmt: skip
DEEPSEEK = {
    **SHARED, "q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
}  # fmt: skip
GRANITE_STATES = {
    **GRANITE, "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size", "mamba_n_heads":
    "ssm.time_step_rank", "mamba_n_groups": "ssm.group_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", pairs, more=rotated),
    "mistral": Family("llama", pairs, more=rotated),
    "mixtral": Family("llama", pairs, more=rotated),
    "ministral3": Family(
        "mistral3", pairs,
        more=lambda config: {
            **rotated(config), "attention.temperature_scale": rope(config)["llama_4_scaling_beta"],
            "rope.scaling.yarn_log_multiplier": rope(config)["mscale_all_dim"],
        },
    ),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", whole_gains),
    "gemma2": Family("gemma2", whole_gains, CAPS),
    "gemma3": Family(
        "gemma3", whole_gains, CAPS,
        more=lambda config: {
            **window_pattern(config), "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"]
        },
    ),
    "gemma4": Family("gemma4", gemma4, CAPS, gemma4_keys),
    "gemma4_moe": Family("gemma4", gemma4, {**CAPS, "top_k_experts": "expert_used_count"}, gemma4_keys),
    "phi3": Family("phi3", keys={"sliding_window": "attention.sliding_window"}, more=rotated),
    "granite": Family("granite", pairs, GRANITE, rotated),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo2", keys=CAPS, more=window_pattern),
    "smollm3": Family("smollm3", pairs, more=rotated),
    "glm4": Family("glm4", more=lambda config: rotated(config, 0.5)),
    "cohere": Family("command-r", keys={"logit_scale": "logit_scale"}, more=lambda _: {"rope.scaling.type": "none"}),
    "cohere_plus": Family("command-r", keys={"logit_scale": "logit_scale"}),
    "cohere2": Family("cohere2", keys={"logit_scale": "logit_scale", **CAPS}, more=window_pattern),
    "stablelm": Family("stablelm", more=lambda config: rotated(config, 0.25)),
    "stablelm_12b": Family("stablelm", more=lambda config: rotated(config, 0.25)),
    "starcoder2": Family("starcoder2"),
    "exaone4": Family("exaone4", keys=CAPS, more=window_pattern),
    "arcee": Family("arcee", pairs, more=rotated),
    "nemotron": Family("nemotron", whole_gains, more=lambda config: rotated(config, 0.5)),
    "seed_oss": Family("seed_oss"),
    "ernie4_5": Family("ernie4_5"),
    "qwen2_moe": Family("qwen2moe"),
    "qwen3_moe": Family("qwen3moe"),
    "olmoe": Family("olmoe"),
    "phimoe": Family("phimoe", more=rotated),
    "granitemoe": Family("granitemoe", granite_moe, GRANITE, rotated),
    "gpt_oss": Family("gpt-oss", gpt_oss, {**CAPS, "intermediate_size": "expert_feed_forward_length"}),
    "glm4_moe": Family("glm4moe", deepseek, SHARED, lambda config: rotated(config, 0.5)),
    "deepseek_v2": Family("deepseek2", deepseek, DEEPSEEK, deepseek_keys),
    "deepseek_v3": Family("deepseek2", deepseek, DEEPSEEK, deepseek_keys),
    "glm4_moe_lite": Family("deepseek2", deepseek, DEEPSEEK, deepseek_keys),
    "granite_hybrid": Family("granitehybrid", granite_hybrid, GRANITE_STATES, granite_hybrid_keys),
    "mamba": Family(
        "mamba", mamba, {**SSM, "intermediate_size": "ssm.inner_size", "time_step_rank": "ssm.time_step_rank"}
    ),
    "falcon_mamba": Family(
        "mamba", mamba, {**SSM, "intermediate_size": "ssm.inner_size", "time_step_rank": "ssm.time_step_rank"},
        lambda _: {"ssm.dt_b_c_rms": True},
    ),
    "mamba2": Family(
        "mamba2", mamba2, {**SSM, "num_heads": "ssm.time_step_rank", "n_groups": "ssm.group_count"},
        lambda config: {"ssm.inner_size": config["expand"] * config["hidden_size"]},
    ),
    "lfm2": Family("lfm2", short_conv, {"conv_L_cache": "shortconv.l_cache"}),
    "lfm2_moe": Family(
        "lfm2moe", short_conv,
        {"conv_L_cache": "shortconv.l_cache", "num_dense_layers": "leading_dense_block_count"},
    ),
    "qwen3_5": Family("qwen35", qwen3_5, DELTA_NET, delta_net),
    "qwen3_5_moe": Family("qwen35moe", qwen3_5, DELTA_NET, delta_net),
    "qwen3_next": Family("qwen3next", qwen3_next, DELTA_NET, delta_net),
    "gpt2": Family("gpt2", transposed, GPT2, lambda config: {"feed_forward_length": 4 * config["n_embd"]}),
    "gpt_neox": Family(
        "gptneox", by_head, {"use_parallel_residual": "use_parallel_residual"}, lambda config: rotated(config, 0.25)
    ),
    "falcon": Family(
        "falcon", by_group,
        more=lambda config: {
            "context_length": 2048, "feed_forward_length": 4 * config["hidden_size"],
            "attention.head_count_kv": config["num_kv_heads"] if config["new_decoder_architecture"] else 1,
        },
    ),
    "bloom": Family(
        "bloom", by_head, {"n_head": "attention.head_count", "n_layer": "block_count"},
        lambda config: {"context_length": 2048, "feed_forward_length": 4 * config["hidden_size"]},
    ),
    "mpt": Family(
        "mpt", keys={
            "d_model": "embedding_length", "n_layers": "block_count", "n_heads": "attention.head_count",
            "max_seq_len": "context_length",
        },
        more=lambda config: {
            "feed_forward_length": 4 * config["d_model"], "attention.layer_norm_epsilon": 1e-5,
            "attention.max_alibi_bias": 8.0,
        },
    ),
}  # fmt: skip
"""By the names in `families.cases`."""

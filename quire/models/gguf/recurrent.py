"""Architectures of GGUF files with recurrent layers: state spaces, short convolutions, Gated DeltaNet.

Source: llama.cpp, conversion/*.py and src/models/*.cpp of the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.model_arch import LayerArch, ModelArch
from quire.config.model_family import TensorNames
from quire.models.gguf.dense import granite_factors
from quire.models.gguf.family import GGUF_NAMES, GGUFFamily, num_layers_of
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.mixtures import dense_layers, expert_size, num_dense_layers, num_rows

FULL = "full_attention"
STATE_CHANGES: Mapping[str, str] = {
    "ssm_conv1d.weight": "channels", "ssm_a": "log_decay", "ssm_d": "squeezed", "ssm_norm.weight": "flat",
}  # fmt: skip


class Mamba(GGUFFamily):
    """Mamba 1, or Falcon-Mamba, which has norms on time step, B and C."""

    architecture = "MambaForCausalLM"
    norm_field = "layer_norm_epsilon"
    tensor_names = (
        (r"\.mamba\.in_proj\.", ".ssm_in."),
        (r"\.mamba\.conv1d\.", ".ssm_conv1d."),
        (r"\.mamba\.x_proj\.", ".ssm_x."),
        (r"\.mamba\.dt_proj\.", ".ssm_dt."),
        (r"\.mamba\.dt_bias$", ".ssm_dt.bias"),
        (r"\.mamba\.A_log$", ".ssm_a"),
        (r"\.mamba\.D$", ".ssm_d"),
        (r"\.mamba\.norm\.", ".ssm_norm."),
        (r"\.mamba\.out_proj\.", ".ssm_out."),
        *GGUF_NAMES,
    )
    changes: ClassVar[Mapping[str, str]] = STATE_CHANGES

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes of the state space."""
        fields: dict[str, object] = {
            "state_size": metadata.integer("ssm.state_size"),
            "intermediate_size": metadata.integer("ssm.inner_size"),
            "conv_kernel": metadata.integer("ssm.conv_kernel"),
            "time_step_rank": metadata.integer("ssm.time_step_rank"),
            "use_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
            "use_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        }
        if metadata.flag("ssm.dt_b_c_rms"):  # their epsilon is in no key, and not that of the other norms
            fields["architectures"] = ["FalconMambaForCausalLM"]
        return fields


class Mamba2(Mamba):
    """Mamba 2."""

    architecture = "Mamba2ForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The number of heads is called the rank of the time step."""
        num_heads = metadata.needed_integer("ssm.time_step_rank")
        inner_size, hidden_size = metadata.needed_integer("ssm.inner_size"), metadata.needed_integer("embedding_length")
        if num_heads < 1 or hidden_size < 1 or inner_size % num_heads or inner_size % hidden_size:
            key = metadata.key("ssm.inner_size")
            raise metadata.error(
                key, f"is {inner_size}", "it must be a multiple of embedding_length and ssm.time_step_rank"
            )
        return {
            **super().fields(metadata),
            "intermediate_size": None,
            "time_step_rank": None,
            "expand": inner_size // hidden_size,
            "num_heads": num_heads,
            "head_dim": inner_size // num_heads,
            "n_groups": metadata.integer("ssm.group_count"),
        }


class GraniteHybrid(Mamba2):
    """Granite 4: Mamba 2 in those layers that have no key/value heads, an MLP in all, experts with it or not."""

    architecture = "GraniteMoeHybridForCausalLM"
    norm_field = "rms_norm_eps"
    pairs_are_neighbours = True

    @classmethod
    def names(cls, arch: ModelArch) -> TensorNames:
        """With experts, the MLP is the shared one."""
        if all(layer.moe is None for layer in arch.layers):
            return cls.tensor_names
        return ((r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1_shexp."), *cls.tensor_names)

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes of the state space under Granite's names; rotation only where a key says so."""
        sizes = super().fields(metadata)
        num_kv_heads = metadata.per_layer("attention.head_count_kv", num_layers_of(metadata)) or []
        num_experts = metadata.integer("expert_count") or 0
        shared = metadata.integer("expert_shared_feed_forward_length")
        rotates = metadata.flag("rope.scaling.finetuned")
        return {
            "layer_types": ["attention" if count else "mamba" for count in num_kv_heads],
            "mamba_n_heads": sizes["num_heads"], "mamba_d_head": sizes["head_dim"], "mamba_expand": sizes["expand"],
            "mamba_d_state": sizes["state_size"], "mamba_n_groups": sizes["n_groups"],
            "mamba_d_conv": sizes["conv_kernel"],
            "mamba_conv_bias": any("ssm_conv1d.bias" in name for name in metadata.file.tensors),
            "mamba_proj_bias": any("ssm_in.bias" in name for name in metadata.file.tensors),
            "shared_intermediate_size": shared or metadata.one_for_all("feed_forward_length", num_layers_of(metadata)),
            "num_local_experts": num_experts,
            "position_embedding_type": "nope" if rotates is False else "rope", **granite_factors(metadata),
        }  # fmt: skip


class Lfm2(GGUFFamily):
    """Short convolutions in those layers that have no key/value heads; the last norm has the name of another."""

    architecture = "Lfm2ForCausalLM"
    norm_field = "norm_eps"
    tensor_names = (
        (r"\.conv\.in_proj\.", ".shortconv.in_proj."),
        (r"\.conv\.out_proj\.", ".shortconv.out_proj."),
        (r"\.conv\.conv\.", ".shortconv.conv."),
        (r"^model\.norm\.", "token_embd_norm."),
        *GGUF_NAMES,
    )
    changes: ClassVar[Mapping[str, str]] = {"shortconv.conv.weight": "channels"}

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Which layers have attention; the size of the feed-forward network as it is."""
        num_kv_heads = metadata.per_layer("attention.head_count_kv", num_layers_of(metadata)) or []
        return {
            "layer_types": [FULL if count else "conv" for count in num_kv_heads],
            "conv_L_cache": metadata.integer("shortconv.l_cache"),
            "conv_bias": metadata.has_tensor("blk.0.shortconv.conv.bias"),
            "block_auto_adjust_ff_dim": False,
        }


class Lfm2Moe(Lfm2):
    """Mixtures behind some dense layers."""

    architecture = "Lfm2MoeForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The first layers are dense."""
        return {
            **super().fields(metadata),
            "num_dense_layers": num_dense_layers(metadata),
            "use_expert_bias": any("exp_probs_b" in name for name in metadata.file.tensors),
        }


class Qwen35(GGUFFamily):
    """Qwen3.5 and 3.6: three Gated DeltaNet layers for each of gated attention.

    Where they have more value heads than key heads, converters store the value heads in another order: all first ones
    of a key head, then all second ones.
    """

    architecture = "Qwen3_5ForCausalLM"
    gains_are_whole = True
    tensor_names = (
        (r"\.linear_attn\.in_proj_qkv\.", ".attn_qkv."),
        (r"\.linear_attn\.in_proj_z\.", ".attn_gate."),
        (r"\.linear_attn\.in_proj_b\.", ".ssm_beta."),
        (r"\.linear_attn\.in_proj_a\.", ".ssm_alpha."),
        (r"\.linear_attn\.in_proj_ba\.", ".ssm_ba."),
        (r"\.linear_attn\.conv1d\.", ".ssm_conv1d."),
        (r"\.linear_attn\.A_log$", ".ssm_a"),
        (r"\.linear_attn\.dt_bias$", ".ssm_dt.bias"),
        (r"\.linear_attn\.norm\.", ".ssm_norm."),
        (r"\.linear_attn\.out_proj\.", ".ssm_out."),
        (r"\.ffn_norm\.", ".post_attention_norm."),
        *GGUF_NAMES,
    )
    changes: ClassVar[Mapping[str, str]] = {**STATE_CHANGES, "ffn_gate_inp_shexp.weight": "row"}
    values_are_tiled: ClassVar[bool] = True

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes of Gated DeltaNet."""
        num_value_heads = metadata.needed_integer("ssm.time_step_rank")
        if num_value_heads < 1:
            raise metadata.error(metadata.key("ssm.time_step_rank"), f"is {num_value_heads}", "it must be 1 or more")
        has_state = metadata.per_layer("attention.recurrent_layers", num_layers_of(metadata))
        types = None if has_state is None else ["linear_attention" if value else FULL for value in has_state]
        return {
            "layer_types": types,
            "full_attention_interval": metadata.integer("full_attention_interval"),
            "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
            "linear_key_head_dim": metadata.integer("ssm.state_size"),
            "linear_num_key_heads": metadata.integer("ssm.group_count"),
            "linear_num_value_heads": num_value_heads,
            "linear_value_head_dim": metadata.needed_integer("ssm.inner_size") // num_value_heads,
        }

    @classmethod
    def _stored_layer(cls, layer: LayerArch) -> LayerArch:
        layer = super()._stored_layer(layer)
        if layer.delta_net is None or not cls.values_are_tiled:
            return layer
        return dataclasses.replace(layer, delta_net=dataclasses.replace(layer.delta_net, values_are_tiled=True))


class Qwen35Moe(Qwen35):
    """With a mixture and a gated shared expert in every layer."""

    architecture = "Qwen3_5MoeForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes of the experts, of tensors where keys are absent."""
        dense = dense_layers(metadata)
        return {
            **super().fields(metadata),
            "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length")
            or num_rows(metadata, "ffn_up_shexp", dense),
            "moe_intermediate_size": expert_size(metadata),
            "mlp_only_layers": dense,
        }


class Qwen3Next(Qwen35Moe):
    """Value heads stay with their key heads; how much changes and stays is one tensor, by key head."""

    architecture = "Qwen3NextForCausalLM"
    layouts: ClassVar[Mapping[str, str]] = {"linear_attn.in_proj_ba": "by_group"}
    values_are_tiled = False

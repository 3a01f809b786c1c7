"""Models of state spaces alone: Mamba 1 and 2, and Falcon-Mamba."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.hf_config import (
    make_arch,
    read_intermediate_size,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_mamba import (
    make_mamba2,
    read_conv_size,
    read_inner_size,
    read_recurrent_length,
    read_state_size,
    read_time_step_range,
    read_time_step_rank,
)
from quire.config.model_arch import HeadArch, LayerArch, MambaArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily, TensorNames

BACKBONE_NAMES: TensorNames = (
    (r"\.(mixer_norm|ffn_norm)\.", ".norm."),
    (r"\.(mamba|self_attn|mlp|moe)\.", ".mixer."),
    (r"^model\.embed_tokens\.", "backbone.embeddings."),
    (r"^model\.norm\.", "backbone.norm_f."),
    (r"^model\.", "backbone."),
)


class Mamba(ModelFamily):
    """Layers of one norm and one mixer of Mamba 1. Source: Gu and Dao 2023 (Mamba), section 3.4."""

    tensor_names = BACKBONE_NAMES
    is_tied = True

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        config.text("hidden_act", ("silu", "swish"), "silu")
        norm = NormArch(eps=read_norm_eps(config, "layer_norm_epsilon", 1e-5))
        layer = LayerArch(mamba=cls.mixer(config), mixer_norm=norm)
        layers = [layer] * read_num_layers(config)
        return make_arch(config, layers, read_recurrent_length(config), head=HeadArch(norm=norm), is_tied=cls.is_tied)

    @classmethod
    def mixer(cls, config: FieldReader) -> MambaArch:
        """Of every layer."""
        return MambaArch(
            version=1,
            # Where both are there, transformers takes the size (falcon-mamba-7b: 8192, with an `expand` of 16).
            inner_size=(
                read_intermediate_size(config) if config.has("intermediate_size") else read_inner_size(config, "expand")
            ),
            state_size=read_state_size(config, "state_size", 16),
            conv_size=read_conv_size(config, "conv_kernel"),
            time_step_rank=read_time_step_rank(config, "time_step_rank"),
            conv_bias=config.flag("use_conv_bias", True),
            projection_bias=config.flag("use_bias", False),
            parameter_norm=cls.parameter_norm(config),
        )

    @classmethod
    def parameter_norm(cls, config: FieldReader) -> NormArch | None:
        """On time step, B and C."""
        return None


class FalconMamba(Mamba):
    """With norms, without gains, on time step, B and C. Source: Zuo et al. 2024 (Falcon Mamba), section 3.1."""

    @classmethod
    def parameter_norm(cls, config: FieldReader) -> NormArch | None:
        """On time step, B and C."""
        return NormArch(eps=read_norm_eps(config, "mixer_rms_eps"), has_gain=False)


class Mamba2(Mamba):
    """Mixers of Mamba 2. Source: Dao and Gu 2024 (Mamba-2), section 7.1."""

    is_tied = False

    @classmethod
    def mixer(cls, config: FieldReader) -> MambaArch:
        """Of every layer."""
        return make_mamba2(
            config,
            inner_size=read_inner_size(config, "expand"),
            num_heads=("num_heads", 128),
            head_size="head_dim",
            groups=("n_groups", 8),
            state=("state_size", 128),
            conv_size="conv_kernel",
            norm=NormArch(eps=read_norm_eps(config, "layer_norm_epsilon", 1e-5)),
            has_bias=config.flag("use_bias", False),
            conv_bias=config.flag("use_conv_bias", True),
            time_step_range=read_time_step_range(config),
        )

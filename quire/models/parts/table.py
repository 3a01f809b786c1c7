"""Which class builds which part of a layer, and the part's name among the layer's modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.models.parts.attention import AttentionPart
from quire.models.parts.delta_net import GatedDeltaNetPart
from quire.models.parts.latent_attention import LatentAttentionPart
from quire.models.parts.mamba import mamba_part
from quire.models.parts.mlp import MLPPart
from quire.models.parts.moe import MoEPart
from quire.models.parts.part import Part
from quire.models.parts.short_conv import ShortConvPart

PartTable = Mapping[str, tuple[str, Callable[[Any, Any, int, str], Part]]]
"""Field of `LayerArch` -> (name of the module, class)."""

MIXERS: PartTable = {
    "attention": ("self_attn", AttentionPart),
    "delta_net": ("linear_attn", GatedDeltaNetPart),
    "short_conv": ("conv", ShortConvPart),
    "latent_attention": ("self_attn", LatentAttentionPart),
    "mamba": ("mamba", mamba_part),
}
FEED_FORWARDS: PartTable = {
    "mlp": ("mlp", MLPPart),
    "moe": ("moe", MoEPart),
}

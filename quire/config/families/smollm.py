"""SmolLM3: a Llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.llama import Llama, with_layers
from quire.config.hf_config import read_num_layers, read_windows
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import LayerArch, ModelArch


class SmolLM3(Llama):
    """Source: Hugging Face 2025 (SmolLM3), as released."""

    defaults: ClassVar[Mapping[str, object]] = {"rope_theta": 2e6}
    is_tied = True

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        has_rope = _has_rope(FieldReader(raw))

        def without_rope(layer_idx: int, layer: LayerArch) -> LayerArch:
            if has_rope[layer_idx] or layer.attention is None:
                return layer
            return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rope=None))

        return with_layers(super().parse(raw), without_rope)

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Of layers without rotary embedding, where they are switched on."""
        if not config.flag("use_sliding_window", False):
            return (None,) * num_layers
        if config.has("layer_types"):
            return read_windows(config, num_layers, 1, default=None)
        window = read_windows(FieldReader({**config.raw, "layer_types": ["sliding_attention"]}), 1, 1, default=None)[0]
        return tuple(None if rope else window for rope in _has_rope(config))


def _has_rope(config: FieldReader) -> tuple[bool, ...]:
    """Per layer: `no_rope_layers` has a 1 for those that have it."""
    num_layers = read_num_layers(config)
    flags = config.integers("no_rope_layers", 0, 1)
    if not flags:
        interval = config.integer("no_rope_layer_interval", 1, 1 << 16, 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(flags) != num_layers:
        raise config.error("no_rope_layers", f"names {len(flags)} layers", f"num_hidden_layers is {num_layers}")
    return tuple(map(bool, flags))

"""What a model that drafts takes beside its target: weights, pages, workspace. Pure, but for headers of files.

Called by `engine.memory_estimate`. A draft model is read as any model is. Of heads that have files of their own these
are counted; a head has the pages of one attention layer of the target, but for Medusa's, which keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from quire.config.model_arch import ModelArch
from quire.config.speculative import SpeculativeConfig
from quire.core.kv_spec import KVCacheSpec
from quire.core.memory_budget import StepLimits, estimate_weights_bytes, estimate_workspace_bytes
from quire.models.model_dir import read_model_dir
from quire.models.stored_weights import read_weights
from quire.simulator.mixers import cache_specs, of_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingNeed:
    """What is added: bytes of weights and of the workspace of its own steps; layer -> what it keeps in the cache."""

    weights: int = 0
    workspace: int = 0
    specs: dict[str, KVCacheSpec] = field(default_factory=dict)


def drafting_need(
    speculative: SpeculativeConfig | None,
    path: Path | None,
    target: ModelArch,
    limits: StepLimits,
    block_size: int,
    item_bytes: int,
    quantization: str | None,
) -> DraftingNeed:
    """What the configured drafting model takes; nothing where there is none.

    Args:
        path: of the draft model or of the heads; None = the target's own.
        item_bytes, quantization: of the target, in which a draft model is stored, too.

    Raises:
        ModelError: there is no such model.
        WeightsError: heads have no weights that can be opened.
    """
    method = None if speculative is None else speculative.model_method
    if method is None:
        return DraftingNeed()
    if method == "draft_model" and path is not None:
        arch = read_model_dir(path).arch()
        return DraftingNeed(
            weights=estimate_weights_bytes(arch, limits.max_model_len, item_bytes, quantization),
            workspace=estimate_workspace_bytes(arch, limits, item_bytes),
            specs=of_drafts(cache_specs(arch, block_size, item_bytes)),
        )
    layer_bytes = target.num_layer_weights // target.num_layers * item_bytes
    weights = layer_bytes if path is None else read_weights(path).num_bytes
    attention = [one for one in cache_specs(target, block_size, item_bytes).items() if one[1].keeps_sequence]
    return DraftingNeed(weights=weights, specs={} if method == "medusa" else of_drafts(dict(attention[-1:])))

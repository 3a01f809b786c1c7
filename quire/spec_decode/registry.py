"""From `speculative_config` to what the scheduler is given: a proposer of drafts, and the controller of how many count.

Called by the engine core's factory, once.
"""

from __future__ import annotations

from quire.config.speculative import SpeculativeConfig
from quire.core.drafts import DraftController, DraftProposer
from quire.errors import UnsupportedError
from quire.spec_decode.chained import ChainedProposer
from quire.spec_decode.controller import SpeculationController
from quire.spec_decode.ngram import NgramProposer
from quire.spec_decode.suffix import SuffixProposer


def make_proposer(config: SpeculativeConfig, of_model: DraftProposer | None) -> DraftProposer:
    """The proposer of the methods asked for; of two, the second is asked where the first has nothing.

    Args:
        of_model: that of `config.model_method`; None = no model drafts.

    Raises:
        UnsupportedError: there is no such acceptance.
    """
    if config.acceptance != "sampled":
        raise UnsupportedError(
            f"speculative_config: acceptance {config.acceptance} is not available yet",
            hint="leave it out: answers are then the same bytes as those without drafts",
            field="speculative_config",
        )
    made: dict[str, DraftProposer] = {}
    if "suffix" in config.method:
        made["suffix"] = suffix = _suffix(config)
    if "ngram" in config.method:
        made["ngram"] = _ngram(config, suffix if "suffix" in made else None)
    if of_model is not None:
        made[of_model.name] = of_model
    first, *others = (made[name] for name in config.method)
    return ChainedProposer(first, others[0]) if others else first


def _ngram(config: SpeculativeConfig, suffix: SuffixProposer | None) -> DraftProposer:
    """Beside `suffix` with its index, if contexts there are long enough."""
    assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None, "resolved by the config"
    is_shared = suffix is not None and config.suffix_decoding_max_tree_depth >= config.prompt_lookup_max
    histories = suffix.histories if suffix is not None and is_shared else None
    return NgramProposer(config.num_tokens, config.prompt_lookup_min, config.prompt_lookup_max, histories)


def _suffix(config: SpeculativeConfig) -> SuffixProposer:
    return SuffixProposer(
        config.num_tokens,
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_cached_bytes=config.suffix_store_bytes,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
        share_answers=config.suffix_share_tenants,
    )


def make_controller(config: SpeculativeConfig) -> DraftController | None:
    """What decides how many drafts a step verifies; None = all that are proposed, as asked for."""
    return SpeculationController(config.num_tokens) if config.enable_adaptive_verification else None

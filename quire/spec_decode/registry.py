"""From `speculative_config` to what the scheduler is given: a proposer of drafts, and the controller of how many count.

Called by the engine core's factory, once.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.config.speculative import SpeculativeConfig
from quire.core.drafts import DraftProposer
from quire.core.speculation_stats import SpeculationStats
from quire.spec_decode.chained import ChainedProposer
from quire.spec_decode.controller import SpeculationController
from quire.spec_decode.ngram import NgramProposer
from quire.spec_decode.suffix import SuffixProposer


def make_proposer(config: SpeculativeConfig, of_model: DraftProposer | None) -> DraftProposer:
    """The proposer of the methods asked for; of two, the second is asked where the first has nothing.

    Args:
        of_model: that of `config.model_method`; None = no model drafts.
    """
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


def make_controller(config: SpeculativeConfig, clock: Callable[[], float]) -> SpeculationController | None:
    """What decides how many drafts a step verifies; None = all that are proposed, as asked for.

    Args:
        clock: seconds, for what steps and drafting take.
    """
    return SpeculationController(config.num_tokens, clock) if config.enable_adaptive_verification else None


def stats_reader(proposer: DraftProposer, controller: SpeculationController | None) -> Callable[[], SpeculationStats]:
    """A function that says what was decided so far, and what past texts take."""
    parts = proposer.parts if isinstance(proposer, ChainedProposer) else (proposer,)
    # Of two that draft from history the first has the index, or an own one that is the larger by far.
    histories = next((part for part in parts if isinstance(part, SuffixProposer | NgramProposer)), None)

    def read() -> SpeculationStats:
        decided = None if controller is None else controller.stats()
        if histories is None:
            return SpeculationStats(controller=decided)
        held = histories.stats()
        return SpeculationStats(
            controller=decided, history_bytes=held.num_request_bytes, store_bytes=held.num_store_bytes,
            num_stored=held.num_store_answers,
        )  # fmt: skip

    return read


def describe(config: SpeculativeConfig) -> str:
    """What drafts, for the log: "suffix, else draft_model (leaf); at most 4 draft tokens per request and step"."""
    names = [f"{name} ({config.model or 'its own heads'})" if name == config.model_method else name for name in
             config.method]  # fmt: skip
    all_of_them = "" if config.enable_adaptive_verification else ", all of which are verified"
    by = "" if config.acceptance == "sampled" else f"; acceptance {config.acceptance}"
    return f"{', else '.join(names)}; at most {config.num_tokens} draft tokens per request and step{all_of_them}{by}"

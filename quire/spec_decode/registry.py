"""From `speculative_config` to what the scheduler is given: a proposer of drafts, and the controller of how many count.

Called by the engine core's factory, once. A new method of tokens from tokens is one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.config.speculative import SpeculativeConfig
from quire.core.drafts import DraftController, DraftProposer
from quire.errors import UnsupportedError
from quire.spec_decode.controller import SpeculationController

HISTORY_PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], DraftProposer]] = {}


def make_proposer(config: SpeculativeConfig, of_model: DraftProposer | None) -> DraftProposer:
    """The proposer of the methods asked for.

    Args:
        of_model: that of `config.model_method`; None = no model drafts.

    Raises:
        UnsupportedError: there is no proposer of a method, or no such acceptance.
    """
    if config.acceptance != "sampled":
        raise _not_yet(
            f"acceptance {config.acceptance}", "leave it out: answers are then the same bytes as those without drafts"
        )
    missing = [name for name in config.history_methods if name not in HISTORY_PROPOSERS]
    if missing:
        raise _not_yet(f"method {', '.join(missing)}", "leave it out: answers are the same without drafts")
    proposers = [HISTORY_PROPOSERS[name](config) for name in config.history_methods]
    if of_model is not None:
        proposers.append(of_model)
    if len(proposers) > 1:
        raise _not_yet(f"a chain of methods ({', '.join(config.method)})", "name one")
    return proposers[0]


def make_controller(config: SpeculativeConfig) -> DraftController | None:
    """What decides how many drafts a step verifies; None = all that are proposed, as asked for."""
    return SpeculationController(config.num_tokens) if config.enable_adaptive_verification else None


def _not_yet(what: str, hint: str) -> UnsupportedError:
    return UnsupportedError(f"speculative_config: {what} is not available yet", hint=hint, field="speculative_config")

"""What of a request is not written down: texts, and what only the sampler reads. Prompts are token ids. Pure."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from quire.core.engine_messages import EngineCoreRequest
from quire.core.sampling_params import SamplingParams

LEFT_OUT = (
    "stop", "bad_words", "bad_words_token_ids", "extra_args", "logit_bias", "allowed_token_ids", "structured_outputs",
)  # fmt: skip


def without_texts(params: Any) -> Any:
    """Sampling parameters as they are recorded; any other value as it is."""
    if not isinstance(params, SamplingParams):
        return params
    params = copy.copy(params)
    for name in LEFT_OUT:
        setattr(params, name, None)
    return params


def as_recorded(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request as it is recorded."""
    return dataclasses.replace(request, sampling_params=without_texts(request.sampling_params))

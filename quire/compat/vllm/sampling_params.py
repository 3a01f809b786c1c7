"""vLLM's `sampling_params`."""

from __future__ import annotations

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import GUIDED, REPETITION
from quire.core.beam_search import BeamSearchParams
from quire.core.sampling_params import RequestOutputKind, SamplingParams, SamplingType
from quire.core.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "SamplingType", "StructuredOutputsParams"]

__getattr__ = module_getattr(
    __name__, absent_names={"RepetitionDetectionParams": REPETITION, "GuidedDecodingParams": GUIDED}
)

"""AdapterLogitsProcessor: a function of one request's logits for each request that wants one."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from quire.compat.vllm.v1.sample.logits_processor.builtin import process_dict_updates
from quire.compat.vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from quire.core.sampling_params import SamplingParams

# (output, logits) or (prompt, output, logits) -> logits; [vocab_size].
RequestLogitsProcessor = Callable[..., torch.Tensor]


class AdapterLogitsProcessor(LogitsProcessor):
    """Base of processors that treat each request alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with `params`; None = its logits stay."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep a function for each request that has one."""
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Each function changes its request's line."""
        for place, change in self.req_info.items():
            logits[place] = change(logits[place])
        return logits

    def _bound(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        found = self.new_req_logits_processor(params)
        if found is None:
            return None
        takes_prompt = len(inspect.signature(found).parameters) == 3
        return functools.partial(found, prompt, output) if takes_prompt else functools.partial(found, output)

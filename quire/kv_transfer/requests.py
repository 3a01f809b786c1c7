"""What the scheduler's half of a connector is shown of requests and steps: views that cost nothing until they are read.

Made by `scheduler.connector_tier`. A view may be kept while its request lives; a step's only during the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.core.request import Request, RequestStatus
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import SchedulerOutput


class ConnectorRequest:
    """One request, under vLLM's names."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        """Unique within the engine."""
        return self._request.unique_id

    @property
    def external_req_id(self) -> str:
        """The user's name of it; not unique."""
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Its prompt."""
        ids: list[int] = self._request.message.prompt_token_ids.tolist()
        return ids

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output: as of when it last had no row, and, when it ends, those that were computed."""
        ids: list[int] = self._request.token_ids.tolist()
        return ids

    @property
    def num_tokens(self) -> int:
        """Length of `all_token_ids`."""
        return len(self._request.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._request.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Most tokens of its output."""
        return self._request.message.sampling_params.max_tokens or 0

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Names of its full blocks, 32 bytes each: equal in every engine for equal tokens, salt and adapter.

        As far as they are known: of the prompt from the first call on, of the output when it ends.
        """
        return self._request.block_hashes

    @property
    def cache_salt(self) -> str | None:
        """Part of the names of its blocks."""
        return self._request.message.cache_salt

    @property
    def is_aborted(self) -> bool:
        """Whether its client wants no response any longer."""
        return self._request.status is RequestStatus.FINISHED_ABORTED

    @property
    def sampling_params(self) -> SamplingParams:
        """As the input processor made them."""
        return self._request.message.sampling_params

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """What the client sent for the connector; empty = nothing."""
        extra = self._request.message.sampling_params.extra_args or {}
        params: Mapping[str, Any] = extra.get("kv_transfer_params") or {}
        return params


class ScheduledRequest(NamedTuple):
    """A request in a step.

    Attributes:
        request: whose row it is.
        block_ids: all blocks of the row, in order.
        num_computed_tokens: whose keys and values are final before the step; blocks that are full with them may be
            saved. What the step itself computes may be drafts that are rejected.
        num_scheduled_tokens: that the step computes behind them.
        is_new: it was placed on the row by this step.
    """

    request: ConnectorRequest
    block_ids: list[int]
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class ConnectorStep:
    """A scheduled step, as `build_connector_meta` is given it.

    Attributes:
        output: the engine's own message; its fields may change with any version.
        request_on: the request of a row.
        block_ids_on: the blocks of a row.
    """

    output: SchedulerOutput
    request_on: Callable[[int], Request]
    block_ids_on: Callable[[int], np.ndarray]

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """The requests of the step, in the order of the batch."""
        out = self.output
        new_rows = {request.row for request in out.new_reqs}
        numbers = zip(
            out.rows.tolist(), out.num_computed_tokens.tolist(), out.num_scheduled_tokens.tolist(), strict=True
        )
        return [
            ScheduledRequest(
                ConnectorRequest(self.request_on(row)), self.block_ids_on(row).tolist(), num_computed, num_scheduled,
                row in new_rows,
            )
            for row, num_computed, num_scheduled in numbers
        ]  # fmt: skip

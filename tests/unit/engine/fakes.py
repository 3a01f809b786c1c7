"""A pretended engine core: answers are given by a function of the request, one token per request and step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from quire.config import CacheConfig, ModelConfig, QuireConfig
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.stats import EventKind, RequestEvent, SchedulerStats
from quire.engine.core_client.base import EngineCoreClient
from quire.engine.generation_defaults import GenerationDefaults
from quire.engine.input_processor import InputLimits, InputProcessor
from quire.engine.llm_engine import LLMEngine
from quire.engine.parts import EngineParts, FrontEndParts
from quire.errors import ValidationError
from quire.tokenization.chat_template import ChatTemplate
from tests.models.checkpoints import CHAT_TEMPLATE
from tests.unit.tokenization.vocabularies import tokenizer_of

EOS = 1
TOKENIZER = tokenizer_of("byte-level")
Answer = Callable[[EngineCoreRequest], list[int]]


def ids(text: str) -> list[int]:
    """Token ids of plain text."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def echo(request: EngineCoreRequest) -> list[int]:
    """The prompt again (without its BOS), then EOS."""
    return [*(i for i in request.prompt_token_ids.tolist() if i > 3), EOS]


class FakeClient(EngineCoreClient):
    """An engine core that runs every request in each step.

    Attributes:
        requests: every message that came, in order.
        live: handle -> (message, tokens still to come).
        aborted: handles whose end was asked for.
        fails_at_step: raise in that step.
        max_prompt: longer prompts are refused.
    """

    def __init__(self, answer: Answer = echo) -> None:
        self.answer = answer
        self.requests: list[EngineCoreRequest] = []
        self.live: dict[int, tuple[EngineCoreRequest, list[int]]] = {}
        self.aborted: list[int] = []
        self.fails_at_step = -1
        self.max_prompt = 10**6
        self.is_shut_down = False
        self._ended: list[FinishedRequest] = []
        self._events: list[RequestEvent] = []
        self._steps = itertools.count()

    def add_request(self, request: EngineCoreRequest) -> None:
        if len(request.prompt_token_ids) > self.max_prompt:
            raise ValidationError("the prompt does not fit the cache", field="prompt")
        self.requests.append(request)
        self.live[request.handle] = (request, list(self.answer(request)))
        self._events.append(RequestEvent(request.handle, EventKind.QUEUED, 1.0))

    def abort_requests(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.aborted.append(handle)
            if self.live.pop(handle, None) is not None:
                self._ended.append(FinishedRequest(handle, FinishReason.ABORT))

    def get_output(self) -> EngineCoreOutputs | None:
        step = next(self._steps)
        if step == self.fails_at_step:
            raise RuntimeError("the device is gone")
        if not self.live and not self._ended:
            return None
        tokens = {handle: left.pop(0) for handle, (_, left) in self.live.items()}
        logprobs = self._logprobs(list(tokens.items()))
        for handle in [*tokens]:
            self._end_if_due(handle, tokens[handle])
        finished, self._ended = tuple(self._ended), []
        events, self._events = tuple(self._events), []
        return EngineCoreOutputs(
            handles=np.array(list(tokens), dtype=np.int64),
            new_token_ids=np.array(list(tokens.values()), dtype=np.int32),
            logprobs=logprobs,
            prompt_logprobs=(),
            finished=finished,
            events=events,
            stats=SchedulerStats(step=step, num_running=len(self.live)),
            timestamp=10.0 + step,
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return not self.live

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _end_if_due(self, handle: int, token: int) -> None:
        request, left = self.live[handle]
        params = request.sampling_params
        num_tokens = len(self.answer(request)) - len(left)
        if token == request.eos_token_id and not params.ignore_eos:
            self._end(handle, FinishReason.STOP)
        elif token in (params.stop_token_ids or ()):
            self._end(handle, FinishReason.STOP, token)
        elif num_tokens >= (params.max_tokens or 0) or not left:
            self._end(handle, FinishReason.LENGTH)

    def _end(self, handle: int, reason: FinishReason, stop_reason: int | None = None) -> None:
        del self.live[handle]
        self._ended.append(FinishedRequest(handle, reason, stop_reason))

    def _logprobs(self, tokens: list[tuple[int, int]]) -> LogprobsArrays | None:
        wanting = [
            i for i, (handle, _) in enumerate(tokens) if self.live[handle][0].sampling_params.logprobs is not None
        ]
        if not wanting:
            return None
        lines = [[tokens[i][1], 40, -1] for i in wanting]
        return LogprobsArrays(
            np.array(wanting, np.int32),
            np.array(lines, np.int32),
            np.array([[-0.5, -1.5, np.nan]] * len(lines), np.float32),
            np.array([[2, 1, 0]] * len(lines), np.int32),
        )


def make_parts(**settings: object) -> FrontEndParts:
    """What makes requests; `settings` are fields of `InputLimits` and `GenerationDefaults`."""
    defaults = GenerationDefaults(
        eos_token_id=EOS, **{k: settings.pop(k) for k in ("other_eos_token_ids", "sampling") if k in settings}
    )
    limits = InputLimits(vocab_size=TOKENIZER.vocab_size, **{"max_model_len": 200, **settings})
    return FrontEndParts(
        config=QuireConfig(model=ModelConfig(max_model_len=limits.max_model_len), cache=CacheConfig(block_size=4)),
        input_processor=InputProcessor(limits, TOKENIZER, defaults),
        tokenizer=TOKENIZER,
        chat_template=ChatTemplate(CHAT_TEMPLATE),
        defaults=defaults,
    )


def make_engine(client: FakeClient, **settings: object) -> LLMEngine:
    """A front-end over `client`; settings as of `make_parts`."""
    parts = make_parts(**settings)
    fields = {name: getattr(parts, name) for name in FrontEndParts.__dataclass_fields__}
    return LLMEngine(EngineParts(client=client, **fields))


def run_all(engine: LLMEngine) -> list:
    """Every output until nothing is unfinished."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs

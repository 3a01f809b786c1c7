"""Streams of an engine that drafts, whose core is killed (SIGKILL) in the middle of them, drafts in flight."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire import RequestOutput
from quire.config.build import build_config
from quire.core.outputs import CompletionOutput
from quire.core.sampling_params import RequestOutputKind
from quire.engine.async_llm import AsyncLLM
from tests.robustness.ships_heads import PROCESSOR
from tests.robustness.speculated_requests import Asked


@dataclass
class Stream:
    """One request's, as it comes.

    Attributes:
        before: drafts of it that were verified before the core was killed.
    """

    latest: dict[int, CompletionOutput] = field(default_factory=dict)
    final: RequestOutput | None = None
    before: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all its answers so far."""
        return sum(len(one.token_ids) for one in self.latest.values())

    @property
    def num_drafted(self) -> int:
        """Drafts of all its answers so far."""
        return sum(m.num_drafted for one in self.latest.values() if (m := one.spec_decode_metrics) is not None)

    def add(self, output: RequestOutput) -> None:
        """Take an output in; each holds all so far of the answers that it has."""
        self.latest.update({one.index: one for one in output.outputs})
        if output.finished:
            self.final = output

    def whole(self) -> RequestOutput:
        """The last output, with all answers."""
        assert self.final is not None, "it has ended"
        self.final.outputs = [self.latest[index] for index in sorted(self.latest)]
        return self.final


@dataclass
class Killed:
    """What came of it.

    Attributes:
        cut: numbers of the requests that had some tokens, and had not all, when the core was killed.
        num_drafted_before, num_drafted_after: drafts of those that were verified.
    """

    outputs: list[RequestOutput]
    num_restarts: int
    cut: list[int]
    num_drafted_before: int
    num_drafted_after: int


def kill_in_the_middle(settings: dict[str, Any], requests: Sequence[Asked], num_tokens: int) -> Killed:
    """Answer all requests at once; kill the core when so many tokens have come.

    Args:
        num_tokens: half of what they come to, for example.
    """
    return asyncio.run(_kill(settings, requests, num_tokens))


async def _kill(settings: dict[str, Any], requests: Sequence[Asked], num_tokens: int) -> Killed:
    engine = AsyncLLM.from_config(build_config(**settings), logits_processors=[PROCESSOR])
    streams = [Stream() for _ in requests]
    has_come = asyncio.Event()

    async def read(number: int, asked: Asked, stream: Stream) -> None:
        params = copy.copy(asked.params)
        params.output_kind = RequestOutputKind.CUMULATIVE  # that of some kinds is the last output alone
        async for output in engine.generate({"prompt_token_ids": asked.prompt}, params, f"request-{number}"):
            stream.add(output)
            if sum(one.num_tokens for one in streams) >= num_tokens:
                has_come.set()

    try:
        reading = [asyncio.ensure_future(read(i, *pair)) for i, pair in enumerate(zip(requests, streams, strict=True))]
        await has_come.wait()
        pid = engine.core_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        cut = [i for i, stream in enumerate(streams) if stream.final is None and stream.num_tokens]
        for stream in streams:
            stream.before = stream.num_drafted
        await asyncio.gather(*reading)
        before = sum(streams[i].before for i in cut)
        after = sum(streams[i].num_drafted for i in cut) - before
        return Killed([stream.whole() for stream in streams], engine.num_restarts, cut, before, after)
    finally:
        engine.shutdown()

"""An engine core that moves only when a test turns it, behind the real sockets, `AsyncLLM` and HTTP server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.core_link import CoreLink
from quire.engine.core_proc import EngineCoreProc
from quire.engine.generation_defaults import GenerationDefaults
from quire.engine.heartbeat import Heartbeat
from quire.engine.input_processor import InputLimits, InputProcessor
from quire.engine.parts import FrontEndParts
from quire.engine.step_recovery import StepRecovery
from quire.models.hub import resolve_model_path
from quire.tokenization.chat_template import load_chat_template
from quire.tokenization.tokenizer import load_tokenizer
from tests.server.engines import VOCAB_SIZE, rule, scripted_config
from tests.unit.engine.test_core import ScriptedExecutor
from tests.unit.scheduler.harness import make_scheduler

MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS_PER_STEP = 200, 4, 128, 24


class PrintingExecutor(ScriptedExecutor):
    """Samples tokens that are plain text.

    Attributes:
        weights: other ones give other tokens.
    """

    weights = 0

    def call_worker(self, method: str) -> dict[str, int]:
        """It has no memory to speak of."""
        return {}

    def sample_tokens(self, computed: SchedulerOutput, grammar: object = None) -> ModelRunnerOutput:
        rows = computed.rows[computed.is_sampling]
        for row in rows.tolist():
            tokens = self._rows[row][1]
            tokens.append(rule(tokens, self.weights, len(tokens)))
        sampled = np.array([self._rows[row][1][-1] for row in rows.tolist()], dtype=np.int32)
        return ModelRunnerOutput(rows=rows, sampled_token_ids=sampled)


class HandCore:
    """As `CoreProcess`, but in this one.

    Attributes:
        num_turns: turns of its loop, each at most one step.
    """

    pid = None
    stalled_s = 0.0
    is_alive = True

    def __init__(self, max_num_seqs: int) -> None:
        self.link = CoreLink()
        self._context = zmq.Context()
        self._inputs, outputs = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._inputs.connect(self.link.input_address)
        outputs.connect(self.link.output_address)
        page = Heartbeat.create(self.link.directory / "progress")
        recovery = StepRecovery()
        self._scheduler = make_scheduler(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs,
            budget=MAX_TOKENS_PER_STEP, gates=(recovery.gate,),
        )  # fmt: skip
        self.executor: Any = PrintingExecutor({})
        self._core = EngineCore(self.executor, self._scheduler, recovery)
        self._proc = EngineCoreProc(self._core, self._inputs, outputs, page)
        self.num_turns = 0
        self.start_phases: list[tuple[str, float]] = []

    @property
    def num_pages(self) -> int:
        """Pages that requests hold."""
        kv = self._scheduler._kv
        return kv.num_usable_blocks - kv.num_free_blocks

    @property
    def num_requests(self) -> int:
        """Requests that it knows."""
        return len(self._scheduler._requests)

    def turn(self) -> None:
        """One turn of the loop, if there is anything to do."""
        if self.has_mail() or (self._core.has_unfinished_requests() and not self._proc._is_paused):
            self._proc.run_once()
        self.num_turns += 1

    def has_mail(self, timeout_s: float = 0.0) -> bool:
        """Whether messages have come."""
        return bool(self._inputs.poll(int(1000 * timeout_s)))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached pages."""
        return self._core.reset_prefix_cache(reset_running_requests)

    def watch_exit(self, on_exit: Callable[..., None]) -> None:
        """It never ends by itself."""

    def close(self) -> None:
        """Close both ends."""
        self._context.destroy(linger=0)
        self.link.close()


def make_parts(**settings: Any) -> FrontEndParts:
    """A front end with the embedded model's tokenizer."""
    path = resolve_model_path("leaf", None, None)
    tokenizer, defaults = load_tokenizer(path), GenerationDefaults(eos_token_id=2)
    limits = InputLimits(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    return FrontEndParts(
        config=scripted_config(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, **settings),
        input_processor=InputProcessor(limits, tokenizer, defaults),
        tokenizer=tokenizer, chat_template=load_chat_template(tokenizer), defaults=defaults,
    )  # fmt: skip


class HandEngine(AsyncLLM):
    """An engine on such a core, with the embedded model's tokenizer."""

    def __init__(self, core: Any) -> None:
        super().__init__(make_parts(), core, lambda: core)

    async def check_health(self) -> None:
        """Begins to listen; nobody turns the core yet."""
        self._supervisor.attach()

    @property
    def wanted(self) -> int:
        """Answers that somebody still waits for, as far as the core was told."""
        return sum(not live.is_aborting for live in list(self._supervisor._live.values()))

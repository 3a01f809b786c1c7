"""Runs an engine behind a front end of vLLM's until that ends or a signal comes. Called by `quire serve --headless`.

Order: the engine core's process starts and loads the model; meanwhile HELLO is said to the front end; when the core is
ready, this process connects to the front end's sockets and says READY.
"""

from __future__ import annotations

import asyncio
import math
import signal
import uuid
from typing import Any

import msgspec

from quire.config import QuireConfig
from quire.config.resolve import UsageContext
from quire.engine.mp_factory import EngineStart, begin_start
from quire.errors import UnsupportedError
from quire.hosts.engine_core.core import WireCore
from quire.hosts.engine_core.links import FrontEndLinks, Handshake
from quire.hosts.engine_core.messages import CoreReady
from quire.logger import get_logger
from quire.version import __version__

EMULATED_VLLM = "0.33.0"
"""Whose protocol is spoken."""

logger = get_logger(__name__)


def serve(config: QuireConfig, address: str) -> int:
    """Serve the front end whose handshake socket is at `address` (tcp://HOST:PORT); returns the exit status.

    Raises:
        QuireError: the settings, the model or the machine does not allow it, or no front end answers; no process is
            left.
    """
    import uvloop

    if config.parallel.data_parallel_size > 1:
        raise UnsupportedError(
            "headless serves one engine core in a process",
            hint="leave out data_parallel_size; start a process for each", field="data_parallel_size",
        )  # fmt: skip
    start = begin_start(config, usage=UsageContext.API_SERVER)
    try:
        return uvloop.run(_serve(start, address))
    finally:
        start.cancel()


async def _serve(start: EngineStart, address: str) -> int:
    handshake = Handshake(address)
    try:
        addresses = await handshake.hello()
        parts = await asyncio.to_thread(start.finish)
        links = FrontEndLinks(addresses)
        try:
            core = WireCore(parts, start.core, start.launcher(), links)
            await handshake.ready()
            links.announce(ready_message(parts.config))
            _stop_on_signals(core)
            logger.info("engine core ready for the front end at %s", address)
            return await core.run()
        finally:
            links.close()
    finally:
        handshake.close()


def ready_message(config: QuireConfig) -> CoreReady:
    """What a front end is sent about an engine; `config` is resolved, with the number of blocks."""
    block_size, num_blocks = config.cache.block_size or 1, config.cache.num_blocks or 0
    num_tokens = max(num_blocks - 1, 0) * block_size  # without the null block
    return CoreReady(
        max_model_len=config.max_model_len,
        num_gpu_blocks=num_blocks,
        block_size=block_size,
        effective_attention_block_size=block_size,
        dtype=config.model.dtype,
        vllm_version=f"{EMULATED_VLLM}+quire.{__version__}",
        max_num_seqs=config.scheduler.max_num_seqs or 0,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 0,
        instance_id=uuid.uuid4().hex,
        kv_cache_size_tokens=num_tokens,
        kv_cache_max_concurrency=num_tokens / max(1, math.ceil(config.max_model_len / block_size) * block_size),
        kv_events_config=_kv_events(config),
    )


def _kv_events(config: QuireConfig) -> dict[str, Any] | None:
    events = config.observability.kv_events
    return msgspec.to_builtins(events) if events.enable_kv_cache_events else None


def _stop_on_signals(core: WireCore) -> None:
    """A signal ends what runs; the front end has let its requests finish before it sends one."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, core.stop)

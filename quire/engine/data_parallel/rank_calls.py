"""Calls that every rank of several engine cores takes part in: functions, profiles. Called by `Replicas`. No state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.core.wire import ErrorInfo
from quire.core.worker_call import WorkerCall
from quire.engine.replica_traces import merge_traces
from quire.engine.supervisor import Supervisor
from quire.errors import QuireError
from quire.logger import get_logger

logger = get_logger(__name__)


async def gather_ranks(supervisors: Mapping[int, Supervisor], call: WorkerCall) -> list[Any]:
    """What each rank of each replica returns, in their order.

    Args:
        supervisors: by number of the replica.

    Raises:
        QuireError: of the first replica on which it failed, which is named.
    """
    calls = [supervisor.call("collective_rpc", call) for supervisor in supervisors.values()]
    found: list[Any] = []
    for index, answer in zip(supervisors, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, QuireError):
            raise ErrorInfo.of(answer).within(f"replica {index}").to_error()
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, list), "it is what a core answers"
        found += answer
    return found


async def profile_replicas(supervisors: Mapping[int, Supervisor], starts: bool) -> bool:
    """Start recording the steps of all cores, or stop and write one trace; False where none does any more than before.

    Args:
        supervisors: by number of the replica.
    """
    calls = [supervisor.call("profile", starts) for supervisor in supervisors.values()]
    answers = dict(zip(supervisors, await asyncio.gather(*calls), strict=True))
    files = {index: Path(one) for index, one in answers.items() if isinstance(one, str) and one}
    try:
        await asyncio.to_thread(merge_traces, files)
    except OSError as error:
        logger.error("the profiles of the replicas stay apart: %s", error)
    return any(one is not False for one in answers.values())

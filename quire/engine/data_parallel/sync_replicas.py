"""SyncReplicas: several engine cores in processes of their own, for a caller that waits for each step.

Used by `LLM(data_parallel_size=N)`. Owns which core each request is with. A core that ends is not restarted: the caller
gets `EngineDeadError`, as with one core.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.wire import ErrorInfo
from quire.core.worker_call import WorkerCall
from quire.engine.core_client.base import EngineCoreClient
from quire.engine.core_client.sync_mp import POLL_S, SyncMPClient
from quire.engine.data_parallel.shared_service import SharedService
from quire.engine.replica_traces import merge_traces
from quire.errors import QuireError
from quire.scheduler.placement import Placement


class SyncReplicas(EngineCoreClient):
    """Sends each request to one of several cores, and gives the steps of all.

    Args:
        clients: of cores that are ready.
        config: resolved.
    """

    def __init__(self, clients: Sequence[SyncMPClient], config: QuireConfig) -> None:
        self._clients = list(clients)
        is_fair = config.scheduler.scheduling_policy == "fair"
        capacity_tokens = (config.cache.num_blocks or 0) * (config.cache.block_size or 1)
        self._placement = Placement(capacity_tokens, is_fair=is_fair, has_cache=config.cache.enable_prefix_caching)
        self._service = SharedService() if is_fair else None
        self._groups: dict[int, int] = {}
        self._next = 0
        for index in range(len(self._clients)):
            self._placement.add_replica(index)
            if self._service is not None:
                self._service.add_replica(index)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; raises `ValidationError` when it can never run."""
        together = None if request.fork_group is None else self._groups.get(request.fork_group)
        index = self._placement.place(request, range(len(self._clients)) if together is None else [together])
        if request.fork_group == request.handle:
            self._groups[request.handle] = index
        if self._service is not None:
            self._clients[index].tell(self._service.add(request, index))
        try:
            self._clients[index].add_request(request)
        except BaseException:
            self._forget(request.handle)
            raise

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Ask for requests to end; each still gets a final output."""
        wanted = list(handles)
        for index, client in enumerate(self._clients):
            own = [handle for handle in wanted if self._placement.replica_of(handle) == index]
            if own:
                client.abort_requests(own)

    def get_output(self) -> EngineCoreOutputs | None:
        """The next step's outputs, of any core in turn; None when nothing is unfinished."""
        while any(client.has_unfinished for client in self._clients):
            for _ in self._clients:
                index, self._next = self._next, (self._next + 1) % len(self._clients)
                outputs = self._clients[index].poll_output()
                if outputs is not None:
                    return self._note(index, outputs)
            select.select([client.fd for client in self._clients], [], [], POLL_S)
        return None

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        results = [client.reset_prefix_cache(reset_running_requests) for client in self._clients]
        return all(results)

    def profile(self, starts: bool) -> bool:
        """Start recording the steps of all cores, or stop and write one trace; False where that was done before."""
        answers = [client.ask_profile(starts) for client in self._clients]
        merge_traces({index: Path(one) for index, one in enumerate(answers) if isinstance(one, str) and one})
        return any(one is not False for one in answers)

    def collective_rpc(self, call: WorkerCall, timeout_s: float | None = None) -> list[Any]:
        """As `EngineCoreClient.collective_rpc`; all cores run it at the same time."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        call_ids = [client.begin_rpc(call) for client in self._clients]
        found: list[Any] = []
        for index, (client, call_id) in enumerate(zip(self._clients, call_ids, strict=True)):
            try:
                found += client.end_rpc(call_id, deadline_s)
            except QuireError as error:
                raise ErrorInfo.of(error).within(f"replica {index}").to_error() from None
        return found

    def shutdown(self) -> None:
        """End the cores; harmless when repeated."""
        for client in self._clients:
            client.shutdown()

    def _note(self, index: int, step: EngineCoreOutputs) -> EngineCoreOutputs:
        for handle in step.handles.tolist():
            self._placement.note_first_token(handle)
        if self._service is not None:
            self._service.note_step(index, step)
            for other, counters in self._service.due():
                self._clients[other].tell(counters)
        for end in step.finished:
            self._forget(end.handle)
        return replace(step, engine_index=index) if index else step

    def _forget(self, handle: int) -> None:
        self._placement.remove(handle)
        self._groups.pop(handle, None)
        if self._service is not None:
            self._service.remove(handle)

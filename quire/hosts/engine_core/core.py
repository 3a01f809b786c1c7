"""WireCore: requests of vLLM's front ends in, outputs of the supervised engine core out. Run by `serve`.

It stands where `AsyncLLM` stands in Quire's own server: the engine core is another process, which is replaced when it
dies, and running requests go on. Text is the front end's business; here are only token ids. Owns the links, the
supervisor, and what is kept of requests that have not ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.sampling_params import SamplingParams
from quire.engine.core_launcher import CoreProcess
from quire.engine.front_end import FrontEnd
from quire.engine.parts import FrontEndParts
from quire.engine.supervisor import Supervisor
from quire.errors import EngineDeadError, MessageError, QuireClientError, QuireError
from quire.hosts.engine_core.links import FrontEndLinks
from quire.hosts.engine_core.messages import (
    CoreOutput,
    CoreOutputs,
    CoreRequest,
    RequestError,
    RequestType,
    UtilityOutput,
    UtilityRequest,
    decode,
    request_name,
)
from quire.hosts.engine_core.outputs import WireRequest, lines_of, stats_of, tokens_of
from quire.hosts.engine_core.requests import check_served, request_options, sampling_params
from quire.hosts.engine_core.utilities import Utilities
from quire.logger import get_logger
from quire.structured_output.form_checker import FormChecker

logger = get_logger(__name__)


class WireCore:
    """An engine behind front ends of vLLM's.

    Args:
        parts: what checks requests.
        core: the process of an engine core that is ready.
        launch: starts another such process.
        links: to the front ends.
        rank: data parallel rank.
    """

    def __init__(
        self,
        parts: FrontEndParts,
        core: CoreProcess,
        launch: Callable[[], CoreProcess],
        links: FrontEndLinks,
        rank: int = 0,
    ) -> None:
        self._config = parts.config
        self._eos_token_id = parts.defaults.eos_token_id
        self._links = links
        self._rank = rank
        self._front = FrontEnd(parts)
        self._forms = FormChecker(parts.config.structured_outputs)
        parts.input_processor.check_forms_with(self._forms.resolve)
        self._supervisor = Supervisor(core, launch, self, parts.config.supervision.max_restarts)
        self._utilities = Utilities(self)
        self._live: dict[int, WireRequest] = {}
        self._handles: dict[str, int] = {}
        self._preparing: dict[str, int] = {}
        self._held: list[tuple[int, bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until `stop`, until a front end is gone, or until the engine has stopped for good; the exit status."""
        self._over = asyncio.get_running_loop().create_future()
        self._supervisor.attach()
        for client in range(self._links.num_clients):
            self._spawn(self._receive(client))
            self._spawn(self._watch(client))
        try:
            return await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._forms.close()
            await self._supervisor.stop()

    def stop(self, status: int = 0) -> None:
        """End what runs with reason abort, and `run`."""
        self.abort_all()
        if self._over is not None and not self._over.done():
            self._over.set_result(status)

    # --- what utilities call ---

    @property
    def supervisor(self) -> Supervisor:
        """Of the engine core."""
        return self._supervisor

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not self._live and not self._preparing

    def hold_requests(self) -> None:
        """Keep requests that come until `release_requests`."""
        self._held = self._held if self._held is not None else []

    def release_requests(self) -> None:
        """Take those that were kept."""
        held, self._held = self._held or [], None
        for client, payload in held:
            self._add(client, payload)

    def abort_all(self) -> None:
        """End every request; each front end gets the ends."""
        for request_id, client in list(self._preparing.items()):
            del self._preparing[request_id]
            self._send(client, [_aborted(request_id)])
        for handle in list(self._live):
            self._end(handle, _aborted(self._live[handle].request_id))

    # --- from the front ends ---

    async def _receive(self, client: int) -> None:
        async for frames in self._links.receive(client):
            try:
                self._handle(client, frames)
            except MessageError as error:
                logger.error("could not read a message of front end %d: %s", client, error)
            except Exception:  # what one message leads to must not end the others'
                logger.exception("a message of front end %d failed", client)

    async def _watch(self, client: int) -> None:
        await self._links.wait_until_gone(client)
        logger.error("front end %d is gone", client)
        self.stop(1)

    def _handle(self, client: int, frames: list[bytes]) -> None:
        if len(frames) < 2:
            raise MessageError(f"a message has a type and a payload, not {len(frames)} frames")
        kind, payload = frames[0], frames[1]
        if kind == RequestType.ADD.value:
            self._add(client, payload)
        elif kind == RequestType.ABORT.value:
            self._abort(decode(payload, list[str]))
        elif kind == RequestType.UTILITY.value:
            self._spawn(self._call(client, decode(payload, UtilityRequest)))
        elif kind != RequestType.START_DP_WAVE.value:  # there is no step that several engines take together
            raise MessageError(f"{kind[:8]!r} is not a type of message")

    def _add(self, client: int, payload: bytes) -> None:
        """Queue a request, or answer why not; no other request is affected."""
        if self._held is not None:
            self._held.append((client, payload))
            return
        try:
            request: CoreRequest = decode(payload, CoreRequest)
        except MessageError as error:
            name = request_name(payload)
            logger.error("could not read a request of front end %d: %s", client, error)
            if name is not None and name[0] not in self._handles and name[0] not in self._preparing:
                self._refuse(client, name[0], QuireClientError(error.message))
            return
        if request.request_id in self._handles or request.request_id in self._preparing:
            logger.error("request %s runs already: the second of this name is dropped", request.request_id)
            return
        try:
            check_served(request, self._rank)
            assert request.sampling_params is not None, "it was checked"
            params = sampling_params(request.sampling_params, self._eos_token_id)
            form = params.structured_outputs
            if form is not None and form.is_large:
                self._preparing[request.request_id] = client
                self._spawn(self._add_later(client, request, params))
                return
            self._submit(client, request, params, self._prepare(request, params))
        except Exception as error:
            self._refuse(client, request.request_id, error)

    async def _add_later(self, client: int, request: CoreRequest, params: SamplingParams) -> None:
        """As the end of `_add`, for a schema that takes long to look at."""
        try:
            message = await asyncio.to_thread(self._prepare, request, params)
        except Exception as error:
            if self._preparing.pop(request.request_id, None) is not None:
                self._refuse(client, request.request_id, error)
            return
        if self._preparing.pop(request.request_id, None) is not None:  # else it was aborted meanwhile
            self._submit(client, request, params, message)

    def _prepare(self, request: CoreRequest, params: SamplingParams) -> EngineCoreRequest:
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        submission = self._front.prepare(
            request.request_id, prompt, params, request_options(request), request.arrival_time or None
        )
        return submission.messages[0]

    def _submit(self, client: int, request: CoreRequest, params: SamplingParams, message: EngineCoreRequest) -> None:
        self._live[message.handle] = WireRequest(
            request.request_id, client, len(message.prompt_token_ids),
            message.sampling_params.logprobs, message.sampling_params.prompt_logprobs,
        )  # fmt: skip
        self._handles[request.request_id] = message.handle
        self._supervisor.add_request(message)
        if request.abort_immediately:
            self._supervisor.abort_requests([message.handle])

    def _abort(self, request_ids: Iterable[str]) -> None:
        """A front end wants no more of requests; it does not wait for their ends."""
        handles = []
        for request_id in request_ids:
            self._preparing.pop(request_id, None)
            handle = self._handles.pop(request_id, None)
            if handle is not None:
                self._live.pop(handle)
                handles.append(handle)
        if self._held:
            gone = set(request_ids)
            self._held = [one for one in self._held if (request_name(one[1]) or ("",))[0] not in gone]
        if handles:
            self._supervisor.abort_requests(handles)

    async def _call(self, client: int, call: UtilityRequest) -> None:
        output = UtilityOutput(call.call_id)
        try:
            output.result = None, await self._utilities.call(call.method, call.args)
        except QuireError as error:
            output.failure_message = str(error)
        except Exception as error:
            logger.exception("the call of %s failed", call.method)
            output.failure_message = f"{type(error).__name__}: {error}"
        if self._links.num_clients > call.client_index >= 0:
            client = call.client_index
        self._links.send(client, CoreOutputs(self._rank, utility_output=output))

    # --- what the supervisor tells ---

    def on_step(self, step: EngineCoreOutputs) -> None:
        """A step's outputs came."""
        self._note(step)
        ends = {one.handle: one for one in step.finished}
        tokens = tokens_of(step)
        by_client: dict[int, list[CoreOutput]] = {0: []}
        for handle in dict.fromkeys([*tokens, *ends]):
            request = self._live.get(handle)
            if request is None:
                continue
            lines = None if request.num_logprobs is None else lines_of(step, handle)
            end = ends.get(handle)
            by_client.setdefault(request.client, []).append(request.take(tokens.get(handle, []), lines, end))
            if end is not None:
                self._forget(handle)
        stats = stats_of(step, self._config.num_draft_tokens)
        for client, outputs in by_client.items():
            message = CoreOutputs(self._rank, outputs, None if client else stats, step.timestamp)
            self._links.send(client, message)

    def on_failed(self, handle: int, error: QuireError) -> None:
        """The core refused a request, or it was given up."""
        request = self._live.get(handle)
        if request is not None:
            self._forget(handle)
            self._refuse(request.client, request.request_id, error)

    def on_aborted(self, handle: int) -> None:
        """A request that was to end was lost with its core."""
        request = self._live.get(handle)
        if request is not None:
            self._end(handle, _aborted(request.request_id))

    def on_dead(self, error: EngineDeadError) -> None:
        """The engine is of no further use."""
        logger.error("the engine has stopped for good: %s", error)
        self._links.send_dead()
        self._live.clear()
        self._handles.clear()
        self.stop(1)

    def restart(self, handle: int) -> list[int] | None:
        """A request is about to be sent again: the tokens it has put out; None when it was abandoned."""
        request = self._live.get(handle)
        if request is None:
            return None
        request.restart()
        return request.token_ids

    # --- within ---

    def _note(self, step: EngineCoreOutputs) -> None:
        for event in step.events:
            request = self._live.get(event.handle)
            if request is not None:
                request.note_event(event)
        for handle, lines in step.prompt_logprobs:
            request = self._live.get(handle)
            if request is not None:
                request.prompt_logprobs.append(lines)

    def _refuse(self, client: int, request_id: str, error: Exception) -> None:
        """End a request that does not run; an error that is not one of ours is a mistake of this program."""
        if not isinstance(error, QuireError):
            logger.error("request %s failed", request_id, exc_info=error)
            error = QuireError(f"internal error: {type(error).__name__}: {error}")
        code = "validation_error" if isinstance(error, QuireClientError) else "internal_error"
        logger.info("request %s is refused: %s", request_id, error.message)
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        output = CoreOutput(request_id, [], finish_reason=int(FinishReason.ERROR))
        output.error = RequestError(message, code)
        self._send(client, [output])

    def _end(self, handle: int, output: CoreOutput) -> None:
        client = self._live[handle].client
        self._forget(handle)
        self._supervisor.abort_requests([handle])
        self._send(client, [output])

    def _forget(self, handle: int) -> None:
        self._handles.pop(self._live.pop(handle).request_id, None)

    def _send(self, client: int, outputs: list[CoreOutput]) -> None:
        self._links.send(client, CoreOutputs(self._rank, outputs))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the connection to a front end failed", exc_info=error)
            self.stop(1)


def _aborted(request_id: str) -> CoreOutput:
    return CoreOutput(request_id, [], finish_reason=int(FinishReason.ABORT))

"""ModelPool: the models of one server. Carries out what `schedule` orders, and gives requests the model they name.

Made by the server's command, closed when the server ends. Owns the schedule, the served models, and the tasks that load
and unload them. Everything but `load_pinned` and `shutdown` is called on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from quire.config.server import ServerConfig
from quire.config.switching import ModelEntry, ModelsFile
from quire.engine.protocol import EngineClient
from quire.engine.spare_process import SpareProcesses
from quire.errors import EngineDeadError, QuireError
from quire.executor.footprint import KV_SHARE
from quire.logger import get_logger
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.server_metrics import Merged, page
from quire.server.api.responses.kept import KeptResponses
from quire.server.chat.state import ServerParts, ServerState, make_parts
from quire.server.http.errors import (
    BAD_REQUEST,
    NOT_FOUND,
    OVERLOADED,
    QUEUE_TIMEOUT,
    UNAVAILABLE,
    WAITED_TOO_LONG,
    ApiError,
    ErrorKind,
    sanitised,
)
from quire.server.http.keys import ApiKeys
from quire.server.switching.life_cycle import ModelState
from quire.server.switching.loader import CoreLoader, ModelLoader
from quire.server.switching.schedule import ModelSchedule, Order, OrderKind
from quire.server.switching.served_model import ServedModel
from quire.server.switching.slot import Slot, Ticket
from quire.utils.checks import shown
from quire.utils.memory import format_bytes, read_memory
from quire.utils.phases import Phases

LOAD_FAILED = ErrorKind(503, "ServiceUnavailableError", "model_load_failed", "model_load_failed")
DEFAULT_BUDGET_SHARE = 0.8
LOOK_S = 0.25
"""Between two looks at engines that may have died, and at the time."""

logger = get_logger(__name__)


class Lease:
    """A request's hold on a model that is loaded; `end` follows.

    Attributes:
        waited_s: how long the request waited for the model.
    """

    def __init__(self, pool: ModelPool, model: ServedModel, ticket: Ticket, waited_s: float) -> None:
        self.model = model
        self.waited_s = waited_s
        self._pool = pool
        self._ticket: Ticket | None = ticket

    def end(self) -> None:
        """The request was answered; harmless when repeated."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.model.release(ticket, self._pool.leave)


class ModelPool:
    """Several models behind one server.

    Args:
        parts: of the server.
        file: the models, and how they share the memory.
        make_loader: of a model, given the bytes for its KV cache where its settings do not say.
        spares: closed with the pool; None = there are none.
        clock: seconds.

    Attributes:
        is_draining: no new work is taken.

    Raises:
        ConfigError: the file of responses cannot be used.
    """

    def __init__(
        self,
        parts: ServerParts,
        file: ModelsFile,
        make_loader: Callable[[ModelEntry, int], ModelLoader],
        spares: SpareProcesses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        switching = file.switching
        self.parts = parts
        self.kept = KeptResponses(parts.config.responses)
        self.is_draining = False
        self._clock = clock
        self._spares = spares
        budget = switching.memory_budget or int(DEFAULT_BUDGET_SHARE * read_memory().available_bytes)
        self.models = {
            entry.name: ServedModel(entry, make_loader(entry, budget // KV_SHARE), parts, self.kept)
            for entry in file.models
        }
        self._by_name = {name: entry.name for entry in file.models for name in entry.names}
        self.schedule = ModelSchedule(
            [Slot(entry.name, is_pinned=entry.is_pinned) for entry in file.models], budget,
            busy_turn_s=switching.busy_turn_s, idle_unload_s=switching.idle_unload_s, clock=clock,
        )  # fmt: skip
        self.model_metrics = ModelMetrics()
        self._show_models()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    def loaded_states(self) -> list[ServerState]:
        """Of the models that are in memory, in the order of the file."""
        return [model.state for model in self.models.values() if model.state is not None]

    # --- for requests ---

    async def use(self, model: ServedModel, timeout_s: float | None = None) -> Lease:
        """A hold on a model, once it is in memory.

        Args:
            timeout_s: after which the request waits no longer; None = it waits as long as it takes.

        Raises:
            ApiError: the server is ending, too many requests wait for the model, it cannot be loaded, or the time is
                over.
        """
        self.refuse_when_draining()
        self._refuse_too_many(model)
        ticket, waited_s = self.schedule.enter(model.name), 0.0
        if ticket.stay is None and ticket.error is None:
            await self._wait(ticket, timeout_s)
            waited_s = self._clock() - ticket.arrived_s
            self.model_metrics.record_wait(model.name, waited_s)
        if ticket.error is not None:
            raise self._load_failed(model.name, ticket.error)
        lease = Lease(self, model, ticket, waited_s)
        if model.state is None:  # its engine died as soon as it was ready
            lease.end()
            raise EngineDeadError("the engine has stopped")
        return lease

    def leave(self, ticket: Ticket) -> None:
        """A request needs its model no longer, or waits no longer for it."""
        self.schedule.leave(ticket)
        self._poll()

    def find(self, name: str | None) -> ServedModel:
        """The model that requests call so; of those that name none, the first.

        Raises:
            ApiError: there is no such.
        """
        if not name:
            return next(iter(self.models.values()))
        if name not in self._by_name:
            raise ApiError(
                NOT_FOUND, f"the model {shown(name)} does not exist; this server has {', '.join(self._by_name)}",
                param="model",
            )  # fmt: skip
        return self.models[self._by_name[name]]

    def refuse_when_draining(self) -> None:
        """Raise when the server takes no new work."""
        if self.is_draining:
            raise _draining()

    def dismiss(self, model: ServedModel) -> None:
        """Unload a model when its running requests have ended.

        Raises:
            ApiError: it is pinned, or being loaded.
        """
        slot = self.schedule.slots[model.name]
        if slot.is_pinned:
            raise ApiError(BAD_REQUEST, f"model {model.name} is pinned", param="model")
        if slot.state in (ModelState.QUEUED, ModelState.LOADING):
            raise ApiError(
                BAD_REQUEST, f"model {model.name} is {slot.state.value}; wait until it is ready", param="model"
            )
        self.schedule.dismiss(model.name)
        self._poll()

    def slot(self, model: ServedModel) -> Slot:
        """What the schedule knows of a model."""
        return self.schedule.slots[model.name]

    @property
    def names(self) -> dict[str, ServedModel]:
        """Every name of every model."""
        return {name: self.models[own] for name, own in self._by_name.items()}

    @property
    def loaded(self) -> list[ServerState]:
        """States of the models that are in memory."""
        return [model.state for model in self.models.values() if model.state is not None]

    # --- the life of the pool ---

    def load_pinned(self) -> None:
        """Load the models that are pinned, before the server listens.

        Raises:
            QuireError: one of them cannot be loaded.
        """
        for model in self.models.values():
            if not self.slot(model).is_pinned:
                continue
            ticket = self.schedule.enter(model.name)
            while ticket.stay is None and ticket.error is None:
                for order in self.schedule.poll():
                    self._carry_out_now(order)
            if ticket.error is not None:
                raise ticket.error
            self.schedule.leave(ticket)
        self._prepare_spare()

    async def start(self) -> None:
        """Begin to serve on the running event loop."""
        for state in self.loaded:
            await state.engine.check_health()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Serve no longer: end the engines, and what runs in the background."""
        self.is_draining = self._is_closed = True
        self._refuse_waiting()
        if self._watching is not None:
            self._watching.cancel()
        await self.kept.close()
        for model in self.models.values():
            model.loader.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await asyncio.gather(
            *(model.loader.unload(model.state.engine) for model in self.models.values() if model.state is not None)
        )
        if self._spares is not None:
            await asyncio.to_thread(self._spares.close)

    def shutdown(self) -> None:
        """End every engine when there is no event loop, or no more; harmless when repeated."""
        if self._spares is not None:
            self._spares.close()
        for model in self.models.values():
            model.loader.cancel()
            if model.state is not None:
                model.state.engine.shutdown()

    # --- what the launcher asks (`Serving`) ---

    @property
    def config(self) -> ServerConfig:
        """Of the server."""
        return self.parts.config

    @property
    def errored(self) -> bool:
        """False: a model whose engine has failed is loaded again, and the others go on."""
        return False

    def begin_drain(self) -> None:
        """Take no new work."""
        self.is_draining = True
        for state in self.loaded:
            state.begin_drain()

    @property
    def num_answers(self) -> int:
        """Answers that were admitted and have not ended."""
        return sum(state.num_answers for state in self.loaded)

    @property
    def num_running(self) -> int:
        """Requests in the engines."""
        return sum(state.num_running for state in self.loaded)

    async def abort_running(self) -> None:
        """Have every request in the engines end with what it has."""
        await asyncio.gather(*(state.abort_running() for state in self.loaded))

    def show_start(self, server: Phases, core: Phases) -> None:
        """Let /metrics show startup times; those of cores are shown with each model."""
        self.model_metrics.show_start(server)

    def render_metrics(self) -> bytes:
        """The page of /metrics: series of a model have its name as a label."""
        models = [(model.name, model.metrics) for model in self.models.values() if model.metrics is not None]
        registries = [self.parts.metrics.registry, self.model_metrics.registry, *(one.registry for _, one in models)]
        return page(Merged(registries, [{}, {}, *({"model_name": name} for name, _ in models)]))

    # --- within ---

    async def _wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Until `ticket` is granted or fails.

        Raises:
            ApiError: the time is over.
        """
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket.on_change = lambda: None if changed.done() else changed.set_result(None)
        self._poll()
        slot = self.schedule.slots[ticket.model]
        if len(slot.waiting) == 1:  # the others wait as long
            logger.info(
                "a request waits for model %s (%s): predicted %.1f s", slot.name, slot.state.value,
                self.schedule.predicted_wait_s(slot.name),
            )  # fmt: skip
        try:
            await asyncio.wait_for(changed, timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            if ticket.stay is None and ticket.error is None:
                self.leave(ticket)
                wait_s = self.schedule.predicted_wait_s(slot.name)
                raise ApiError(QUEUE_TIMEOUT, WAITED_TOO_LONG, param="queue_timeout", retry_after_s=wait_s) from None
        except BaseException:
            self.leave(ticket)
            raise

    def _refuse_too_many(self, model: ServedModel) -> None:
        """Raise when as many requests wait for a model as may wait."""
        most = self.config.limits.max_num_queued_reqs
        if most is not None and len(self.slot(model).waiting) >= max(1, most):
            raise ApiError(
                OVERLOADED, f"the queue for model {model.name} is full (max_num_queued_reqs)",
                retry_after_s=self.schedule.predicted_wait_s(model.name), reason="max_num_queued_reqs",
            )  # fmt: skip

    def _load_failed(self, model: str, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        text = f"{error.message} ({error.hint})" if isinstance(error, QuireError) and error.hint else str(error)
        wait_s = max(1.0, self.schedule.slots[model].retry_s - self._clock())
        return ApiError(LOAD_FAILED, sanitised(f"model {model} cannot be loaded: {text}"), retry_after_s=wait_s)

    def _poll(self) -> None:
        """Begin what the schedule orders, until the server ends."""
        for order in () if self._is_closed else self.schedule.poll():
            task = asyncio.get_running_loop().create_task(self._carry_out(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Look at the time, and at engines that have died."""
        while True:
            wake_s = self.schedule.wake_s
            await asyncio.sleep(LOOK_S if wake_s is None else min(LOOK_S, max(0.01, wake_s - self._clock())))
            for model in self.models.values():
                if model.state is not None and model.state.engine.errored:
                    self.schedule.died(model.name, EngineDeadError("the engine has stopped"))
            if self.is_draining:
                self._refuse_waiting()
            self._poll()

    async def _carry_out(self, order: Order) -> None:
        model = self.models[order.model]
        if order.kind is OrderKind.MEASURE:
            await self._measure(model)
        elif order.kind is OrderKind.LOAD:
            await self._load(model)
        else:
            await self._unload(model)
        self._poll()

    async def _measure(self, model: ServedModel) -> None:
        try:
            footprint = await asyncio.to_thread(model.loader.measure)
        except Exception as error:
            self._note_failure(model, error)
        else:
            self.schedule.measured(model.name, footprint.num_bytes, footprint.file_bytes)

    async def _load(self, model: ServedModel) -> None:
        start_s = self._note_load_begins(model)
        try:
            engine = await asyncio.to_thread(model.loader.load)
        except Exception as error:
            self._note_failure(model, error)
            return
        try:
            self._note_loaded(model, engine, start_s)
        except Exception as error:
            await model.loader.unload(engine)
            self._note_failure(model, error)

    async def _unload(self, model: ServedModel) -> None:
        engine = None if model.state is None else model.state.engine
        model.close()
        if engine is not None:
            try:
                await model.loader.unload(engine)
            except Exception:  # its memory is counted as free all the same: nothing else would ever free it
                logger.exception("the engine of model %s did not end well", model.name)
        self.model_metrics.record_unload(model.name)
        self.schedule.unloaded(model.name)
        logger.info("unloaded model %s: %s", model.name, self._describe_memory())

    def _carry_out_now(self, order: Order) -> None:
        """As `_carry_out`, before there is an event loop: nothing is unloaded by then."""
        model = self.models[order.model]
        try:
            if order.kind is OrderKind.MEASURE:
                footprint = model.loader.measure()
                self.schedule.measured(model.name, footprint.num_bytes, footprint.file_bytes)
            else:
                start_s = self._note_load_begins(model)
                self._note_loaded(model, model.loader.load(), start_s)
        except Exception as error:
            self._note_failure(model, error)

    def _note_load_begins(self, model: ServedModel) -> float:
        slot, times = self.slot(model), self.schedule.load_times
        logger.info(
            "loading model %s: %s, predicted %.1f s; %s", model.name, format_bytes(slot.num_bytes or 0),
            times.predict(model.name, slot.file_bytes), self._describe_memory(),
        )  # fmt: skip
        return self._clock()

    def _note_loaded(self, model: ServedModel, engine: EngineClient, start_s: float) -> None:
        model.open(engine, self.leave, is_draining=self.is_draining)
        self.schedule.loaded(model.name, model.loader.held_bytes(engine))
        seconds = self._clock() - start_s
        self.model_metrics.record_load(model.name, seconds)
        logger.info("loaded model %s in %.2f s", model.name, seconds)

    def _note_failure(self, model: ServedModel, error: Exception) -> None:
        if isinstance(error, QuireError):
            logger.error("model %s cannot be loaded: %s", model.name, error)
        else:
            logger.exception("model %s cannot be loaded", model.name, exc_info=error)
            error = EngineDeadError("internal error; see the server's log")
        self.model_metrics.record_failure(model.name)
        self.schedule.failed(model.name, error)

    def _refuse_waiting(self) -> None:
        """The server ends: what waits for a model does not get it any more."""
        self.schedule.refuse_waiting(_draining())

    def _prepare_spare(self) -> None:
        is_any_left = any(model.state is None for model in self.models.values())
        if self._spares is not None and is_any_left:
            self._spares.prepare()

    def _describe_memory(self) -> str:
        return f"{format_bytes(self.schedule.used_bytes)} of {format_bytes(self.schedule.budget_bytes)} in use"

    def _show_models(self) -> None:
        self.model_metrics.show_budget(self.schedule.budget_bytes)
        for name, slot in self.schedule.slots.items():
            self.model_metrics.show_model(
                name, [state.value for state in ModelState],
                state=lambda slot=slot: slot.state.value,  # type: ignore[misc]
                memory_bytes=lambda slot=slot: slot.held_bytes,  # type: ignore[misc]
                num_waiting=lambda slot=slot: len(slot.waiting),  # type: ignore[misc]
                predicted_wait_s=partial(self.schedule.predicted_wait_s, name),
            )  # fmt: skip


def make_pool(config: ServerConfig, keys: ApiKeys, file: ModelsFile) -> ModelPool:
    """The models of `file` in engine cores of their own, none of them loaded yet.

    Raises:
        ConfigError: the file of responses cannot be used.
    """
    spares = SpareProcesses() if file.switching.spare_process else None

    def make_loader(entry: ModelEntry, kv_share_bytes: int) -> CoreLoader:
        return CoreLoader(entry.name, entry.config, kv_share_bytes, spares)

    return ModelPool(make_parts(config, keys), file, make_loader, spares)


def _draining() -> ApiError:
    return ApiError(UNAVAILABLE, "the server is shutting down", retry_after_s=1, reason="draining")

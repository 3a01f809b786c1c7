"""ServedModel: one model of a server of several: its names, its engine and routes while it is loaded, its figures.

Made and called by `pool`. Owns what of a model outlives its engine, its metrics, and the ticket of answers that run on
after their requests (background responses).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quire.config.switching import ModelEntry
from quire.engine.protocol import EngineClient
from quire.metrics.engine_metrics import EngineMetrics
from quire.server.api.responses.kept import KeptResponses
from quire.server.chat.answered import Route, answered
from quire.server.chat.state import ServerParts, ServerState, make_model_state
from quire.server.model_routes import model_routes
from quire.server.switching.loader import ModelLoader
from quire.server.switching.slot import Ticket


class ServedModel:
    """One model.

    Args:
        entry: what the file says of it.
        loader: brings it into memory.
        parts: of the server.
        kept: the responses of the server.

    Attributes:
        state: while it is loaded; None = it is not.
        metrics: None until it was loaded once.
        max_model_len: None until it was loaded once, unless the file says it.
    """

    def __init__(self, entry: ModelEntry, loader: ModelLoader, parts: ServerParts, kept: KeptResponses) -> None:
        self.entry = entry
        self.loader = loader
        self.state: ServerState | None = None
        self.metrics: EngineMetrics | None = None
        self.max_model_len = entry.config.model.max_model_len
        self._parts = parts
        self._kept = kept
        self._config = dataclasses.replace(parts.config, api=entry.api_config(parts.config.api))
        self._routes: dict[str, Route] = {}
        self._held: Ticket | None = None

    @property
    def name(self) -> str:
        """Its first name."""
        return self.entry.name

    def open(self, engine: EngineClient, leave: Callable[[Ticket], None], *, is_draining: bool) -> None:
        """Serve with an engine.

        Args:
            leave: gives back a ticket.
            is_draining: the server takes no new work.

        Raises:
            QuireError: a setting does not go with this model.
        """
        state = make_model_state(engine, self._parts, self._config, self.metrics)
        state.admission.is_draining = is_draining
        state.admission.on_idle = lambda: self._leave_held(leave)
        self._routes = {path: answered(route, state) for path, route in model_routes(state, self._kept).items()}
        state.metrics.show_start("engine_core", self.loader.start_phases(engine))
        self.state, self.metrics, self.max_model_len = state, state.metrics, engine.config.model.max_model_len

    def close(self) -> None:
        """The engine is about to end; requests that still run on it have failed."""
        if self.metrics is not None:
            self.metrics.note_unloaded()
            self.metrics.show_processes(tuple)
        self.state, self._routes, self._held = None, {}, None

    def route(self, path: str) -> Route:
        """What answers a path, while the model is loaded."""
        return self._routes[path]

    def release(self, ticket: Ticket, leave: Callable[[Ticket], None]) -> None:
        """A request was answered; its ticket is given back when nothing runs on, such as in the background."""
        is_idle = self.state is None or not self.state.num_answers
        if is_idle or self._held is not None:
            leave(ticket)
        else:
            self._held = ticket

    def _leave_held(self, leave: Callable[[Ticket], None]) -> None:
        ticket, self._held = self._held, None
        if ticket is not None:
            leave(ticket)

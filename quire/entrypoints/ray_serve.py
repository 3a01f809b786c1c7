"""An application of Ray Serve: the whole API of `quire serve` in each replica, behind Serve's proxy.

    serve run quire.entrypoints.ray_serve:build model=MODEL num_threads=8

Called by Ray Serve, which is imported when it asks. Every setting of `quire serve` is an argument, by its Python name;
a replica has an engine core of its own, whose end it survives as a server does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from quire.config.build import SECTIONS, SERVER_SECTIONS, build_config, build_server_config, settings_by_name
from quire.config.engine import QuireConfig
from quire.config.server import ServerConfig
from quire.entrypoints.args import parse_text
from quire.errors import ConfigError
from quire.utils.checks import shown

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from quire.engine.async_llm import AsyncLLM

T = TypeVar("T", int, float)
MAX_ONGOING = 512
"""Requests of one replica at once, of which the engine runs `max_num_seqs`; Serve's own default is 5."""
HEALTH_PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What Ray Serve is asked for.

    Attributes:
        num_replicas: each with the whole model.
        num_cpus: that Ray reserves for a replica.
        values: settings of engine and server by name, valid.
    """

    num_replicas: int
    num_cpus: float
    max_ongoing_requests: int
    values: dict[str, Any]

    def configs(self) -> tuple[QuireConfig, ServerConfig]:
        """Of a replica."""
        names = settings_by_name(SERVER_SECTIONS)
        engine = {name: value for name, value in self.values.items() if name not in names}
        server = {name: value for name, value in self.values.items() if name in names}
        if server.get("api_key_file") is not None:
            engine.setdefault("scheduling_policy", "fair")
        return build_config(disable_log_stats=False, **engine), build_server_config(**server)


def read_deployment(args: Mapping[str, Any]) -> Deployment:
    """The arguments of the application, which are text where they come from a command line.

    Raises:
        ConfigError, UnsupportedError: the argument is named.
    """
    values = {name.replace("-", "_"): value for name, value in args.items()}
    num_replicas = _number(int, "num_replicas", values.pop("num_replicas", 1))
    num_cpus = _number(float, "num_cpus", values.pop("num_cpus", values.get("num_threads", 1)))
    max_ongoing = _number(int, "max_ongoing_requests", values.pop("max_ongoing_requests", MAX_ONGOING))
    known = settings_by_name({**SERVER_SECTIONS, **SECTIONS})
    for name, value in values.items():
        if isinstance(value, str) and name in known:
            values[name] = parse_text(known[name].info, value)
    found = Deployment(num_replicas, num_cpus, max_ongoing, values)
    found.configs()  # what is wrong is said here, not by a replica in its log
    return found


def build(args: dict[str, Any]) -> Any:
    """The application, as `serve run` and Serve's config files ask for it.

    Raises:
        ConfigError, UnsupportedError: Ray Serve is not installed, or an argument is wrong.
    """
    deployment = read_deployment(args)
    try:
        serve = importlib.import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(f"Ray Serve cannot be imported: {error}", hint="pip install 'quire[ray-serve]'") from error
    life = ReplicaLife(deployment)

    def make() -> ReplicaLife:
        return life

    class Quire:
        """A replica."""

        async def check_health(self) -> None:
            """Asked by Serve: a replica whose engine has stopped for good is replaced."""
            life.check_health()

    options = {"num_cpus": deployment.num_cpus}
    return serve.deployment(
        serve.ingress(make)(Quire),
        name="Quire", num_replicas=deployment.num_replicas, ray_actor_options=options,
        max_ongoing_requests=deployment.max_ongoing_requests, health_check_period_s=HEALTH_PERIOD_S,
    ).bind()  # fmt: skip


class ReplicaLife:
    """The ASGI application of a replica, made when the replica starts: an engine and the routes in front of it."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._engine: AsyncLLM | None = None
        self._app: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one event of ASGI; the first is the start of the application."""
        if self._app is None:
            self._start()
        if scope["type"] == "http":
            from quire.server.http.connection import STATE_KEY, SentBody

            connection = SentBody(send)
            scope["state"] = {**scope.get("state", {}), STATE_KEY: connection}
            send = connection.send
        await self._app(scope, receive, send)

    def check_health(self) -> None:
        """Raise when the engine has stopped for good; while a core is replaced, streams wait."""
        if self._engine is not None and self._engine.errored:
            raise RuntimeError("the engine has stopped")

    def _start(self) -> None:
        from quire.config.resolve import UsageContext  # late, in the replica
        from quire.engine.async_llm import AsyncLLM
        from quire.engine.mp_factory import begin_start
        from quire.logger import configure_logging
        from quire.server.app import make_app

        config, server = self._deployment.configs()
        configure_logging(config.observability.log_level, config.observability.log_format)
        self._engine = AsyncLLM.from_start(begin_start(config, usage=UsageContext.API_SERVER))
        self._app = make_app(self._engine, server)

    def close(self) -> None:
        """End the engine; harmless when repeated."""
        if self._engine is not None:
            self._engine.shutdown()

    def __del__(self) -> None:
        self.close()


def _number(kind: type[T], name: str, value: Any) -> T:
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = kind()
    if not number > 0:
        raise ConfigError(f"{name} is {shown(value)}", hint="use a number above 0", field=name)
    return number

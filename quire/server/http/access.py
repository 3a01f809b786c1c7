"""Who may reach which path. A path that is not in the table needs a key, and a test fails until it is.

Read by the middleware. No state.
"""

from __future__ import annotations

from enum import Enum

from starlette.types import Scope


class Access(Enum):
    """Who may ask."""

    OPEN = "public: for load balancers, or without information about this server"
    KEY = "needs an API key, if keys are configured"
    OPERATOR = "needs an operator API key; does not exist without keys"


ROUTE_ACCESS = {
    "/": Access.OPEN,
    "/live": Access.OPEN,
    "/health": Access.OPEN,
    "/ping": Access.OPEN,
    "/ready": Access.OPEN,
    "/docs": Access.OPEN,
    "/page/{name}": Access.OPEN,
    "/debug/state": Access.KEY,
    "/debug/requests": Access.KEY,
    "/debug/config": Access.KEY,
    "/debug/plan": Access.KEY,
    "/load": Access.KEY,
    "/metrics": Access.KEY,
    "/version": Access.KEY,
    "/tokenizer_info": Access.KEY,
    "/invocations": Access.KEY,
    "/openapi.json": Access.KEY,
    "/models": Access.KEY,
    "/models/load": Access.KEY,
    "/models/unload": Access.KEY,
    "/v1/models": Access.KEY,
    "/v1/models/": Access.KEY,
    "/v1/models/{model:path}": Access.KEY,
    "/v1/completions": Access.KEY,
    "/v1/chat/completions": Access.KEY,
    "/v1/chat/completions/batch": Access.KEY,
    "/v1/responses": Access.KEY,
    "/v1/responses/input_tokens": Access.KEY,
    "/v1/responses/{response_id}": Access.KEY,
    "/v1/responses/{response_id}/cancel": Access.KEY,
    "/v1/responses/{response_id}/input_items": Access.KEY,
    "/v1/messages": Access.KEY,
    "/v1/messages/count_tokens": Access.KEY,
    "/v1/usage": Access.KEY,
    "/tokenize": Access.KEY,
    "/detokenize": Access.KEY,
    "/reset_prefix_cache": Access.OPERATOR,
    "/server_info": Access.OPERATOR,
    "/scale_elastic_ep": Access.OPERATOR,
    "/snapshot_request": Access.OPERATOR,
    "/resume_request": Access.OPERATOR,
    "/restart_replicas": Access.OPERATOR,
    "/start_profile": Access.OPERATOR,
    "/stop_profile": Access.OPERATOR,
    "/update_weights": Access.OPERATOR,
    "/weight_info": Access.OPERATOR,
    "/sleep": Access.OPERATOR,
    "/wake_up": Access.OPERATOR,
    "/is_sleeping": Access.OPERATOR,
    "/pause": Access.OPERATOR,
    "/resume": Access.OPERATOR,
    "/is_paused": Access.OPERATOR,
}
OPEN_PATHS = frozenset(path for path, access in ROUTE_ACCESS.items() if access is Access.OPEN)


PAGE_FILES = "/page/"
"""Below it are the files of the page, which are the same on every server."""
PROBE_PATHS = OPEN_PATHS
"""Health paths: an answer that the server is not well is not a refusal."""


def is_open(scope: Scope) -> bool:
    """True for a path that needs no key, below the prefix (`root_path`) that a proxy adds."""
    path = own_path(scope)
    return path in OPEN_PATHS or (path.startswith(PAGE_FILES) and "/" not in path[len(PAGE_FILES) :])


def is_probe(scope: Scope) -> bool:
    """True for one of `PROBE_PATHS`."""
    return own_path(scope) in PROBE_PATHS


def own_path(scope: Scope) -> str:
    """The path of a request, below that prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

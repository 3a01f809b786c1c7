"""What a worker of NVIDIA Dynamo is: its place in the cluster, and which part of a request it does.

Read by `quire dynamo` alone. Names and environment variables are those of Dynamo's own workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting

MODES = ("agg", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoConfig:
    """Place in a Dynamo deployment; None = what Dynamo's environment variables (DYN_...) say."""

    namespace: str | None = setting(None, "Dynamo namespace; default: DYN_NAMESPACE, else dynamo.")
    component: str = setting("backend", "Name of the component; prefill workers are named prefill by default.")
    endpoint: str = setting("generate", "Name of the endpoint.")
    endpoint_types: str = setting("chat,completions", "APIs that the front end offers for the model.")
    discovery_backend: str | None = setting(
        None, "How workers are found: kubernetes, etcd, file or mem; default: DYN_DISCOVERY_BACKEND, else etcd."
    )
    request_plane: str | None = setting(None, "How requests come: tcp or nats; default: DYN_REQUEST_PLANE, else tcp.")
    response_plane: str | None = setting(None, "How responses go: tcp or quic; default: DYN_RESPONSE_PLANE, else tcp.")
    event_plane: str | None = setting(None, "How events go: zmq or nats; default: DYN_EVENT_PLANE.")
    disaggregation_mode: str = setting(
        "agg", "agg = whole requests; prefill = prompts, whose KV cache a decode worker takes over through "
        "kv_transfer_config; decode = the rest.", choices=MODES,
    )  # fmt: skip
    enable_kv_routing: bool = setting(
        True, "Publish events of the prefix cache and the load, by which the front end chooses a worker."
    )
    dyn_tool_call_parser: str | None = setting(None, "Parser of tool calls, which runs in Dynamo's front end.")
    dyn_reasoning_parser: str | None = setting(None, "Parser of reasoning, which runs in Dynamo's front end.")

    def __post_init__(self) -> None:
        check_settings(self)

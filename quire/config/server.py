"""The HTTP server: where it listens, who may use it, and what one request may ask for.

Read by `quire serve` alone; an engine in a Python program knows none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.base import check_settings, setting
from quire.config.json_object import parse_object
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Address, TLS, CORS and shutdown."""

    host: str = setting("127.0.0.1", "Address to listen on; default: localhost only.", overruled_by=("uds",))
    port: int = setting(
        8000, "TCP port; 0 = any free one, named in the log.", minimum=0, maximum=65535, overruled_by=("uds",)
    )
    uds: str | None = setting(
        None, "Path of a Unix socket to listen on, instead of host and port; only this user can connect to it."
    )
    api_server_count: int = setting(
        1,
        "Front-end processes: each serves a part of the connections of one address, with the limits of tenants and "
        "server counted together. One process is enough for some 10,000 streamed tokens per second.",
        minimum=1,
        maximum=64,
    )
    root_path: str = setting("", "Path prefix added by a reverse proxy.")
    ssl_keyfile: str | None = setting(None, "TLS: file of the private key (PEM).", needs=("ssl_certfile",))
    ssl_certfile: str | None = setting(None, "TLS: file of the certificate chain (PEM); turns TLS on.")
    ssl_ca_certs: str | None = setting(
        None, "TLS: CA bundle that verifies client certificates (mTLS).", needs=("ssl_certfile",)
    )
    ssl_cert_reqs: int | None = setting(
        None,
        "TLS client certificates: 0 = not requested, 1 = optional, verified if sent, 2 = required. "
        "Default: 2 with ssl_ca_certs, else 0.",
        minimum=0,
        maximum=2,
        needs=("ssl_certfile",),
    )
    ssl_ciphers: str | None = setting(
        None, "TLS: ciphers up to TLS 1.2, in OpenSSL's form; default: OpenSSL's own.", needs=("ssl_certfile",)
    )
    enable_ssl_refresh: bool = setting(
        False, "TLS: reload certificate, key and CA bundle when a file changes.", needs=("ssl_certfile",)
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "CORS: origins of web pages that may call the server, or *; empty = none."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Host names that requests may use besides IP addresses and localhost when the server listens on "
        "a loopback address without keys; * = any. For a proxy on this machine that forwards its own "
        "name.",
    )
    allowed_methods: tuple[str, ...] = setting(
        ("*",), "CORS: methods that these origins may use; * = all.", needs=("allowed_origins",)
    )
    allowed_headers: tuple[str, ...] = setting(
        ("*",), "CORS: request headers that these origins may send; * = all.", needs=("allowed_origins",)
    )
    allow_credentials: bool = setting(
        False, "CORS: these origins may send cookies and client certificates.", needs=("allowed_origins",)
    )
    timeout_keep_alive: int = setting(5, "Keep-alive: seconds an idle connection stays open.", minimum=1, maximum=86400)
    shutdown_timeout: int = setting(
        30, "Seconds for running requests to finish after SIGTERM; the rest are aborted.",
        minimum=0, maximum=86400,
    )  # fmt: skip
    disable_access_log: bool = setting(
        False, "Do not log a line for each HTTP request.", aliases=("disable_uvicorn_access_log",)
    )
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (), "Paths left out of the access log, such as /health,/metrics.", overruled_by=("disable_access_log",)
    )
    disable_fastapi_docs: bool = setting(False, "Do not serve /openapi.json.")
    disable_page: bool = setting(False, "Do not serve the page at /: browsers get the line that other clients get.")
    disable_debug: bool = setting(
        False, "Do not serve /debug/state and the other paths below /debug, nor keep what they show of recent requests."
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials would let every web page act with a user's cookies",
                hint="name the pages in allowed_origins, not *",
                field="allow_credentials",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """API keys, and the behaviour of the API."""

    api_key: tuple[str, ...] = setting(
        (),
        "API keys; clients must send one of them (Authorization: Bearer ...). Visible in the process list: "
        "prefer a file.",
        is_secret=True, splits=False,
    )  # fmt: skip
    api_key_file: str | None = setting(
        None,
        "File of API keys: one per line, optionally as tenant=key, or YAML with limits for each tenant. "
        "Reloaded when it changes. The environment variable QUIRE_API_KEY adds one key.",
    )
    isolate_tenants: bool = setting(
        True, "Tenants do not share prefix-cache blocks: each hits only its own.", needs=("api_key_file",)
    )
    shared_prefixes: str | None = setting(
        None,
        "YAML file of prompt prefixes whose full blocks are shared by all tenants in the prefix cache: lines of "
        "name: {system: text}, {text: text} or {token_ids: [...]}.",
    )
    strict_requests: bool = setting(
        False, "Reject request fields that are unknown or have no effect; default: list them in `warnings`."
    )
    allow_special_tokens: bool = setting(
        False, "Parse special tokens in text prompts of /v1/completions; default: they are plain text."
    )
    trust_request_chat_template: bool = setting(False, "Accept a chat template in a request (sandboxed).")
    default_chat_template_kwargs: str | None = setting(
        None,
        'JSON object: default variables of the chat template, such as {"enable_thinking": false}.',
        is_json=True,
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "Leave tools out of the prompt of a request with tool_choice none."
    )
    chat_template_content_format: str = setting(
        "auto", "Form in which message contents are passed to the chat template.", choices=("auto", "string", "openai")
    )
    enable_auto_tool_choice: bool = setting(
        True, "Let the model decide whether to call a tool that a request offers (tool_choice auto)."
    )
    tool_call_parser: str = setting(
        "auto",
        "Format of the model's tool calls: hermes, llama3_json, pythonic, mistral, deepseek_v3, glm45, granite, "
        "minimax_m2, qwen3_coder, openai, ... (docs/how-to/tools.md lists all), a plugin's, pattern (see "
        "tool_call_format), auto = as the chat template writes them, none.",
    )
    tool_call_format: str | None = setting(
        None, "File (YAML) that describes tool calls by begin, end and pattern, for tool_call_parser=pattern."
    )
    hold_tool_calls: bool = setting(
        False,
        "Buffer tool calls until they are complete; broken or truncated ones are returned as content. "
        "Default: arguments are streamed.",
        needs=("tool_call_parser",),
    )
    reasoning_parser: str | None = setting(
        None,
        "Format of the model's reasoning, which responses then have as `reasoning`: think, qwen3, deepseek_r1, glm45, "
        "granite, minimax_m2, openai_gptoss, ... (docs/how-to/tools.md lists all), or a plugin's.",
    )
    response_role: str = setting("assistant", "Role of the messages that the model generates.")
    return_tokens_as_token_ids: bool = setting(
        False, "Write tokens in logprobs as token_id:N, unless the request says otherwise."
    )
    enable_force_include_usage: bool = setting(
        False, "Include usage in every chunk of a stream and at its end, even if not requested."
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, "Serve /tokenizer_info: the tokenizer's settings and the chat template."
    )
    enable_per_request_metrics: bool = setting(
        False,
        "Add `metrics` to every response: wall time by phase in milliseconds, cached tokens, "
        "preemptions, engine restarts.",
        aliases=("enable_receipts",),
    )
    enable_log_requests: bool = setting(False, "Log each request's parameters (never its text) when it arrives.")
    sse_keep_alive_interval: int = setting(
        15,
        "SSE keep-alive: seconds without data after which a comment line is sent; 0 = never.",
        minimum=0,
        maximum=3600,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        parse_object("default_chat_template_kwargs", self.default_chat_template_kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits on request size and concurrency."""

    max_body_bytes: int | None = setting(
        None,
        "Maximum size of a request body in bytes; larger ones get 413. Default: 16 for each character "
        "that a prompt of the model can have, at least 4 MiB and at most 32 MiB.",
        minimum=1024, maximum=1 << 32, is_size=True,
    )  # fmt: skip
    max_bodies_bytes: int = setting(
        256 << 20,
        "Total bytes of request bodies being processed; with several tenants, each may use half. Beyond "
        "it requests get 503 and Retry-After.",
        minimum=1 << 16, maximum=1 << 44, is_size=True,
    )  # fmt: skip
    max_header_bytes: int = setting(
        32 << 10, "Maximum size of the request line and headers in bytes.", minimum=1024, maximum=8 << 20, is_size=True,
        aliases=("h11_max_incomplete_event_size",),
    )  # fmt: skip
    max_json_depth: int = setting(64, "Maximum nesting depth of JSON in a body.", minimum=4, maximum=200)
    max_json_containers: int = setting(
        100_000, "Maximum number of JSON lists and objects in a body, and of members of objects.",
        minimum=100, maximum=1 << 26,
    )  # fmt: skip
    max_json_entries: int = setting(
        1 << 20,
        "Maximum number of entries of all lists and objects in a body, such as token ids.",
        minimum=1024,
        maximum=1 << 30,
    )
    max_connections: int | None = setting(
        None, "Maximum number of connections; beyond it the longest idle one is closed, or the new one gets "
        "503. Default: the limit of open files minus 256, at most 16384.", minimum=1,
    )  # fmt: skip
    head_timeout: int = setting(20, "Seconds to receive the headers of a request.", minimum=1, maximum=86400)
    body_timeout: int = setting(60, "Seconds to receive the body of a request.", minimum=1, maximum=86400)
    write_timeout: int = setting(
        120, "Seconds without reading after which a client is disconnected.", minimum=1, maximum=86400
    )
    max_completion_prompts: int = setting(1024, "Maximum number of prompts in a request.", minimum=1, maximum=65536)
    max_answers: int = setting(
        1024, "Maximum number of completions of a request: prompts times n.", minimum=1, maximum=65536
    )
    max_stop_strings: int = setting(64, "Maximum number of stop strings in a request.", minimum=1, maximum=1024)
    max_stop_chars: int = setting(1024, "Maximum characters of a stop string.", minimum=1, maximum=1 << 20)
    max_id_entries: int = setting(
        4096, "Maximum entries of stop_token_ids, allowed_token_ids and logit_bias.", minimum=1, maximum=1 << 20
    )
    max_num_queued_reqs: int | None = setting(
        None, "Maximum number of waiting sequences; beyond it requests get 429 and Retry-After.", minimum=0
    )
    max_num_queued_tokens: int | None = setting(
        None, "Maximum prompt tokens of waiting requests; beyond it requests get 429 and Retry-After.", minimum=0,
        is_size=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """OpenTelemetry traces (needs `quire[otel]`)."""

    otlp_traces_endpoint: str | None = setting(
        None,
        "URL of an OTLP/HTTP trace collector, such as http://127.0.0.1:4318/v1/traces; one span per "
        "request, and one per phase.",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesConfig:
    """Storage of /v1/responses."""

    response_store: str = setting(
        "memory",
        "Where responses are stored for previous_response_id and GET /v1/responses/{id}: memory, none, "
        "or the path of an SQLite file (persistent; used by one server at a time).",
    )
    response_store_max_responses: int = setting(
        10_000, "Maximum number of stored responses; beyond it the least recently used response of the largest "
        "tenant is evicted.", minimum=1,
        maximum=1 << 31, needs=("response_store",),
    )  # fmt: skip
    response_store_max_bytes: int = setting(
        256 << 20, "Maximum total size of stored responses in bytes.", minimum=1 << 16, maximum=1 << 40, is_size=True,
        needs=("response_store",),
    )  # fmt: skip
    response_store_max_age: int = setting(
        30 * 86400, "Seconds after which a stored response expires; 0 = never.", minimum=0, maximum=1 << 31,
        needs=("response_store",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageConfig:
    """Record of the tokens that tenants use."""

    usage_ledger: str | None = setting(
        None,
        "SQLite file in which tokens are counted by day, tenant, API key (its fingerprint) and model, across restarts; "
        "`quire usage` and GET /v1/usage read it. Several servers may share one.",
    )
    usage_ledger_max_days: int = setting(
        400, "Days after which rows of the usage ledger are deleted.", minimum=1, maximum=36_500,
        needs=("usage_ledger",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlessConfig:
    """An engine behind a front end of vLLM's, in place of the HTTP server."""

    headless: bool = setting(
        False, "No HTTP server: serve a front end that speaks vLLM's EngineCore protocol, such as vllm-rs serve, which "
        "starts this command by itself (--python quire).",
    )  # fmt: skip
    data_parallel_address: str | None = setting(
        None, "Address of the front end; default 127.0.0.1.", needs=("headless",)
    )
    data_parallel_rpc_port: int | None = setting(
        None, "Port on which the front end waits for engines.", minimum=1, maximum=65535, needs=("headless",)
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.headless and self.data_parallel_rpc_port is None:
            raise ConfigError(
                "headless needs the port of a front end",
                hint="give data_parallel_rpc_port, or start the front end with vllm-rs serve MODEL --python quire",
                field="data_parallel_rpc_port",
            )  # fmt: skip

    @property
    def front_end(self) -> str:
        """The ZeroMQ address of the front end."""
        host = self.data_parallel_address or "127.0.0.1"
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.data_parallel_rpc_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server; those of the engine are separate."""

    http: HttpConfig = field(default_factory=HttpConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    usage: UsageConfig = field(default_factory=UsageConfig)
    headless: HeadlessConfig = field(default_factory=HeadlessConfig)

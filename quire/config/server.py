"""The HTTP server: where it listens, who may use it, and what one request may ask for.

Read by `quire serve` alone; an engine in a Python program knows none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.base import check_settings, setting
from quire.config.overrides import parse_object
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where the server listens, and how it ends."""

    host: str = setting("127.0.0.1", "Address to listen on; the default is reached from this machine alone.")
    port: int = setting(8000, "TCP port; 0 = any free one, named in the log.", minimum=0, maximum=65535)
    uds: str | None = setting(
        None, "Path of a Unix socket to listen on, in place of host and port; only this user can connect to it."
    )
    root_path: str = setting("", "Path prefix under which a proxy shows the server.")
    ssl_keyfile: str | None = setting(None, "TLS: file of the private key (PEM).")
    ssl_certfile: str | None = setting(None, "TLS: file of the certificate chain (PEM); turns TLS on.")
    ssl_ca_certs: str | None = setting(None, "TLS: certificates of authorities that clients' certificates must be of.")
    ssl_cert_reqs: int | None = setting(
        None,
        "TLS: 0 = clients need no certificate, 1 = one that is shown is checked, 2 = they need one. Default: 2 with "
        "ssl_ca_certs, else 0.",
        minimum=0,
        maximum=2,
    )
    ssl_ciphers: str | None = setting(None, "TLS: ciphers up to TLS 1.2, in OpenSSL's form; default: OpenSSL's own.")
    enable_ssl_refresh: bool = setting(False, "TLS: read certificate, key and authorities again when a file changes.")
    allowed_origins: tuple[str, ...] = setting(
        (), "Web pages that may call the server from a browser: origins, or *; empty = none (no CORS)."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Host names that requests may have, beside IP addresses and localhost, when the server listens on a loopback "
        "address without keys; * = any. For a proxy on this machine that passes on its own name.",
    )
    allowed_methods: tuple[str, ...] = setting(("*",), "Methods that these pages may use; * = all.")
    allowed_headers: tuple[str, ...] = setting(("*",), "Request headers that these pages may send; * = all.")
    allow_credentials: bool = setting(False, "These pages may send cookies and client certificates.")
    timeout_keep_alive: int = setting(
        5, "Seconds an idle connection stays open between two requests.", minimum=1, maximum=86400
    )
    shutdown_timeout: int = setting(
        30, "Seconds that running answers get to finish after SIGTERM; what is left then ends with reason abort.",
        minimum=0, maximum=86400,
    )  # fmt: skip
    disable_access_log: bool = setting(
        False, "Do not log a line for each HTTP request.", aliases=("disable_uvicorn_access_log",)
    )
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (), "Paths whose requests get no line in the access log, such as /health,/metrics."
    )
    disable_fastapi_docs: bool = setting(False, "Do not serve /openapi.json.")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ConfigError(
                "allow_credentials would let every web page act with a user's cookies",
                hint="name the pages in allowed_origins, not *",
                field="allow_credentials",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """Keys, and what the API does beyond the model's own settings."""

    api_key: tuple[str, ...] = setting(
        (),
        "Keys that requests must show one of (Authorization: Bearer ...). Visible in the process list: prefer a file.",
        is_secret=True, splits=False,
    )  # fmt: skip
    api_key_file: str | None = setting(
        None,
        "File of keys: one a line, optionally as tenant=key, or YAML with limits for each tenant. Read again when it "
        "changes. QUIRE_API_KEY in the environment holds one key too.",
    )
    isolate_tenants: bool = setting(True, "Each tenant finds only its own pages in the prefix cache.")
    shared_prefixes: str | None = setting(
        None,
        "File (YAML) of prompt beginnings whose full pages in the prefix cache are shared by all tenants: lines of "
        "name: {system: text}, {text: text} or {token_ids: [...]}.",
    )
    strict_requests: bool = setting(
        False, "Refuse request fields that are unknown or have no effect; default: name them in `warnings`."
    )
    allow_special_tokens: bool = setting(
        False, "Read names of control tokens in a text prompt of /v1/completions as these tokens, not as plain text."
    )
    trust_request_chat_template: bool = setting(False, "Let a request bring its own chat template (sandboxed).")
    default_chat_template_kwargs: str | None = setting(
        None,
        'JSON object: variables of the chat template where a request sets none, such as {"enable_thinking": false}.',
        is_json=True,
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "Leave tools out of the prompt of a request with tool_choice none."
    )
    chat_template_content_format: str = setting(
        "auto", "How message contents are given to the chat template.", choices=("auto", "string", "openai")
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
        "Tell a tool call when it is complete, so that one that is broken or cut stays content; default: its arguments "
        "are told as they are written.",
    )
    reasoning_parser: str | None = setting(
        None,
        "Format of the model's thinking, which answers then have as `reasoning`: think, qwen3, deepseek_r1, glm45, "
        "granite, minimax_m2, openai_gptoss, ... (docs/how-to/tools.md lists all), or a plugin's.",
    )
    response_role: str = setting("assistant", "Role of the answers of a chat.")
    return_tokens_as_token_ids: bool = setting(
        False, "Write tokens in logprobs as token_id:N unless a request says no."
    )
    enable_force_include_usage: bool = setting(
        False, "Tell usage in every chunk of a stream and at its end, asked for or not."
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, "Answer /tokenizer_info with the tokenizer's settings and the chat template."
    )
    enable_per_request_metrics: bool = setting(
        False,
        "Add `metrics`, a receipt, to every answer: the phases of its wall time in milliseconds, cached tokens, "
        "preemptions, restarts of the engine that it outlived.",
        aliases=("enable_receipts",),
    )
    enable_log_requests: bool = setting(False, "Log each request's parameters (never its text) when it arrives.")
    sse_keep_alive_interval: int = setting(
        15, "Seconds of silence after which a stream gets a comment line; 0 = never.", minimum=0, maximum=3600
    )

    def __post_init__(self) -> None:
        check_settings(self)
        parse_object("default_chat_template_kwargs", self.default_chat_template_kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """The most that one request, and all of them, may ask for."""

    max_body_bytes: int | None = setting(
        None,
        "Bytes of a request's body; more get 413. Default: 16 for each character that a prompt of the model can have, "
        "at least 4 MiB and at most 32 MiB.",
        minimum=1024, maximum=1 << 32, is_size=True,
    )  # fmt: skip
    max_bodies_bytes: int = setting(
        256 << 20,
        "Bytes of the bodies that are held until their prompts were read, of one tenant half of it where there are "
        "several; more get 503 and Retry-After.",
        minimum=1 << 16, maximum=1 << 44, is_size=True,
    )  # fmt: skip
    max_header_bytes: int = setting(
        32 << 10, "Bytes of a request's head.", minimum=1024, maximum=8 << 20, is_size=True,
        aliases=("h11_max_incomplete_event_size",),
    )  # fmt: skip
    max_json_depth: int = setting(64, "Levels of lists and objects in a body.", minimum=4, maximum=200)
    max_json_containers: int = setting(
        100_000, "Lists and objects in a body, each of which takes memory; and as many members of objects.",
        minimum=100, maximum=1 << 26,
    )  # fmt: skip
    max_json_entries: int = setting(
        1 << 20, "Entries of the lists and objects in a body, such as token ids.", minimum=1024, maximum=1 << 30
    )
    max_connections: int | None = setting(
        None, "Connections at once; more take the place of an idle one, or get 503. Default: the limit of open files "
        "less 256, at most 16384.", minimum=1,
    )  # fmt: skip
    head_timeout: int = setting(20, "Seconds for a request's head to arrive.", minimum=1, maximum=86400)
    body_timeout: int = setting(60, "Seconds for a request's body to arrive.", minimum=1, maximum=86400)
    write_timeout: int = setting(
        120, "Seconds after which a client that takes nothing of its answer is cut off.", minimum=1, maximum=86400
    )
    max_completion_prompts: int = setting(1024, "Prompts in one request.", minimum=1, maximum=65536)
    max_answers: int = setting(1024, "Answers to one request: prompts times n.", minimum=1, maximum=65536)
    max_stop_strings: int = setting(64, "Stop texts of a request.", minimum=1, maximum=1024)
    max_stop_chars: int = setting(1024, "Characters of a stop text.", minimum=1, maximum=1 << 20)
    max_id_entries: int = setting(
        4096, "Entries of stop_token_ids, allowed_token_ids and logit_bias.", minimum=1, maximum=1 << 20
    )
    max_num_queued_reqs: int | None = setting(
        None, "Answers that may wait for their turn; more are refused with 429 and Retry-After.", minimum=0
    )
    max_num_queued_tokens: int | None = setting(
        None, "Prompt tokens that may wait for their turn; more are refused with 429 and Retry-After.", minimum=0,
        is_size=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """OpenTelemetry traces (needs `quire[otel]`)."""

    otlp_traces_endpoint: str | None = setting(
        None,
        "URL of a collector that takes traces by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; one span for "
        "each request, and one for each of its phases.",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesConfig:
    """What /v1/responses keeps."""

    response_store: str = setting(
        "memory",
        "Where responses are kept for previous_response_id and GET /v1/responses/{id}: memory, the path of a file "
        "(SQLite; it outlives the server, which alone may use it), none.",
    )
    response_store_max_responses: int = setting(
        10_000, "Responses that are kept; then the tenant that has most loses its longest unused one.", minimum=1,
        maximum=1 << 31,
    )  # fmt: skip
    response_store_max_bytes: int = setting(
        256 << 20, "Bytes of responses that are kept.", minimum=1 << 16, maximum=1 << 40, is_size=True
    )
    response_store_max_age: int = setting(
        30 * 86400, "Seconds for which a response is kept; 0 = for ever.", minimum=0, maximum=1 << 31
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything about the server that is no matter of the engine."""

    http: HttpConfig = field(default_factory=HttpConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)

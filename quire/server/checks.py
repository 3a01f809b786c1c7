"""Mistakes in a server's settings that files and names show, found before anything costly is started.

Called by `quire serve` before the engine core starts. What a check needs is imported where it has something to check:
the core, which takes longest to start, waits for this. No state.
"""

from __future__ import annotations

from quire import envs
from quire.config import QuireConfig
from quire.config.server import ApiConfig, HttpConfig, ResponsesConfig, ServerConfig, TracingConfig, UsageConfig
from quire.errors import ConfigError
from quire.server.http.keys import read_checked_keys


def check_files(config: ServerConfig, policy: str) -> None:
    """Read keys and certificates, look for parsers and the store; `policy` is the scheduling_policy.

    Raises:
        ConfigError: one cannot be read, is unknown or has no effect.
    """
    keys = read_checked_keys(config, policy)
    _check_hosts(config.http, has_keys=bool(keys))
    _check_parsers(config.api)
    _check_store(config.responses)
    _check_tls(config.http)
    _check_tracing(config.tracing)
    _check_usage(config.usage)


def check_together(engine: QuireConfig, server: ServerConfig) -> None:
    """Refuse settings of the engine of a server of one model that have no effect with the server's.

    Raises:
        ConfigError: the setting is named.
    """
    supervision, structured = engine.supervision, engine.structured_outputs
    what = supervision.sleeping_requests
    # With a key an operator may pause a server that cannot sleep.
    may_reject = what == "reject" and bool(server.api.api_key or server.api.api_key_file or envs.api_keys())
    if what != "queue" and not supervision.enable_sleep_mode and not may_reject:
        raise ConfigError(
            f"sleeping_requests={what!r} has no effect without enable_sleep_mode",
            hint="set enable_sleep_mode, or leave out sleeping_requests", field="sleeping_requests",
        )  # fmt: skip
    if structured.enable_in_reasoning and structured.thinking_parser is None and server.api.reasoning_parser is None:
        name = "structured_outputs_enable_in_reasoning"
        raise ConfigError(
            f"{name} has no effect without reasoning_parser or structured_outputs_reasoning_parser",
            hint=f"set one of them, or leave out {name}", field=name,
        )  # fmt: skip


def _check_hosts(http: HttpConfig, *, has_keys: bool) -> None:
    if not http.allowed_hosts:
        return
    from quire.server.http.origins import is_loopback

    reasons = {"API keys": has_keys, "uds": http.uds is not None, f"host={http.host}": not is_loopback(http.host)}
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"allowed_hosts has no effect with {reason}: Host headers are checked where only this machine reaches "
                "the server, and without a key",
                hint="leave out allowed_hosts", field="allowed_hosts",
            )  # fmt: skip


def _check_parsers(api: ApiConfig) -> None:
    """Find the parsers that are named; the defaults name none."""
    if (api.tool_call_parser, api.tool_call_format, api.reasoning_parser) != ("auto", None, None):
        from quire.server.chat.named_parsers import check_parsers

        check_parsers(api)


def _check_store(responses: ResponsesConfig) -> None:
    """Try the file that is to keep responses."""
    if responses.response_store not in ("memory", "none"):
        from quire.server.api.responses.keeping import check_store

        check_store(responses)


def _check_tls(http: HttpConfig) -> None:
    """Load certificate, key, authorities and ciphers once, to see that they can be used."""
    given = (http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs, http.ssl_ciphers)
    if not (any(one is not None for one in given) or http.ssl_cert_reqs or http.enable_ssl_refresh):
        return
    import ssl

    from quire.server.http.tls import named_errors, tls_options

    tls_options(http)
    assert http.ssl_certfile is not None, "tls_options refuses the other settings without it"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with named_errors():
        context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile)
        if http.ssl_ca_certs is not None:
            context.load_verify_locations(http.ssl_ca_certs)
        if http.ssl_ciphers is not None:
            context.set_ciphers(http.ssl_ciphers)


def _check_tracing(tracing: TracingConfig) -> None:
    """Look for OpenTelemetry where there is somewhere to send to."""
    if tracing.otlp_traces_endpoint is not None:
        from quire.server.http.tracing import check_endpoint

        check_endpoint(tracing.otlp_traces_endpoint)


def _check_usage(usage: UsageConfig) -> None:
    """Look at the file that is to count tokens."""
    if usage.usage_ledger is not None:
        from quire.server.usage.ledger import check_ledger

        check_ledger(usage.usage_ledger)

"""Mistakes in a server's settings that files and names show, found before anything costly is started.

Called by `quire serve` before the engine core starts; imports no web framework. No state.
"""

from __future__ import annotations

import ssl

from quire.config.server import HttpConfig, ServerConfig
from quire.server.api.responses.keeping import check_store
from quire.server.chat.parsing import check_parsers
from quire.server.http.keys import read_checked_keys
from quire.server.http.tls import named_errors, tls_options
from quire.server.http.tracing import check_endpoint


def check_files(config: ServerConfig, policy: str) -> None:
    """Read keys and certificates, look for parsers and the store; `policy` is the scheduling_policy.

    Raises:
        ConfigError: one cannot be read, or is unknown.
    """
    read_checked_keys(config, policy)
    check_parsers(config.api)
    check_store(config.responses)
    _check_tls(config.http)
    if config.tracing.otlp_traces_endpoint is not None:
        check_endpoint(config.tracing.otlp_traces_endpoint)


def _check_tls(http: HttpConfig) -> None:
    """Load certificate, key, authorities and ciphers once, to see that they can be used."""
    if not tls_options(http):
        return
    assert http.ssl_certfile is not None, "tls_options refuses the other files without it"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with named_errors():
        context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile)
        if http.ssl_ca_certs is not None:
            context.load_verify_locations(http.ssl_ca_certs)
        if http.ssl_ciphers is not None:
            context.set_ciphers(http.ssl_ciphers)

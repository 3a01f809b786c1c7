"""TLS: the context of a server, and its files read again when they change.

Made by the launcher. `CertificateWatch` owns what it saw of the files last.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.config.server import HttpConfig
from quire.errors import ConfigError
from quire.logger import get_logger

logger = get_logger(__name__)

POLL_S = 2.0
Seen = tuple[tuple[int, int, int] | None, ...]


def tls_options(http: HttpConfig) -> dict[str, Any]:
    """Uvicorn's settings for TLS; none when it is off.

    Raises:
        ConfigError: a file is missing, or a setting needs another.
    """
    given = {
        "ssl_keyfile": http.ssl_keyfile, "ssl_certfile": http.ssl_certfile, "ssl_ca_certs": http.ssl_ca_certs,
        "ssl_ciphers": http.ssl_ciphers,
    }  # fmt: skip
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    asked = [*options, *(["ssl_cert_reqs"] if http.ssl_cert_reqs else [])]
    asked += ["enable_ssl_refresh"] if http.enable_ssl_refresh else []
    if asked and http.ssl_certfile is None:
        raise ConfigError(f"{asked[0]} needs ssl_certfile", hint="set ssl_certfile, too", field="ssl_certfile")
    if http.ssl_cert_reqs and http.ssl_ca_certs is None:
        raise ConfigError(
            f"ssl_cert_reqs={http.ssl_cert_reqs} needs ssl_ca_certs",
            hint="set the CA bundle that verifies client certificates", field="ssl_ca_certs",
        )  # fmt: skip
    for path in _files(http):
        if not path.is_file():
            name = next(name for name, value in options.items() if value == str(path))
            raise ConfigError(f"{name} {path}: file not found", hint="check the path", field=name)
    if options:
        options["ssl_cert_reqs"] = cert_reqs(http)
    return options


def cert_reqs(http: HttpConfig) -> int:
    """Whether clients must show a certificate: as set, else they must when there are authorities to check it."""
    if http.ssl_cert_reqs is not None:
        return http.ssl_cert_reqs
    return int(ssl.CERT_NONE if http.ssl_ca_certs is None else ssl.CERT_REQUIRED)


def harden(context: ssl.SSLContext) -> None:
    """TLS 1.2 at least, and no compression and no renegotiation that a client asks for."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


@contextmanager
def named_errors() -> Iterator[None]:
    """What OpenSSL says of the files, as a `ConfigError`."""
    try:
        yield
    except ssl.SSLError as error:
        raise ConfigError(
            f"the TLS certificate, key or ciphers cannot be used: {getattr(error, 'reason', None) or error.args[0]}",
            hint="certificate and key must be PEM and belong together; ciphers are in OpenSSL's form",
            field="ssl_certfile",
        ) from None


class CertificateWatch:
    """Reads certificate, key and authorities into the running context when a file of them changes.

    New connections get the new certificate; open ones go on. Files that do not belong together, as in the middle of
    an update, are left alone and looked at again.

    Args:
        context: of the server.
        http: names the files.
    """

    def __init__(self, context: ssl.SSLContext, http: HttpConfig) -> None:
        self._context = context
        self._http = http
        self._seen = self._look()

    async def run(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.refresh()

    def refresh(self) -> bool:
        """Look at the files once; returns whether they were read."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # the running context stays whole if this fails
            self._load(self._context)
        except (OSError, ssl.SSLError) as error:
            logger.warning("TLS files changed but cannot be used; keeping the previous certificate: %s", error)
            return False
        logger.info("TLS files reloaded: new connections use the new certificate")
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        assert self._http.ssl_certfile is not None, "TLS is on"
        context.load_cert_chain(self._http.ssl_certfile, self._http.ssl_keyfile)
        if self._http.ssl_ca_certs is not None:
            context.load_verify_locations(self._http.ssl_ca_certs)

    def _look(self) -> Seen:
        return tuple(_state_of(path) for path in _files(self._http))


def _files(http: HttpConfig) -> list[Path]:
    return [Path(path) for path in (http.ssl_keyfile, http.ssl_certfile, http.ssl_ca_certs) if path is not None]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

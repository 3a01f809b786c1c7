"""OriginRules: which web pages may reach a server that only this machine reaches, and that asks for no key.

A browser sends what any page asks it to. A page whose name is made to resolve to 127.0.0.1 (DNS rebinding) may even
read the answers. Such a request has the page's own name as its Host; one from another page has an Origin or a
Sec-Fetch-Site that says so. Asked by the gate. No state.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.types import Scope

from quire.config.server import HttpConfig
from quire.server.http.errors import FORBIDDEN, ApiError
from quire.utils.checks import shown

LOCAL_NAMES = frozenset(("localhost", "host.docker.internal", "host.containers.internal"))
"""Names that no web page can have: they never leave the machine."""
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.%]+)\]|(?P<name>[^:/@\[\]]*))(?::[0-9]*)?")
ANY = "*"


class OriginRules:
    """Refuses requests of foreign web pages.

    Args:
        config: where the server listens, and which names and pages are allowed.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._is_local = config.uds is None and is_loopback(config.host)
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request without a key is not answered; None when it is."""
        if not self._is_local:
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in CHECKED}
        host = headers.get(b"host")
        name = None if host is None else host_name(host)
        if host is not None and not (name and (is_address(name) or self._is_own(name))):
            return ApiError(
                FORBIDDEN,
                f"Host {shown(host)}: without API keys this server accepts only IP addresses and "
                    "localhost (DNS rebinding protection); start it with --allowed-hosts "
                    f"{shown(name or host)}, or with --api-key-file",
                param="host",
            )  # fmt: skip
        origin = headers.get(b"origin")
        if origin is None:
            is_foreign = headers.get(b"sec-fetch-site", "").lower() == "cross-site" and ANY not in self._origins
        else:
            is_foreign = not self._may_ask(origin.lower(), name)
        if not is_foreign:
            return None
        return ApiError(
            FORBIDDEN,
            f"the web page {shown(origin) if origin else 'that asks'} is from another origin; to allow "
                f"it, start the server with --allowed-origins {shown(origin) if origin else 'and its origin'}",
            param="origin" if origin else "sec-fetch-site",
        )  # fmt: skip

    def _may_ask(self, origin: str, host: str | None) -> bool:
        if origin in self._origins or ANY in self._origins:
            return True
        scheme, _, rest = origin.partition("://")
        name = host_name(rest)
        return scheme in ("http", "https") and bool(name) and (name == host or self._is_own(name) or is_loopback(name))

    def _is_own(self, name: str) -> bool:
        if name in LOCAL_NAMES or name.endswith(".localhost"):
            return True
        return name in self._hosts or ANY in self._hosts


CHECKED = frozenset((b"host", b"origin", b"sec-fetch-site"))


def host_name(host: str) -> str:
    """The name or address in `name:port`, lower-case; "" when it is malformed."""
    found = HOST.fullmatch(host.lower())
    return "" if found is None else found["ipv6"] or found["name"].removesuffix(".")


def is_address(name: str) -> bool:
    """True for an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)

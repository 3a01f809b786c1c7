"""Reports to the service manager (systemd, `Type=notify`): ready, draining, alive.

Called by the server that a service manager started. The protocol is sd_notify(3): datagrams of `NAME=value` lines to
the socket that NOTIFY_SOCKET names. Where the unit sets `WatchdogSec=`, the event loop reports that it runs three
times as often as is asked for; a server whose loop hangs is then restarted.
"""

from __future__ import annotations

import asyncio
import socket

from quire import envs
from quire.logger import get_logger

logger = get_logger(__name__)

REPORTS_PER_INTERVAL = 3


class ServiceManager:
    """What the process reports to who started it.

    Args:
        address: path of the manager's socket, one in the abstract namespace beginning with "@".
        watchdog_s: seconds between reports that it wants of a process that is alive; 0 = it wants none.

    Example:
        manager = ServiceManager.from_environment()
        if manager is not None:
            manager.ready("listening on http://127.0.0.1:8000")
    """

    def __init__(self, address: str, watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls) -> ServiceManager | None:
        """The manager that started this process; None where none asked for reports."""
        address = envs.notify_socket()
        return None if address is None else cls(address, envs.watchdog_s())

    def ready(self, status: str) -> None:
        """The process serves; `status` is shown by `systemctl status`."""
        self._send("READY=1", f"STATUS={status}")

    def draining(self, status: str, timeout_s: float) -> None:
        """The process ends within `timeout_s` seconds."""
        self._send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}")

    async def run(self) -> None:
        """Report that the event loop runs, until cancelled."""
        while self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / REPORTS_PER_INTERVAL)

    def _send(self, *lines: str) -> None:
        """A manager that cannot be reached is named in the log; the server serves all the same."""
        message = "\n".join(line.replace("\n", " ") for line in lines).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.setblocking(False)
                end.sendto(message, self._address)
        except OSError as error:
            logger.warning("NOTIFY_SOCKET: the service manager cannot be reached: %s", error)

"""Plays cases over real sockets and reads what comes back. Owns the connections that are kept between cases."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.robustness.server_fuzz.cases import Case

GIVE_UP_S, LOOK_S = 120.0, 1.0
LINGER_OFF = struct.pack("ii", 1, 0)


@dataclass
class Answer:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Outcome:
    """What a case brought.

    Attributes:
        raw: what could not be read as a response.
        gave_up: the server neither answered nor closed in time.
    """

    answers: list[Answer] = field(default_factory=list)
    raw: bytes = b""
    gave_up: bool = False


class Connection:
    """A TCP connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    def close(self) -> None:
        """Say goodbye."""
        self.writer.transport.abort() if self.writer.transport.get_write_buffer_size() else self.writer.close()

    def reset(self) -> None:
        """Vanish."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_OFF)
        self.writer.transport.abort()

    async def answer(self, method: str) -> Answer:
        """The next response.

        Raises:
            EOFError: there is none.
            ValueError: it is no HTTP.
        """
        status = 100
        while status == 100:
            head = await self._head()
            lines = head.decode("latin-1").split("\r\n")
            version, _, rest = lines[0].partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
                raise ValueError(head[:200])
            status = int(rest[:3])
        headers = dict(line.lower().partition(":")[::2] for line in lines[1:] if line)
        headers = {name: value.strip() for name, value in headers.items()}
        if method == "HEAD" or status in (204, 304):
            return Answer(status, headers, b"")
        if "content-length" in headers:
            return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, await self._chunks())
        return Answer(status, headers, await self.reader.read(-1))

    async def _head(self) -> bytes:
        try:
            return (await self.reader.readuntil(b"\r\n\r\n"))[:-4]
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise ValueError(error.partial) from None
            raise EOFError from None

    async def _chunks(self) -> bytes:
        parts = []
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            part = await self.reader.readexactly(size + 2)
            if not size:
                return b"".join(parts)
            parts.append(part[:-2])


class Progress:
    """Whether something still happens, however slow the machine: deadlines count from the last change of what is seen.

    Args:
        limit_s: without a change.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: object = None
        self._since_s = time.monotonic()

    def has_stopped(self, seen: object) -> bool:
        """Whether `seen` has been the same for too long."""
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        return time.monotonic() - self._since_s > self._limit_s


class Player:
    """Plays one case after another, on a kept connection where a case allows it.

    Args:
        progress: of all players, by what they have done.
        num_done: says what they have done.
    """

    def __init__(self, port: int, progress: Progress, num_done: Callable[[], int]) -> None:
        self._port = port
        self._progress, self._num_done = progress, num_done
        self._kept: Connection | None = None

    async def play(self, case: Case) -> Outcome:
        """Play `case`; a kept connection that the server has closed meanwhile is replaced."""
        outcome = Outcome()
        play = asyncio.create_task((self._play_kept if case.is_kept else self._play_alone)(case, outcome))
        while not (await asyncio.wait((play,), timeout=LOOK_S))[0]:
            if self._progress.has_stopped(self._num_done()):
                outcome.gave_up = True
                play.cancel()
                await asyncio.wait((play,))
                self.close()
                return outcome
        await play
        return outcome

    def close(self) -> None:
        """Close what is kept."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def _play_kept(self, case: Case, outcome: Outcome) -> None:
        for is_fresh in (self._kept is None, True):
            if self._kept is None:
                self._kept = await Connection.open(self._port)
            connection = self._kept
            try:
                for part in case.sends:
                    assert isinstance(part, bytes)
                    connection.writer.write(part)
                outcome.answers.append(await connection.answer(case.methods[0]))
                if outcome.answers[-1].headers.get("connection") == "close":
                    self.close()
                return
            except (EOFError, OSError, asyncio.IncompleteReadError):
                self.close()
                if is_fresh:
                    return
            except ValueError as error:
                outcome.raw = error.args[0] if isinstance(error.args[0], bytes) else repr(error).encode()
                self.close()
                return

    async def _play_alone(self, case: Case, outcome: Outcome) -> None:
        connection = await Connection.open(self._port)
        try:
            await self._send(connection, case)
            await self._end(connection, case, outcome)
        except (EOFError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except ValueError as error:
            outcome.raw = error.args[0] if isinstance(error.args[0], bytes) else repr(error).encode()
        finally:
            connection.close()

    async def _send(self, connection: Connection, case: Case) -> None:
        for part in case.sends:
            if connection.writer.is_closing():
                return
            if isinstance(part, bytes):
                connection.writer.write(part)
            else:
                await asyncio.sleep(part)

    async def _end(self, connection: Connection, case: Case, outcome: Outcome) -> None:
        if case.end == "leave":
            await connection.reader.read(1)
            connection.reset()
        elif case.end == "reset":
            await asyncio.sleep(0)
            connection.reset()
        elif case.end in ("answer", "half"):
            if case.end == "half":
                connection.writer.write_eof()
            for method in case.methods:
                outcome.answers.append(await connection.answer(method))
        elif case.end == "hold":
            if case.methods:
                outcome.answers.append(await connection.answer(case.methods[0]))
            await connection.reader.read(-1)

"""ResponseParser: an HTTP/1.1 response from bytes as they come. No sockets; owns what is not read yet."""

from __future__ import annotations

MAX_HEAD_BYTES = 1 << 16
MAX_SIZE_LINE_BYTES = 1 << 10
HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")
NO_BODY = frozenset((204, 304))


class ResponseError(Exception):
    """The peer broke off, or does not speak HTTP/1.1.

    Args:
        kind: "early close" or "malformed response".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ResponseParser:
    """Reads one response.

    Attributes:
        status: 0 until the head is complete.
        headers: by lower-case name; of repeated ones the last.
        has_begun: a byte has come.
        is_complete: the whole response has come.
        keeps_alive: the connection may be used again after it.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_begun = self.is_complete = False
        self.keeps_alive = True
        self._buffer = b""
        self._is_chunked = self._is_last_chunk = False
        self._left: int | None = 0  # bytes of the body or chunk; None = until the connection closes
        self._wants_line_end = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes in; returns what they add to the body.

        Raises:
            ResponseError: they are no HTTP response.
        """
        self.has_begun = True
        self._buffer = self._buffer + data if self._buffer else data
        while not self.status:
            if not self._read_head():
                return b""
        if self.is_complete:
            if self._buffer:
                raise malformed("bytes after the end of the response")
            return b""
        if self._is_chunked:
            return self._read_chunks()
        return self._read_plain()

    def end(self) -> None:
        """The connection closed.

        Raises:
            ResponseError: in the middle of the response.
        """
        if self.is_complete:
            return
        if self.status and self._left is None:
            self.is_complete = True
            return
        where = "in the middle of the body" if self.status else "before the response"
        raise ResponseError("early close", f"the server closed the connection {where}")

    def _read_head(self) -> bool:
        """Read a head if it is there; heads of interim responses (1xx) are passed over."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise malformed("the head is larger than 64 KiB")
            if not b"HTTP/1.".startswith(self._buffer[:7]):
                raise malformed(f"it begins with {self._buffer[:16]!r}")
            return False
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit() and len(code) == 3):
            raise malformed(f"the status line is {first[:80]!r}")
        if code.startswith("1"):
            return True
        self._read_headers(lines)
        self.keeps_alive = version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"
        self._frame(int(code))
        return True

    def _read_headers(self, lines: list[str]) -> None:
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise malformed(f"the header line is {line[:80]!r}")
            self.headers[name.lower()] = value.strip()

    def _frame(self, status: int) -> None:
        """How long the body is."""
        self.status = status
        coding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if status in NO_BODY:
            self.is_complete = True
        elif coding is not None:
            if coding.lower() != "chunked":
                raise malformed(f"transfer-encoding is {coding[:80]!r}")
            self._is_chunked = True
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise malformed(f"content-length is {length[:80]!r}")
            self._left = int(length)
            self.is_complete = self._left == 0
        else:
            self._left, self.keeps_alive = None, False

    def _read_plain(self) -> bytes:
        body, self._buffer = self._buffer, b""
        if self._left is None:
            return body
        if len(body) > self._left:
            raise malformed("the body is longer than content-length")
        self._left -= len(body)
        self.is_complete = self._left == 0
        return body

    def _read_chunks(self) -> bytes:
        data, position, parts = self._buffer, 0, []
        while not self.is_complete:
            if self._left:
                part = data[position : position + self._left]
                if not part:
                    break
                parts.append(part)
                position += len(part)
                self._left -= len(part)
                self._wants_line_end = not self._left
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                if len(data) - position > MAX_SIZE_LINE_BYTES:
                    raise malformed("a chunk has no size")
                break
            line, position = data[position:end], end + 2
            self._read_chunk_line(line)
        self._buffer = data[position:]
        if self.is_complete and self._buffer:
            raise malformed("bytes after the last chunk")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_chunk_line(self, line: bytes) -> None:
        if self._wants_line_end:
            if line:
                raise malformed("a chunk is longer than its size")
            self._wants_line_end = False
        elif self._is_last_chunk:  # trailers, up to an empty line
            self.is_complete = not line
        else:
            size = line.partition(b";")[0].strip()
            if not size or len(size) > 15 or not HEX_DIGITS.issuperset(size):
                raise malformed(f"the size of a chunk is {size[:40]!r}")
            self._left = int(size, 16)
            self._is_last_chunk = self._left == 0


def malformed(message: str) -> ResponseError:
    """An error for what is no HTTP/1.1 response."""
    return ResponseError("malformed response", message)

"""ResponseParser: an HTTP/1.1 response from bytes as they come, read by llhttp (`httptools`). No sockets."""

from __future__ import annotations

import httptools

MAX_HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 10  # that brings no body: sizes of chunks, their extensions, trailers
NO_BODY = frozenset((204, 304))


class ResponseError(Exception):
    """The peer broke off, or does not send HTTP/1.1.

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
        self._ends_with_connection = False
        self._num_idle_bytes = 0
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Take bytes in; returns what they add to the body.

        Raises:
            ResponseError: they are not an HTTP response.
        """
        self.has_begun = True
        self._num_idle_bytes += len(data)
        if self.is_complete:
            raise malformed("bytes after the end of the response")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            raise cause if isinstance(cause, ResponseError) else malformed(f"{error} in {data[:80]!r}") from None
        if self._body:
            self._num_idle_bytes = 0
        elif self._num_idle_bytes > (MAX_LINE_BYTES if self.status else MAX_HEAD_BYTES) and not self.is_complete:
            raise malformed("more than 1 KiB without a body" if self.status else "the head is larger than 64 KiB")
        parts, self._body = self._body, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> None:
        """The connection closed.

        Raises:
            ResponseError: in the middle of the response.
        """
        if self.status and self._ends_with_connection:
            self.is_complete = True
        if not self.is_complete:
            where = "in the middle of the body" if self.status else "before the response"
            raise ResponseError("early close", f"the server closed the connection {where}")

    def on_message_begin(self) -> None:
        """Called by llhttp at the first byte of a response."""
        if self.is_complete:
            raise malformed("bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by llhttp with each header, and with each trailer, which is left out."""
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by llhttp at the end of a head; an interim response (1xx) is passed over."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}
            return
        coding = self.headers.get("transfer-encoding")
        if coding is not None and coding.lower() != "chunked":
            raise malformed(f"transfer-encoding is {coding[:80]!r}")
        has_length = coding is not None or "content-length" in self.headers or status in NO_BODY
        self.status, self._ends_with_connection, self._num_idle_bytes = status, not has_length, 0
        is_closed = self.headers.get("connection", "").lower() == "close"
        self.keeps_alive = self._parser.get_http_version() == "1.1" and has_length and not is_closed

    def on_body(self, body: bytes) -> None:
        """Called by llhttp with a piece of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by llhttp at the last byte of a response."""
        self.is_complete = self.status != 0 and not self._ends_with_connection


def malformed(message: str) -> ResponseError:
    """An error for what is not an HTTP/1.1 response."""
    return ResponseError("malformed response", message)

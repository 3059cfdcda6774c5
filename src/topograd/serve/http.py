"""HTTP connections with bounds: bytes and time of a request's head, connections per client and in all.

httptools reads heads of any length, and uvicorn has no clock before the first request. Both are bounded here,
below the token check, which sees complete heads only.

    head bytes     received without a complete head or a piece of a body; the same bound holds for trailers
    head seconds   from the start of a connection, or the first byte of a later request, to a whole head
    half-open      connections of one client without a whole head: a new one closes the oldest
    connections    of one client, and of all; one too many is answered 503 and closed

A bound that is passed is answered in OpenAI's shape, and the connection is closed.
"""

import asyncio
import json
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from topograd.serve.responses import error_body

MAX_HEAD_BYTES = 2**16
MAX_HEADERS = 256
HEAD_SECONDS = 10.0
MAX_HALF_OPEN = 64
MAX_PER_CLIENT = 512
MAX_CONNECTIONS = 1024
_PIECE = 2**14
"""Bytes that are parsed at once: a long head is noticed after so many, before httptools joins its pieces."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's httptools protocol with bounds."""

    _unparsed = 0
    """Bytes since the last complete head or piece of a body."""
    _waiting: asyncio.TimerHandle | None = None
    """Ends the wait for a head; None while no head is waited for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        others = [
            c for c in self.connections if isinstance(c, BoundedHttp) and c.client and c.client[0] == host
        ]
        if len(self.connections) > MAX_CONNECTIONS or len(others) > MAX_PER_CLIENT:
            self._refuse(503, "there are too many connections; ask again later")
            return
        half_open = [c for c in others if c._waiting is not None]
        if len(half_open) >= MAX_HALF_OPEN:
            min(half_open, key=lambda c: c._waiting.when() if c._waiting else 0.0).transport.abort()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_whole()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            if self.transport.is_closing() or self.parser is None:
                return
            piece = data[start : start + _PIECE]
            self._unparsed += len(piece)
            super().data_received(piece)
            if self._unparsed > MAX_HEAD_BYTES:
                self._refuse(
                    431, f"the head of the request is too long; at most {MAX_HEAD_BYTES} bytes are read"
                )

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._waiting is None:  # a later request of this connection
            self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise httptools.HttpParserError(f"more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._head_is_whole()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    # Bounds

    def _wait_for_head(self) -> None:
        late = f"the head of the request did not arrive within {HEAD_SECONDS:g} s"
        self._waiting = self.loop.call_later(HEAD_SECONDS, lambda: self._refuse(408, late))

    def _head_is_whole(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        self._head_is_whole()
        if self.transport.is_closing():
            return
        body = json.dumps(error_body(message, status, None, None)).encode()
        headers: list[tuple[bytes, Any]] = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", body)))
        self.transport.close()

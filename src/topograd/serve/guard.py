"""Access control in front of the application.

    Host      without a token only names of this machine are allowed: a page elsewhere cannot reach the server
              under a name of its own (DNS rebinding)
    Origin    a page of another site gets 403, so it can neither read a response nor cost anything (CORS is
              closed: no header of it is ever sent)
    token     `Authorization: Bearer TOKEN`, wherever the server can be reached from elsewhere
    length    a body that is too long gets 413 before it is read

An internal error becomes an error in OpenAI's format, without a path or a trace.
"""

import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from topograd.serve.metrics import Counters
from topograd.serve.responses import error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
OPEN = ("/", "/health", "/favicon.ico")
"""Routes without a token: the page itself, which has a field for it, and the health check."""
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/candidates", "/tokenize", "/detokenize",
    "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings",
    "/tokenizer_info", "/metrics", "/openapi.json", "/health", "/",
)  # fmt: skip


class Guard:
    """Wraps an application."""

    def __init__(self, app: App, counters: Counters, token: str | None, body: int) -> None:
        """`token` is one, or several with commas between: each is a tenant of its own."""
        self.app, self.counters, self.body = app, counters, body
        self.tokens = [part.strip() for part in (token or "").split(",") if part.strip()]
        self.stopping = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *_SAFE]
            await send(message)

        refused = self._refusal(scope, headers)
        try:
            if refused is not None:
                await send_error(watched, *refused, path=scope["path"])
            else:
                await self.app(scope, receive, watched)
        except Exception as error:
            self.counters.failed(error)
            if not status:
                message = "the server failed; the reason is in its log"
                await send_error(watched, 500, message, path=scope["path"])
        finally:
            path = scope["path"] if scope["path"] in ROUTES else "other"
            self.counters.request(path, status or 499)

    def _refusal(self, scope: Message, headers: dict[str, str]) -> tuple[int, str] | None:
        """A status and why, or None if the request may be answered."""
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            return 400, "the request has two Host headers"
        if self.stopping and scope["path"] != "/health":
            return 503, "the server is stopping; try again later"
        if not self.tokens and not local(headers.get("host", "")):
            return 403, "this server can be used under names of its own machine only, such as localhost"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            return 403, "pages of other sites may not use this server"
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.body:
            return 413, f"the body has {length[:20]} bytes; at most {self.body} are allowed"
        if self.tokens and scope["path"] not in OPEN:
            kind, _, given = headers.get("authorization", "").partition(" ")
            token = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
            known = [hmac.compare_digest(token.encode(), each.encode()) for each in self.tokens]
            if not any(known):
                return 401, "the token is missing or wrong; send it as Authorization: Bearer TOKEN"
            scope["tenant"] = hashlib.sha256(token.encode()).hexdigest()
        return None


_SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:@/\[\]]+))(?::\d{1,5})?")
"""A Host header: a name or an address, and a port; nothing before an @, nothing behind a bracket."""


def local(host: str) -> bool:
    """Whether a Host header names this machine.

    >>> local("localhost:8123"), local("127.0.0.1"), local("[::1]:80"), local("example.org")
    (True, True, True, False)
    """
    matched = _HOST.fullmatch(host)
    return is_loopback(matched["six"] or matched["name"]) if matched else False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host's address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def send_error(send: Send, status: int, message: str, path: str = "") -> None:
    """Send an error in the format of a path's API."""
    body = json.dumps(error_body(message, status, path=path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 429:
        headers.append((b"retry-after", b"1"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""uvicorn's connection, with what a server in the open needs and a token stream.

TCP_NODELAY: a small write after another is otherwise held back until the client's delayed acknowledgement, which shows
as 44 ms in a token stream. A callback for a client that goes away: the ASGI way to learn it is a second
task for each request that waits in `receive`, a third of what a short request costs.

A request's head is bounded, in bytes and in time (`HttpServer` asks `is_late` each second): the parser keeps all of it,
and copies it with each piece that comes. What is no HTTP is told so in the words of our dialects. An offer to speak
another protocol (`Upgrade: h2c`, which Java's client makes with every first request) is not taken, and then the request
is one like any other, body and all.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fermata.core.errors import InvalidTurn, TurnError
from fermata.frontend.http.errors import HeadTooLarge, error_body

STATE_KEY = "fermata.connection"
MAX_HEAD_BYTES = 65_536


class ClientConnection(HttpToolsProtocol):
    on_lost: Callable[[], None] | None = None
    """Set by the request that is being answered; requests on one connection are answered one after another."""
    _head_since: float | None = None
    """Since when the rest of a head is awaited; None from its end to the beginning of the next."""
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head_since = self.loop.time()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def forget(self) -> None:
        """The answer is out; nobody waits for this connection's end."""
        self.on_lost = None

    @property
    def is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def is_late(self, *, before: float) -> bool:
        """It owes the rest of a head since then, and nothing of ours is on its way to it."""
        return self._head_since is not None and self._head_since < before and not self.is_answering

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        since = self._head_since
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(InvalidTurn("this is no HTTP/1.1 request"))
            return
        if since is not None and self._head_since == since:  # all of it belongs to one head
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadTooLarge(f"a request's head may have {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_since = self.loop.time()
        self._head_bytes = 0
        self.scope.setdefault("state", {})[STATE_KEY] = self

    def on_headers_complete(self) -> None:
        self._head_since = None
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """The parser has stopped at the head's end: it is read again without the offer, and what follows it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(InvalidTurn("this is no proxy"))
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _refuse(self, error: TurnError) -> None:
        in_the_middle = self.is_answering and (self.cycle.response_started or self.pipeline)
        if not in_the_middle:
            body = error_body(error)
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.transport.close()

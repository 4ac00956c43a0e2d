"""The response to one request, written straight to its connection where that is ours.

uvicorn's own `send` takes 10 us a call, twice a short answer and once a chunk, to find out again what is known here:
which headers, which framing. `DirectReply` does what it does for the two kinds of answer that turns give, in one write
where it can; on any other server, and in tests, `AsgiReply` says the same in ASGI's words.
"""

from __future__ import annotations

from typing import Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from fermata.frontend.http.asgi import Headers, Send


class Reply(Protocol):
    """`is_begun` decides how an error can still be told."""

    is_begun: bool
    is_ended: bool

    async def begin(self, status: int, headers: Headers) -> None: ...

    async def write(self, body: bytes) -> None:
        """Returns when the client may be sent more."""
        ...

    async def end(self, body: bytes) -> None: ...

    async def whole(self, status: int, headers: Headers, body: bytes) -> None: ...


def reply_to(send: Send) -> Reply:
    cycle = getattr(send, "__self__", None)
    return DirectReply(cycle) if isinstance(cycle, RequestResponseCycle) else AsgiReply(send)


class AsgiReply:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_begun = False
        self.is_ended = False

    async def begin(self, status: int, headers: Headers) -> None:
        self.is_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        self.is_ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)


class DirectReply:
    """Headers here are ours and well formed; nothing a client sent is ever among them."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._head = b""
        self.is_begun = False
        self.is_ended = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Goes out with the first piece of the body."""
        self.is_begun = True
        self._head = (
            self._status_and_headers(status, headers) + b"transfer-encoding: chunked\r\n\r\n"
        )

    async def write(self, body: bytes) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        self._send(b"%x\r\n%b\r\n" % (len(body), body))

    async def end(self, body: bytes) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        self.is_ended = True
        last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        self._send(last)
        self._complete()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.is_begun = self.is_ended = True
        head = self._status_and_headers(status, headers)
        # What follows the head of an answer to HEAD would be taken for the next answer.
        shown = b"" if self._cycle.scope["method"] == "HEAD" else body
        self._send(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), shown))
        self._complete()

    def _status_and_headers(self, status: int, headers: Headers) -> bytes:
        cycle = self._cycle
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        return STATUS_LINE[status] + b"".join(lines) + close

    def _send(self, data: bytes) -> None:
        cycle = self._cycle
        cycle.response_started = True
        if not cycle.disconnected:
            cycle.transport.write(self._head + data if self._head else data)
        self._head = b""

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if cycle.disconnected:
            return
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

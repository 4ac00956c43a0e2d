"""One HTTP exchange: its request's headers and body, and what can wake it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fermata.frontend.config import HttpLimits
from fermata.frontend.http.asgi import Message, Receive, Scope
from fermata.frontend.http.connection import STATE_KEY, ClientConnection
from fermata.frontend.http.errors import BodyTooLarge, NotJson, SlowBody


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


def headers_of(scope: Scope) -> dict[str, str]:
    """By lower-case name. Latin-1 maps every byte to itself: ids stay distinct, whatever their encoding."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_json_body(
    connection: ClientConnection | None,
    headers: dict[str, str],
    receive: Receive,
    *,
    limits: HttpLimits,
) -> bytes:
    """Bounded in bytes and in patience. A missing content type is taken for JSON."""
    _check_media_type(headers)
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body_bytes:
        raise BodyTooLarge(f"the body may have {limits.body_bytes} bytes")
    if connection is not None and not connection.cycle.more_body:  # the usual case needs no timer
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
    else:
        message = await _receive(receive, limits)
    if not message.get("more_body"):
        return bytes(message.get("body", b""))
    parts = [message.get("body", b"")]
    size = len(parts[0])
    while message.get("more_body"):
        message = await _receive(receive, limits)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limits.body_bytes:
            raise BodyTooLarge(f"the body may have {limits.body_bytes} bytes")
    return b"".join(parts)


def connection_of(scope: Scope) -> ClientConnection | None:
    """None on a server that is not ours."""
    connection = scope.get("state", {}).get(STATE_KEY)
    return connection if isinstance(connection, ClientConnection) else None


async def _receive(receive: Receive, limits: HttpLimits) -> Message:
    try:
        async with asyncio.timeout(limits.body_wait_s):
            message = await receive()
    except TimeoutError:
        raise SlowBody(f"no more of the body came for {limits.body_wait_s:g} s") from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def _check_media_type(headers: dict[str, str]) -> None:
    media = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise NotJson(f"send application/json, not {media!r}")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise NotJson(f"a body in {coding!r} can not be read; send it as it is")


class Waker:
    """What an exchange waits on: its turn, its client, its keep-alive. Any of them may wake it at any time."""

    __slots__ = ("_is_set", "_loop", "_waiter", "due_at", "is_due", "is_gone")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, due_at: float) -> None:
        self.due_at = due_at
        """Loop time at which the client must be sent something."""
        self.is_due = False
        self.is_gone = False
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._is_set = False

    def wake(self) -> None:
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def client_gone(self) -> None:
        self.is_gone = True
        self.wake()

    def nudge(self) -> None:
        self.is_due = True
        self.wake()

    async def wait(self) -> None:
        """Until woken since the last wait. ClientGone when the client went away."""
        if not self._is_set:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
        if self.is_gone:
            raise ClientGone

    def sent(self, *, keep_alive_s: float) -> None:
        self.is_due = False
        self.due_at = self._loop.time() + keep_alive_s


class KeepAlives:
    """Nudges exchanges whose client has heard nothing for too long: one timer for all of them, none for each."""

    def __init__(self, *, period_s: float) -> None:
        self._period_s = period_s
        self._wakers: set[Waker] = set()

    def __len__(self) -> int:
        return len(self._wakers)

    def add(self, waker: Waker) -> None:
        self._wakers.add(waker)

    def remove(self, waker: Waker) -> None:
        self._wakers.discard(waker)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._period_s)
            now = loop.time()
            for waker in [w for w in self._wakers if now >= w.due_at]:
                waker.nudge()


def watch(
    connection: ClientConnection | None, receive: Receive, waker: Waker
) -> Callable[[], None]:
    """Wakes it when the client goes away, until the result is called. On a server that is not ours a task has to
    wait for that."""
    if connection is None:
        task = asyncio.ensure_future(_wait_for_disconnect(receive, waker))
        return lambda: _cancel(task)
    connection.on_lost = waker.client_gone
    if connection.transport.is_closing():
        waker.client_gone()
    return connection.forget


def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()


async def _wait_for_disconnect(receive: Receive, waker: Waker) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    waker.client_gone()

"""The only module that imports zmq: a Listener (ROUTER) and Links (DEALER) that live in one event
loop.

Receiving: the socket's descriptor wakes the loop, then it is drained until EAGAIN, about
`DRAIN_LIMIT` messages a turn of the loop, each of a batch counted (awaiting messages one by one is
25 times dearer under backlog). The descriptor is edge-triggered, so the events are asked again after every send too.

Sending: what is sent to one destination in one turn of the loop leaves as one multipart message. A
destination that does not read (EAGAIN) keeps its outbox, bounded in bytes; beyond the bound `send`
returns False and the caller keeps the message. ROUTER_MANDATORY is on: without it a full pipe
drops silently.

Garbage is counted by kind, answered with a Fault where there is a caller, and never ends the
process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import zmq
from typing_extensions import Buffer
from zmq.utils import z85

from fermata.wire.codec import (
    MAX_BATCH,
    MAX_FRAME_BYTES,
    Malformed,
    Packet,
    Unsendable,
    WireError,
    WrongRole,
    decode,
    encode,
    encode_batch,
    fault,
)
from fermata.wire.keyring import KeyPair, Keyring
from fermata.wire.messages import Fault, Message, Role
from fermata.wire.roles import Kinds, Peer, allowed, allowed_to

__all__ = [
    "Context",
    "Link",
    "Listener",
    "NoEndpoint",
    "Packet",
    "Peer",
    "Unsendable",
    "WireCounters",
    "new_context",
    "new_key_pair",
]

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
OUTBOX_BYTES = 8 << 20
DRAIN_LIMIT = 256
RETRY_FIRST_S = 0.002
RETRY_MOST_S = 0.1


@dataclass(slots=True)
class WireCounters:
    received: int = 0
    sent: int = 0
    malformed: int = 0
    unknown_version: int = 0
    oversized: int = 0
    wrong_role: int = 0
    again: int = 0
    """Sends put off because the peer does not read."""
    refused: int = 0
    """Sends not taken because the outbox was full."""
    unreachable: int = 0
    handshake_failures: int = 0
    handler_errors: int = 0

    def numbers(self) -> dict[str, float]:
        return {f"wire_{f.name}": float(getattr(self, f.name)) for f in fields(self)}


class NoEndpoint(Exception):
    """Not an address that a Link can connect to, whoever named it."""


class Context(zmq.Context[zmq.Socket[bytes]]):
    """A ZeroMQ context and the keyring of everything made on it."""

    keyring: Keyring | None = None
    doorman: _Doorman | None = None


def new_context(keyring: Keyring | None = None) -> Context:
    context = Context()
    context.keyring = keyring
    return context


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


class _Doorman:
    """Answers libzmq's ZAP requests (RFC 27): lets a client key of the keyring in, as its role."""

    def __init__(self, context: Context, keyring: Keyring) -> None:
        self._keyring = keyring
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._loop.add_reader(self._socket.FD, self._answer_all)
        self._answer_all()  # a descriptor signals only to a reader that once found nothing

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)

    def _answer_all(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request, _domain, _address, _identity, mechanism, *credentials = frames
            role = None
            if mechanism == b"CURVE" and credentials:
                role = self._keyring.role_of(z85.encode(credentials[0]).decode())
            verdict = (
                [b"200", b"OK", role.value.encode()] if role else [b"400", b"no such key", b""]
            )
            self._socket.send_multipart([version, request, *verdict, b""], zmq.NOBLOCK)


class _Outbox:
    """What one destination has not been sent yet. `blocked` from the first EAGAIN until it
    drained."""

    __slots__ = ("blocked", "packets", "size")

    def __init__(self) -> None:
        self.packets: list[list[Buffer]] = []
        self.size = 0
        self.blocked = False

    def offer(self, frames: list[Buffer]) -> bool:
        size = sum(memoryview(f).nbytes for f in frames)
        if self.packets and (self.size + size > OUTBOX_BYTES or len(self.packets) >= MAX_BATCH):
            return False
        self.packets.append(frames)
        self.size += size
        return True


class _Endpoint:
    """What Listener and Link share: draining, outboxes, flushing, closing."""

    def __init__(self, context: Context, kind: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = _configured(context.socket(kind))
        self._boxes: dict[bytes, _Outbox] = {}
        self._dirty: dict[bytes, None] = {}
        self._flushing = False
        self._draining = False
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_FIRST_S
        self._closed = False
        self.counters = WireCounters()

    def _start(self) -> None:
        self._loop.add_reader(self._socket.FD, self._wake)
        self._wake()

    def close(self, *, linger_s: float = 0.0) -> None:
        """Flushes, then closes; `linger_s` is how long the context's end may wait for what is on
        its way."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=int(linger_s * 1000))

    def _wake(self) -> None:
        if not self._draining:
            self._drain()

    def _drain(self) -> None:
        self._draining = False
        if self._closed:
            return
        budget = DRAIN_LIMIT
        while budget > 0:
            try:
                frames = self._receive_frames()
            except zmq.Again:
                self._recheck()
                return
            before = self.counters.received
            self._take(frames)
            if self._closed:
                return
            budget -= max(1, self.counters.received - before)
        self._drain_soon()

    def _receive_frames(self) -> list[bytes]:
        return self._socket.recv_multipart(zmq.NOBLOCK)

    def _drain_soon(self) -> None:
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _recheck(self) -> None:
        """The descriptor signals changes only: whatever touched the socket must ask what is left
        to do."""
        if self._events() & zmq.POLLIN:
            self._drain_soon()

    def _events(self) -> int:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return events

    def _take(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _deliver(
        self, frames: Sequence[bytes], kinds: Kinds, hand: Callable[[Packet], None]
    ) -> None:
        """Raises WireError at the first packet that is wrong; those before it were handed on."""
        for packet in decode(frames):
            self.counters.received += 1
            if type(packet.message) not in kinds:
                raise WrongRole(f"{type(packet.message).__name__} is not for this sender to send")
            try:
                hand(packet)
            except Exception:
                # A handler's fault must not stop the socket: supervisor boundary.
                self.counters.handler_errors += 1
                log.exception("message handler failed kind=%s", type(packet.message).__name__)
            if self._closed:
                return

    def _count(self, error: WireError) -> None:
        setattr(self.counters, error.code, getattr(self.counters, error.code) + 1)

    def _send(self, to: bytes, message: Message, frame: Buffer) -> bool:
        if self._closed:
            return False
        frames = encode(message, frame)
        box = self._boxes.get(to)
        if box is None:
            box = self._boxes[to] = _Outbox()
        if not box.offer(frames):
            self.counters.refused += 1
            return False
        if not box.blocked:
            self._dirty[to] = None
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._flush)
        return True

    def _flush(self) -> None:
        self._flushing = False
        if self._closed:
            return
        dirty, self._dirty = self._dirty, {}
        for to in dirty:
            self._flush_one(to)
        self._recheck()

    def _flush_one(self, to: bytes) -> bool:
        """True when the outbox went out (or its destination is gone)."""
        box = self._boxes.get(to)
        if box is None or not box.packets:
            return True
        try:
            self._socket.send_multipart(self._address(to) + encode_batch(box.packets), zmq.NOBLOCK)
        except zmq.Again:
            self.counters.again += 1
            box.blocked = True
            self._retry_later()
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters.unreachable += 1
            del self._boxes[to]
            self._gone(to)
            return True
        self.counters.sent += len(box.packets)
        del self._boxes[to]
        if box.blocked:
            self._writable(to)
        return True

    def _retry_later(self) -> None:
        # A ROUTER's POLLOUT says nothing about one peer's pipe, so a timer asks again.
        if self._retry is None:
            self._retry = self._loop.call_later(self._retry_s, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        blocked = [to for to, box in self._boxes.items() if box.blocked]
        if any([self._flush_one(to) for to in blocked]):
            self._retry_s = RETRY_FIRST_S
        else:
            self._retry_s = min(self._retry_s * 2, RETRY_MOST_S)
        if not self._closed:
            self._recheck()

    def _address(self, to: bytes) -> list[Buffer]:
        raise NotImplementedError

    def _gone(self, to: bytes) -> None:
        raise NotImplementedError

    def _writable(self, to: bytes) -> None:
        raise NotImplementedError

    def _is_blocked(self, to: bytes) -> bool:
        box = self._boxes.get(to)
        return box is not None and box.blocked


class Listener(_Endpoint):
    """A ROUTER bound to `endpoint` (`tcp://127.0.0.1:*` takes a free port). Make it inside the
    running loop."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        role: Role,
        receive: Callable[[Peer, Packet], None],
        writable: Callable[[Peer], None] | None = None,
        unreachable: Callable[[Peer], None] | None = None,
    ) -> None:
        super().__init__(context, zmq.ROUTER)
        self._role = role
        self._receive = receive
        self._on_writable = writable
        self._on_unreachable = unreachable
        self._peers: dict[bytes, Peer] = {}
        self._proved = ""
        self._monitor: zmq.Socket[bytes] | None = None
        self._doorman: _Doorman | None = None
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that reconnects before its dead connection was noticed must be able to take its
        # name over.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._secure = context.keyring is not None
        if context.keyring is not None:
            self._lock(context, context.keyring)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._unlock()
            self._socket.close(linger=0)
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._start()

    def close(self, *, linger_s: float = 0.0) -> None:
        if not self._closed:
            self._unlock()
        super().close(linger_s=linger_s)

    def _lock(self, context: Context, keyring: Keyring) -> None:
        assert keyring.server is not None, (
            f"a {keyring.role.value} has no server key to listen with"
        )
        if context.doorman is None:
            context.doorman = self._doorman = _Doorman(context, keyring)
            self._context = context
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.server.secret.encode())
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._loop.add_reader(self._monitor.FD, self._count_handshakes)
        self._count_handshakes()

    def _unlock(self) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.FD)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        if self._doorman is not None:
            self._doorman.close()
            self._context.doorman = None

    def _count_handshakes(self) -> None:
        while self._monitor is not None:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counters.handshake_failures += 1

    def _receive_frames(self) -> list[bytes]:
        if not self._secure:
            return super()._receive_frames()
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        proved = frames[0].get("User-Id")
        self._proved = proved if isinstance(proved, str) else ""
        return [frame.bytes for frame in frames]

    def send(self, peer: Peer, message: Message, frame: Buffer = b"") -> bool:
        """Queued, and sent at the end of this loop turn. False: not taken, the peer does not
        read. Unsendable: no peer would take it."""
        return self._send(peer.identity, message, frame)

    def blocked(self, peer: Peer) -> bool:
        return self._is_blocked(peer.identity)

    def _take(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            peer = self._peer(identity)
            if self._secure and peer.role.value != self._proved:
                raise WrongRole(f"a key of role {self._proved!r} says it is a {peer.role.value}")
            self._deliver(
                frames[1:],
                allowed(sender=peer.role, receiver=self._role),
                lambda packet: self._receive(peer, packet),
            )
        except WireError as error:
            self._count(error)
            self._answer(identity, error)

    def _peer(self, identity: bytes) -> Peer:
        peer = self._peers.get(identity)
        if peer is None:
            try:
                peer = Peer.parse(identity)
            except ValueError as error:
                raise Malformed(f"peer identity: {error}") from error
            if len(self._peers) >= 4096:  # peers come and go; parsing again is cheap
                self._peers.clear()
            self._peers[identity] = peer
        return peer

    def _answer(self, identity: bytes, error: WireError) -> None:
        box = self._boxes.get(identity)
        if box is None or len(box.packets) < 16:  # a flood of garbage earns a bounded answer
            self._send(identity, fault(error), b"")

    def _address(self, to: bytes) -> list[Buffer]:
        return [to]

    def _gone(self, to: bytes) -> None:
        peer = self._peers.pop(to, None)
        if peer is not None and self._on_unreachable is not None:
            self._on_unreachable(peer)

    def _writable(self, to: bytes) -> None:
        peer = self._peers.get(to)
        if peer is not None and self._on_writable is not None:
            self._on_writable(peer)


class Link(_Endpoint):
    """A DEALER to one Listener. Reconnects by itself; while it is not connected it counts as
    blocked once it tried to send. Raises NoEndpoint."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        me: Peer,
        receive: Callable[[Packet], None],
        writable: Callable[[], None] | None = None,
        listens: Role = Role.ROUTER,
    ) -> None:
        """`listens` is the role of the other end: its key is checked where keys are in use."""
        super().__init__(context, zmq.DEALER)
        self._receive = receive
        self._on_writable = writable
        self._kinds = allowed_to(me.role)
        self.endpoint = endpoint
        self._socket.setsockopt(zmq.IDENTITY, me.identity)
        if context.keyring is not None:
            self._secure(context.keyring, listens)
        # Nothing queues for a peer that is not there: it would arrive stale after a reconnect. The
        # price: what arrived and was not read yet is dropped when the peer hangs up, so a Listener
        # that has said its last word stays open a moment.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise NoEndpoint(f"{endpoint!r}: {error}") from error
        self._start()

    def send(self, message: Message, frame: Buffer = b"") -> bool:
        """Queued, and sent at the end of this loop turn. False: not taken, the peer does not read
        or is away. Unsendable: no peer would take it."""
        return self._send(b"", message, frame)

    def _secure(self, keyring: Keyring, listens: Role) -> None:
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keyring.servers[listens].encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keyring.client.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.client.secret.encode())

    @property
    def blocked(self) -> bool:
        return self._is_blocked(b"")

    def _take(self, frames: list[bytes]) -> None:
        try:
            self._deliver(frames, self._kinds, self._hand)
        except WireError as error:
            self._count(error)
            log.warning("dropped a message endpoint=%s reason=%s", self.endpoint, error)

    def _hand(self, packet: Packet) -> None:
        if isinstance(packet.message, Fault):
            log.warning(
                "peer could not take a message endpoint=%s code=%s reason=%s",
                self.endpoint, packet.message.code, packet.message.message,
            )  # fmt: skip
        self._receive(packet)

    def _recheck(self) -> None:
        super()._recheck()
        if self._is_blocked(b"") and self._events() & zmq.POLLOUT:
            self._flush_one(b"")

    def _address(self, to: bytes) -> list[Buffer]:
        return []

    def _gone(self, to: bytes) -> None:
        raise AssertionError("a DEALER has no unreachable peer")

    def _writable(self, to: bytes) -> None:
        if self._on_writable is not None:
            self._on_writable()


def _configured(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """High-water mark, linger, keepalive, heartbeats and size bound: set in this one place."""
    for option, value in (
        (zmq.SNDHWM, HIGH_WATER_MARK),
        (zmq.RCVHWM, HIGH_WATER_MARK),
        (zmq.LINGER, 0),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
        (zmq.HEARTBEAT_IVL, 2_000),
        (zmq.HEARTBEAT_TIMEOUT, 10_000),
        (zmq.HEARTBEAT_TTL, 10_000),
        (zmq.RECONNECT_IVL, 50),
        (zmq.RECONNECT_IVL_MAX, 1_000),
        (zmq.HANDSHAKE_IVL, 5_000),
        # Far above our own bounds, which count and answer; this one only protects memory.
        (zmq.MAXMSGSIZE, 4 * MAX_FRAME_BYTES),
    ):
        socket.setsockopt(option, value)
    return socket

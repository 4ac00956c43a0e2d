"""The links to the routers of the ring: hello, heartbeats, load, KV events and snapshots, one
ordered stream each.

A router that does not read, or has not welcomed us, gets no events: it finds the gap by our next
heartbeat and asks for a snapshot, from which on it gets them again. So nothing is kept for it here
but the chunks of one snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fermata.core.ids import RouterId
from fermata.core.lease_digest import LeaseDigest
from fermata.core.ring import Ring
from fermata.wire import messages as wire
from fermata.wire.socket import Context, Link, Packet, Peer

log = logging.getLogger(__name__)

SILENCE_S = 3.0
LEAVE_AFTER_S = 5.0
"""A router that left the ring may have granted a turn whose Generate is still on its way."""


class Holder(Protocol):
    """What the links need of the service around them."""

    def hello(self) -> wire.Hello: ...

    def digest(self, router: int) -> LeaseDigest: ...

    def last_events(self) -> list[int]: ...

    def load_of(self, router: int) -> wire.LoadReport: ...

    def router_booted(self, router: int) -> None:
        """By its number; also one that is new."""
        ...

    def router_left(self, router: int) -> None: ...

    def demand(self, router: int, demand: wire.Demand) -> None: ...

    def rebalance(self) -> None:
        """Strike the routers' shares anew."""
        ...

    def snapshot(
        self, request: wire.SnapshotRequest
    ) -> Sequence[tuple[wire.SnapshotChunk, array[int]]]: ...

    def running(self, router: int) -> array[int]:
        """Leases of that router that run here."""
        ...

    def status(self) -> wire.Status: ...

    def on_welcome(self, reply: Callable[[wire.Message], None]) -> None: ...

    def on_router_packet(self, packet: Packet) -> None: ...


@dataclass(slots=True, eq=False)
class RouterPeer:
    id: RouterId
    link: Link
    welcome: wire.Welcome | None = None
    answers: bool = False
    heard_at: float = 0.0
    left_at: float | None = None
    """Since when it is not in the ring."""
    silenced: set[int] = field(default_factory=set[int])
    """Ranks whose events stopped until a snapshot."""
    owed: deque[tuple[wire.SnapshotChunk, array[int]]] = field(
        default_factory=deque[tuple[wire.SnapshotChunk, "array[int]"]]
    )


class RouterLinks:
    """Time here is the loop's own: liveness is about real machines."""

    def __init__(
        self,
        *,
        context: Context,
        me: Peer,
        ring: Ring,
        holder: Holder,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.ring = ring
        self._context = context
        self._me = me
        self._holder = holder
        self._loop = loop
        self._peers: dict[RouterId, RouterPeer] = {}

    @property
    def answering(self) -> int:
        return sum(peer.answers for peer in self._peers.values())

    def open(self) -> None:
        for router, endpoint in self.ring.members.items():
            known = self._peers.get(router)
            if known is not None and known.link.endpoint != endpoint:
                known.link.close(linger_s=0.5)
                known = None
            if known is None:
                self._peers[router] = self._open(router, endpoint)

    def close(self, *, reason: str) -> None:
        for peer in self._peers.values():
            if peer.answers:
                peer.link.send(wire.Bye(self._me.incarnation, reason))
            peer.link.close(linger_s=0.5)
        self._peers.clear()

    def tick(self) -> None:
        """Each second: heartbeat and load to those that answer, Hello to those that do not."""
        now = self._loop.time()
        self._close_left(now)
        self._holder.rebalance()
        for peer in self._peers.values():
            if peer.answers and now - peer.heard_at > SILENCE_S:
                log.warning("router does not answer router=%s", peer.id)
                peer.answers = False
            if peer.link.blocked:
                continue
            if peer.answers:
                self._heartbeat(peer)
            else:
                peer.link.send(self._holder.hello())

    def broadcast(self, message: wire.Message) -> None:
        for peer in self._peers.values():
            if peer.answers:
                peer.link.send(message)

    def events(self, rank: int, message: wire.KvEvents, hashes: array[int]) -> None:
        for peer in self._peers.values():
            if peer.welcome is None or rank in peer.silenced:
                continue
            if peer.link.blocked or not peer.link.send(message, hashes):
                peer.silenced.add(rank)

    def counters(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for peer in self._peers.values():
            for name, value in peer.link.counters.numbers().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _open(self, router: RouterId, endpoint: str) -> RouterPeer:
        link = Link(
            self._context,
            endpoint,
            me=self._me,
            receive=lambda packet: self._receive(router, packet),
            writable=lambda: self._writable(router),
        )
        link.send(self._holder.hello())
        return RouterPeer(router, link)

    def _close_left(self, now: float) -> None:
        """Routers that left the ring are told of their leases until the last has ended."""
        for router, peer in list(self._peers.items()):
            if router in self.ring.members:
                peer.left_at = None
                continue
            if peer.left_at is None:
                peer.left_at = now
            number = None if peer.welcome is None else peer.welcome.number
            if number is not None and (
                now - peer.left_at < LEAVE_AFTER_S or self._holder.digest(number).count
            ):
                continue
            if peer.answers:
                peer.link.send(wire.Bye(self._me.incarnation, wire.LEFT_RING))
            peer.link.close(linger_s=0.5)
            del self._peers[router]
            if number is not None:
                self._holder.router_left(number)

    def _heartbeat(self, peer: RouterPeer) -> None:
        assert peer.welcome is not None
        digest = self._holder.digest(peer.welcome.number)
        # Load first: a router judges stalls by it when the heartbeat comes.
        peer.link.send(self._holder.load_of(peer.welcome.number))
        peer.link.send(
            wire.Heartbeat(
                self._me.incarnation, 0, digest.count, digest.xor, self._holder.last_events()
            )
        )

    def _writable(self, router: RouterId) -> None:
        peer = self._peers.get(router)
        if peer is None:
            return
        self._send_owed(peer)
        if not peer.answers:
            peer.link.send(self._holder.hello())

    def _send_owed(self, peer: RouterPeer) -> None:
        while peer.owed and not peer.link.blocked:
            chunk, hashes = peer.owed[0]
            if not peer.link.send(chunk, hashes):
                return
            peer.owed.popleft()

    def _receive(self, router: RouterId, packet: Packet) -> None:
        peer = self._peers.get(router)
        if peer is None:
            return
        peer.heard_at = self._loop.time()
        match packet.message:
            case wire.HeartbeatAck() as ack:
                if not ack.known or ack.ring_epoch > self.ring.epoch:
                    peer.link.send(self._holder.hello())
            case wire.Welcome() as welcome:
                self._welcomed(peer, welcome)
            case wire.SnapshotRequest() as request:
                self._snapshot(peer, request)
            case wire.LeaseListRequest():
                if peer.welcome is not None:
                    peer.link.send(wire.LeaseList(), self._holder.running(peer.welcome.number))
            case wire.Demand() as demand:
                if peer.welcome is not None:
                    self._holder.demand(peer.welcome.number, demand)
            case wire.StatusRequest():
                peer.link.send(self._holder.status())
            case _:
                self._holder.on_router_packet(packet)

    def _welcomed(self, peer: RouterPeer, welcome: wire.Welcome) -> None:
        if peer.welcome is None or peer.welcome.incarnation != welcome.incarnation:
            log.info("welcome router=%s incarnation=%d", peer.id, welcome.incarnation)
            self._holder.router_booted(welcome.number)
            self._holder.rebalance()
            peer.link.send(self._holder.load_of(welcome.number))
        peer.welcome = welcome
        peer.answers = True
        self._holder.on_welcome(lambda message: _send(peer.link, message))
        if welcome.ring.epoch > self.ring.epoch and welcome.ring.members:
            self.ring = Ring(
                welcome.ring.epoch, {RouterId(name): at for name, at in welcome.ring.members}
            )
            log.info("ring epoch=%d routers=%s", self.ring.epoch, ",".join(self.ring.members))
            self.open()

    def _snapshot(self, peer: RouterPeer, request: wire.SnapshotRequest) -> None:
        # An older request's chunks for the rank are of no use any more.
        peer.owed = deque(item for item in peer.owed if item[0].rank != request.rank)
        peer.owed.extend(self._holder.snapshot(request))
        peer.silenced.discard(request.rank)
        self._send_owed(peer)


def _send(link: Link, message: wire.Message) -> None:
    """What can not be taken now is said again by the next heartbeat's answer."""
    link.send(message)

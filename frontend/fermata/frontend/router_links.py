"""The links to the routers of the ring: hello, heartbeats with digests, and what is reported about leases.

A router that is away is asked nothing: turns wait, and are asked about when it says Welcome. Whether a Welcome comes
from the boot we knew decides what follows. Another boot has forgotten us: it is sent our claims, and running streams
go on. The same boot that no longer knows us took us for dead and fenced us: only a new incarnation of ours will do.

Reports are gathered into one Progress a router. What only informs waits a moment for company, the end of a
lease a shorter one; of what is waiting about one lease, the later word says all the earlier ones did.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from fermata.core.ids import LeaseId, RouterId, RoutingKey, lease_router
from fermata.core.ring import Ring
from fermata.frontend.turn_table import TurnTable
from fermata.wire import messages as wire
from fermata.wire.socket import Context, Link, Packet, Peer

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
GATHER_S = 0.01
GATHER_ENDS_S = 0.002
_ENDS = frozenset({"finished", "cancelled", "failed"})
_SAYS_ALL = frozenset({"prefilled", "tokens", "finished"})
"""A lease of which this is said was accepted, and prefilled."""


class Owner(Protocol):
    """What the links need of the service around them."""

    def on_router_packet(self, router: RouterId, packet: Packet) -> None: ...

    def on_welcome(self, router: RouterId) -> None:
        """It answers now: ask it about the turns that wait for it."""
        ...

    def on_fenced(self, fenced: int) -> bool:
        """This incarnation was taken for dead, as were all up to `fenced` (-1: that is not known)."""
        ...

    def on_ring(self) -> None:
        """Keys may belong to other routers now."""
        ...


@dataclass(slots=True)
class RouterPeer:
    id: RouterId
    link: Link
    welcome: wire.Welcome | None = None
    """The last one; see `answers`."""
    answers: bool = False
    heard_at: float = 0.0
    workers_ready: int = 0
    forgot_us: bool = False
    fenced: int = -1
    """As it last said: see HeartbeatAck."""
    outbox: list[wire.LeaseProgress] = field(default_factory=list[wire.LeaseProgress])
    claims: deque[tuple[wire.LeaseClaims, bytes]] = field(
        default_factory=deque[tuple[wire.LeaseClaims, bytes]]
    )
    """What we own, still to be told its new boot."""
    latest: dict[LeaseId, int] = field(default_factory=dict[LeaseId, int])
    """Where in the outbox the last word about a lease is."""

    def gather(self, progress: wire.LeaseProgress) -> None:
        at = self.latest.get(progress.lease)
        if at is not None and progress.kind in _SAYS_ALL:
            self.outbox[at] = progress
        else:
            self.latest[progress.lease] = len(self.outbox)
            self.outbox.append(progress)

    def take(self) -> list[wire.LeaseProgress]:
        taken, self.outbox = self.outbox, []
        self.latest.clear()
        return taken


class RouterLinks:
    """Time here is the loop's own: liveness is about real machines."""

    def __init__(
        self,
        *,
        context: Context,
        me: Peer,
        ring: Ring,
        table: TurnTable,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.ring = ring
        self._context = context
        self._me = me
        self._table = table
        self._owner = owner
        self._loop = loop
        self._peers: dict[RouterId, RouterPeer] = {}
        self._numbers: dict[int, RouterId] = {}
        self._flushing: asyncio.TimerHandle | None = None
        self._hurries = False

    @property
    def peers(self) -> Iterable[RouterPeer]:
        return self._peers.values()

    @property
    def workers_ready(self) -> int:
        """As the best informed router has it; every router knows every worker."""
        return max((p.workers_ready for p in self._peers.values() if p.answers), default=0)

    @property
    def answering(self) -> int:
        return sum(peer.answers for peer in self._peers.values())

    def open(self) -> None:
        for router, endpoint in self.ring.members.items():
            if router not in self._peers:
                self._peers[router] = self._open(router, endpoint)

    def reopen(self, me: Peer) -> None:
        """Under another incarnation of ours; whatever was not sent belonged to the old one."""
        self._me = me
        self._close_links()
        self.open()

    def close(self) -> None:
        self.flush()
        for peer in self._peers.values():
            if not peer.link.blocked:
                peer.link.send(wire.Bye(self._me.incarnation, "shutdown"))
        self._close_links(linger_s=0.5)

    def router_for(self, key: RoutingKey) -> RouterPeer | None:
        """None while it is away."""
        peer = self._peers.get(self.ring.router_for(key))
        return peer if peer is not None and peer.answers and not peer.link.blocked else None

    def report(self, progress: wire.LeaseProgress) -> None:
        peer = self._by_number(lease_router(progress.lease))
        if peer is None or (progress.kind == "tokens" and not peer.answers):
            return
        peer.gather(progress)
        is_end = progress.kind in _ENDS
        if self._flushing is not None:
            if self._hurries or not is_end:
                return
            self._flushing.cancel()
        self._hurries = is_end
        self._flushing = self._loop.call_later(GATHER_ENDS_S if is_end else GATHER_S, self.flush)

    def tick(self) -> None:
        """Each second: heartbeats to those that answer, Hello to those that do not."""
        now = self._loop.time()
        self.flush()
        self._close_left()
        for peer in self._peers.values():
            if peer.answers and now - peer.heard_at > SILENCE_S:
                log.warning("router does not answer router=%s", peer.id)
                peer.answers = False
            if peer.link.blocked:
                continue
            if peer.answers:
                self._heartbeat(peer)
            else:
                self._hello(peer)

    def adopt(self, ring: wire.Ring) -> None:
        """A newer epoch, from a router's own mouth."""
        if ring.epoch <= self.ring.epoch or not ring.members:
            return
        self.ring = Ring(ring.epoch, {RouterId(name): at for name, at in ring.members})
        log.info("ring epoch=%d routers=%s", ring.epoch, ",".join(self.ring.members))
        self.open()
        self._owner.on_ring()

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
        peer = RouterPeer(router, link)
        self._hello(peer)
        return peer

    def _close_links(self, *, linger_s: float = 0.0) -> None:
        for peer in self._peers.values():
            peer.link.close(linger_s=linger_s)
        self._peers.clear()
        self._numbers.clear()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    def _close_left(self) -> None:
        """Routers that left the ring answer for the leases they granted until the last has ended."""
        for router in [r for r in self._peers if r not in self.ring.members]:
            welcome = self._peers[router].welcome
            if welcome is None or not self._table.leases_of(welcome.number):
                peer = self._peers.pop(router)
                if peer.answers and not peer.link.blocked:
                    # Else it would take our silence for death, and have workers abort what others granted.
                    peer.link.send(wire.Bye(self._me.incarnation, wire.LEFT_RING))
                peer.link.close(linger_s=0.5)

    def _by_number(self, number: int) -> RouterPeer | None:
        router = self._numbers.get(number)
        return None if router is None else self._peers.get(router)

    def _hello(self, peer: RouterPeer) -> None:
        peer.link.send(wire.Hello("frontend", self._me.id, self._me.incarnation))

    def _heartbeat(self, peer: RouterPeer) -> None:
        assert peer.welcome is not None
        number = peer.welcome.number
        digest = self._table.digest(number)
        seen = self._table.seen(number, peer.welcome.incarnation)
        peer.link.send(wire.Heartbeat(self._me.incarnation, seen, digest.count, digest.xor))

    def flush(self) -> None:
        """Everything gathered so far goes out with this turn of the loop."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        for peer in self._peers.values():
            may_send = peer.answers and not peer.link.blocked
            if peer.outbox and may_send and peer.link.send(wire.Progress(peer.outbox)):
                peer.take()

    def _writable(self, router: RouterId) -> None:
        """It was away or did not read; perhaps it booted meanwhile, so it is told who we are again."""
        peer = self._peers.get(router)
        if peer is None:
            return
        self._hello(peer)
        if peer.answers:
            self._send_claims(peer)
            self.flush()
            self._owner.on_welcome(router)

    def _send_claims(self, peer: RouterPeer) -> None:
        """Each may fill the link for a turn of the loop."""
        while peer.claims:
            if not peer.link.send(*peer.claims[0]):
                if not peer.link.blocked:  # else `_writable` goes on
                    self._loop.call_soon(self._send_claims, peer)
                return
            peer.claims.popleft()

    def _receive(self, router: RouterId, packet: Packet) -> None:
        peer = self._peers.get(router)
        if peer is None:
            return
        peer.heard_at = self._loop.time()
        message = packet.message
        if isinstance(message, wire.HeartbeatAck):
            self._acknowledged(peer, message)
        elif isinstance(message, wire.Welcome):
            self._welcomed(peer, message)
        elif isinstance(message, wire.Fault):
            if message.code == "unknown_peer":
                self._hello(peer)
        else:
            self._owner.on_router_packet(router, packet)

    def _acknowledged(self, peer: RouterPeer, ack: wire.HeartbeatAck) -> None:
        peer.workers_ready = ack.workers_ready
        if not ack.known:
            peer.answers = False
            peer.forgot_us = peer.welcome is not None
            peer.fenced = ack.fenced
            self._hello(peer)
        elif ack.ring_epoch > self.ring.epoch:
            self._hello(peer)

    def _welcomed(self, peer: RouterPeer, welcome: wire.Welcome) -> None:
        known = peer.welcome
        is_same_boot = known is not None and known.incarnation == welcome.incarnation
        if is_same_boot and peer.forgot_us:
            # Not yet another incarnation: then the next tick says Hello, and this comes again.
            self._owner.on_fenced(peer.fenced)
            return
        peer.forgot_us = False
        peer.welcome = welcome
        peer.workers_ready = welcome.workers_ready
        self._numbers[welcome.number] = peer.id
        if not is_same_boot:
            log.info("welcome router=%s incarnation=%d", peer.id, welcome.incarnation)
            peer.take()  # of a boot that is gone; the claims say what still runs
            peer.claims = deque(self._table.claims(welcome.number))
            self._send_claims(peer)
        peer.answers = True
        self.flush()
        self.adopt(welcome.ring)
        if self._peers.get(peer.id) is peer:
            self._owner.on_welcome(peer.id)

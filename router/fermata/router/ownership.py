"""Life of the owners: registration, heartbeats, reconciliation, and death with all their leases."""

from __future__ import annotations

from fermata.core.ids import OwnerId
from fermata.router.leasing import Leasing
from fermata.router.owner import Owner
from fermata.router.state import RouterState
from fermata.wire.messages import LEFT_RING, Bye, Fence, Heartbeat, LeaseListRequest
from fermata.wire.roles import Peer


class Ownership:
    def __init__(self, state: RouterState, leasing: Leasing) -> None:
        self._state = state
        self._leasing = leasing

    def hello(self, peer: Peer, now: float) -> None:
        """A fenced boot is not registered: its next word is answered with "not known", and it has to come back anew."""
        state = self._state
        known = state.owners.by_id(peer.id)
        if known is not None and known.peer.incarnation > peer.incarnation:
            state.owners.fence(Peer(peer.role, peer.id, known.peer.incarnation - 1))
            return
        if state.owners.is_fenced(peer):
            return
        if known is not None and known.peer != peer:
            self.lose(known, now)
            known = None
        if known is None:
            state.owners.add(peer)
        self._alive(peer, now)

    def heartbeat(self, owner: Owner, message: Heartbeat, now: float) -> None:
        state = self._state
        self._alive(owner.peer, now)
        ledger = state.leases.ledger(owner.peer)
        agrees = ledger.agrees(seen=message.seen, count=message.count, xor=message.xor)
        if owner.doubt.heard(agrees=agrees):
            state.counters["lease_lists_asked"] += 1
            state.effects.send(owner.peer, LeaseListRequest())

    def bye(self, owner: Owner, message: Bye, now: float) -> None:
        if message.reason == LEFT_RING:
            # It has no lease of ours and lives on with other routers: nothing of it may be refused.
            self._forget(owner, now)
        else:
            self.lose(owner, now)

    def lose(self, owner: Owner, now: float) -> None:
        """Its turns are nobody's: what waits is forgotten, what runs is aborted, what it still sends is refused."""
        state = self._state
        state.counters["owners_lost"] += 1
        self._forget(owner, now)
        if not state.is_in_ring:
            return  # whether it is dead is for those to say whom it still has to tell
        state.owners.fence(owner.peer)
        for worker in state.workers:
            state.effects.send(worker.peer, Fence(OwnerId(owner.peer.id), owner.peer.incarnation))

    def _forget(self, owner: Owner, now: float) -> None:
        state = self._state
        state.owners.remove(owner)
        for waiting in state.waiting.of_owner(owner.peer.id):
            state.waiting.remove(waiting)
            state.programs.end(waiting.key, "cancelled", now)
        self._leasing.revoke(state.leases.of_owner(owner.peer), "owner_lost", now, owners=False)

    def tick(self, now: float) -> None:
        for name in self._state.owners.silence.due(now):
            owner = self._state.owners.by_id(name)
            if owner is not None:
                self.lose(owner, now)

    def _alive(self, peer: Peer, now: float) -> None:
        state = self._state
        timeout_s = state.real(state.liveness.owner_timeout_s)
        state.owners.silence.set(peer.id, now + timeout_s)

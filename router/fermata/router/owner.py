"""Owners: the frontends whose leases this router granted, and those it took for dead.

An owner is one boot of a frontend. Its successor, or silence, ends it with all its leases, and its incarnation is
fenced: workers refuse what it may still send. Fences are remembered (bounded) for workers that register later, and so
that the dead can be told: it comes back under a new incarnation only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from fermata.router.expiry import Expiry
from fermata.router.reconcile import Doubt
from fermata.wire.messages import Role
from fermata.wire.roles import Peer

_MOST_FENCES = 4096


@dataclass(slots=True, eq=False)
class Owner:
    peer: Peer
    doubt: Doubt = field(default_factory=Doubt)


class Owners:
    def __init__(self, *, width_s: float, most_fences: int = _MOST_FENCES) -> None:
        self._owners: dict[str, Owner] = {}
        self._fences: OrderedDict[str, int] = OrderedDict()
        self._most_fences = most_fences
        self.silence: Expiry[str] = Expiry(width_s=width_s)

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, peer: Peer) -> Owner | None:
        """None unless exactly this boot is registered."""
        owner = self._owners.get(peer.id)
        return owner if owner is not None and owner.peer == peer else None

    @property
    def peers(self) -> list[Peer]:
        return [owner.peer for owner in self._owners.values()]

    def by_id(self, owner: str) -> Owner | None:
        return self._owners.get(owner)

    def add(self, peer: Peer) -> Owner:
        assert peer.id not in self._owners
        owner = self._owners[peer.id] = Owner(peer)
        return owner

    def remove(self, owner: Owner) -> None:
        del self._owners[owner.peer.id]
        self.silence.cancel(owner.peer.id)

    def is_fenced(self, peer: Peer) -> bool:
        return peer.incarnation <= self._fences.get(peer.id, -1)

    def fenced_up_to(self, peer: Peer) -> int:
        """Which of its incarnations it has to leave behind; -1: none, or another boot of it is here, which lives."""
        is_owner = peer.role is Role.FRONTEND and peer.id not in self._owners
        return self._fences.get(peer.id, -1) if is_owner else -1

    def fence(self, peer: Peer) -> None:
        self._fences[peer.id] = max(peer.incarnation, self._fences.pop(peer.id, -1))
        while len(self._fences) > self._most_fences:
            self._fences.popitem(last=False)

    @property
    def fences(self) -> list[tuple[str, int]]:
        """(owner, incarnation up to which it is fenced)."""
        return list(self._fences.items())

    def forgive(self, until: float) -> None:
        """We were not listening ourselves: silence so far proves nothing. O(owners)."""
        for name in self._owners:
            if name in self.silence:
                self.silence.set(name, until)

    def check_integrity(self) -> None:
        assert len(self.silence) == len(self._owners)
        for name, owner in self._owners.items():
            assert owner.peer.id == name
            assert name in self.silence
            assert not self.is_fenced(owner.peer)

"""Two sides compare a digest of the leases they hold each second, and lists only when it differs twice.

Once is nothing: an end or a Grant may be on its way. An owner's digest covers leases of earlier boots of this router
and those of this boot up to the highest id it has seen; younger ones, still under way, count for neither side.
"""

from __future__ import annotations

from collections.abc import Collection

from fermata.core.ids import LeaseId
from fermata.core.lease_digest import LeaseDigest

_MISMATCHES = 2


class OwnerLedger:
    """The leases of one owner. Every method is O(1), but for what moved into view."""

    __slots__ = ("_digest", "_unseen", "leases")

    def __init__(self) -> None:
        self.leases: dict[LeaseId, None] = {}
        self._unseen: dict[LeaseId, None] = {}
        """Of this boot and not known to have arrived, in the order of their ids."""
        self._digest = LeaseDigest()

    def add(self, lease: LeaseId, *, is_present: bool) -> None:
        self.leases[lease] = None
        if is_present:
            self._unseen[lease] = None
        else:
            self._digest.add(lease)

    def remove(self, lease: LeaseId) -> None:
        del self.leases[lease]
        if lease in self._unseen:
            del self._unseen[lease]
        else:
            self._digest.remove(lease)

    def agrees(self, *, seen: int, count: int, xor: int) -> bool:
        while self._unseen:
            first = next(iter(self._unseen))
            if first > seen:
                break
            del self._unseen[first]
            self._digest.add(first)
        return self._digest.count == count and self._digest.xor == xor

    def missing_from(self, held: Collection[int], *, seen: int) -> list[LeaseId]:
        """What the owner should hold and does not. O(leases)."""
        return [
            lease
            for lease in self.leases
            if lease not in held and (lease <= seen or lease not in self._unseen)
        ]

    def check_integrity(self) -> None:
        assert self._unseen.keys() <= self.leases.keys()
        assert LeaseDigest(i for i in self.leases if i not in self._unseen) == self._digest


class WorkerLedger:
    """The leases a worker's engine has, as far as owners said so."""

    __slots__ = ("_digest", "leases")

    def __init__(self) -> None:
        self.leases: dict[LeaseId, None] = {}
        self._digest = LeaseDigest()

    def add(self, lease: LeaseId) -> None:
        self.leases[lease] = None
        self._digest.add(lease)

    def remove(self, lease: LeaseId) -> None:
        del self.leases[lease]
        self._digest.remove(lease)

    def agrees(self, *, count: int, xor: int) -> bool:
        return self._digest.count == count and self._digest.xor == xor

    def check_integrity(self) -> None:
        assert LeaseDigest(self.leases) == self._digest


class Doubt:
    """Counts disagreements in a row."""

    __slots__ = ("_in_a_row",)

    def __init__(self) -> None:
        self._in_a_row = 0

    def heard(self, *, agrees: bool) -> bool:
        """True when it is time to ask for the list; then it counts anew."""
        self._in_a_row = 0 if agrees else self._in_a_row + 1
        if self._in_a_row < _MISMATCHES:
            return False
        self._in_a_row = 0
        return True

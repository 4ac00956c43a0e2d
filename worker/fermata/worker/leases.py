"""The attempts this worker runs, by lease, by owner and by the router that granted them.

An attempt is here from Generate until its last Output was taken by the socket, so "what runs" and
"what is still owed to a frontend" are the same set. Digests are kept per router, since each router
reconciles its own leases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fermata.core.ids import LeaseId, lease_router
from fermata.core.lease_digest import LeaseDigest
from fermata.wire.messages import Generate
from fermata.wire.roles import Peer
from fermata.worker.outputs import OutputBuffer


@dataclass(slots=True, eq=False)
class Attempt:
    owner: Peer
    """Where its output goes."""
    generate: Generate
    input_tokens: int
    output: OutputBuffer
    is_running: bool = True
    """The engine has it; else only output is left to send."""

    @property
    def lease(self) -> LeaseId:
        return self.generate.lease


class Attempts:
    def __init__(self) -> None:
        self._attempts: dict[LeaseId, Attempt] = {}
        self._owners: dict[Peer, dict[LeaseId, Attempt]] = {}
        self._digests: dict[int, LeaseDigest] = {}
        self.running = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._attempts

    def get(self, lease: LeaseId) -> Attempt | None:
        return self._attempts.get(lease)

    def is_of(self, owner: Peer, lease: LeaseId) -> bool:
        """Whether that boot of a frontend has it here; what is another's is not to be touched."""
        return lease in self._owners.get(owner, ())

    def add(self, attempt: Attempt) -> None:
        assert attempt.lease not in self._attempts
        self._attempts[attempt.lease] = attempt
        self._owners.setdefault(attempt.owner, {})[attempt.lease] = attempt
        self._digests.setdefault(lease_router(attempt.lease), LeaseDigest()).add(attempt.lease)
        self.running += 1

    def finish(self, attempt: Attempt) -> None:
        """The engine is done with it; what its owner is owed keeps it here."""
        if attempt.is_running:
            attempt.is_running = False
            self.running -= 1

    def remove(self, attempt: Attempt) -> None:
        self.finish(attempt)
        self._digests[lease_router(attempt.lease)].remove(attempt.lease)
        del self._attempts[attempt.lease]
        theirs = self._owners[attempt.owner]
        del theirs[attempt.lease]
        if not theirs:
            del self._owners[attempt.owner]

    def of_owner(self, owner: Peer) -> list[Attempt]:
        return list(self._owners.get(owner, {}).values())

    def owners(self) -> Iterable[Peer]:
        return list(self._owners)

    @property
    def owner_count(self) -> int:
        return len(self._owners)

    def all(self) -> list[Attempt]:
        return list(self._attempts.values())

    def digest(self, router: int) -> LeaseDigest:
        return self._digests.get(router) or LeaseDigest()

    def of_router(self, router: int) -> list[LeaseId]:
        """O(all): asked for only when digests differ."""
        return [lease for lease in self._attempts if lease_router(lease) == router]

    def check_integrity(self) -> None:
        """O(all): for tests."""
        owned = {lease: a for theirs in self._owners.values() for lease, a in theirs.items()}
        assert owned == self._attempts
        assert all(self._owners.values())
        assert self.running == sum(a.is_running for a in self._attempts.values())
        for router, digest in self._digests.items():
            assert digest == LeaseDigest(self.of_router(router))

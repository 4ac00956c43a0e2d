"""Which policy and ring every router should have, under one growing revision number; and who has it. Pure.

A router that booted says an older revision (or none) in its Status and is sent the whole again, so a lost message
and a restart are the same case. A refusal stands until the policy or the ring changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fermata.core.spec import RouterPolicySpec
from fermata.wire.messages import PolicyAck, Ring, SetPolicy


class PolicyFeed:
    """`uid` names the policy object. Revisions start at 1; the ring's epoch moves only when its members do."""

    def __init__(self, *, uid: str) -> None:
        self._uid = uid
        self._spec = b""
        self._generation = 0
        self._refused: dict[str, tuple[str, ...]] = {}
        self.revision = 0
        self.ring = Ring(epoch=0, members=[])
        self.acknowledged: set[str] = set()

    def update(self, policy: RouterPolicySpec, members: Sequence[tuple[str, str]]) -> bool:
        """True when that is another policy or another ring than before."""
        spec = msgspec.json.encode(policy)
        same_ring = list(members) == self.ring.members
        if spec == self._spec and same_ring:
            return False
        if spec != self._spec:
            self._spec = spec
            self._generation += 1
        if not same_ring:
            self.ring = Ring(epoch=self.ring.epoch + 1, members=list(members))
        self.revision += 1
        self._refused.clear()
        self.acknowledged.clear()
        return True

    def message(self) -> SetPolicy:
        return SetPolicy(
            uid=self._uid,
            generation=self._generation,
            revision=self.revision,
            spec=self._spec,
            ring=self.ring,
        )

    def take(self, router: str, ack: PolicyAck) -> bool:
        """True when this is news. An answer about an earlier revision is none."""
        if ack.revision != self.revision or router in self.acknowledged | set(self._refused):
            return False
        if ack.applied:
            self.acknowledged.add(router)
        else:
            self._refused[router] = tuple(ack.reasons) or ("no reason given",)
        return True

    def forget(self, router: str) -> None:
        """It died: whatever it answered, it knows nothing now."""
        self.acknowledged.discard(router)
        self._refused.pop(router, None)

    def needs(self, router: str, applied_revision: float) -> bool:
        """Whether a router that says it has `applied_revision` is to be sent the message."""
        return applied_revision != self.revision and router not in self._refused

    @property
    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        return self._refused

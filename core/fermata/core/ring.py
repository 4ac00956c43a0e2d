"""The numbered ring: which router answers for a routing key.

Rendezvous hashing over the members of one epoch; the epoch number comes from the operator or
`fermata up`, never from a frontend's own opinion. A member joining or leaving moves only its own
share. O(members) a look-up; members are few.
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from fermata.core.errors import ConfigError
from fermata.core.ids import RouterId, RoutingKey


@dataclass(frozen=True, slots=True)
class Ring:
    """`members` maps router id -> address (a ZeroMQ endpoint)."""

    epoch: int
    members: dict[RouterId, str]

    def router_for(self, key: RoutingKey) -> RouterId:
        if not self.members:
            raise LookupError("the ring has no router")
        raw = key.encode()
        return max(self.members, key=lambda m: (xxh3_64_intdigest(m.encode() + b"\0" + raw), m))

    @classmethod
    def parse(cls, epoch: int, text: str, *, where: str = "--routers") -> Ring:
        """From `NAME=ENDPOINT,...`."""
        members: dict[RouterId, str] = {}
        for part in text.split(","):
            name, _, endpoint = part.strip().partition("=")
            if not name or not endpoint:
                raise ConfigError(
                    f"{part!r} is not NAME=ENDPOINT",
                    where=where,
                    fix="router-0=tcp://127.0.0.1:5570",
                )
            members[RouterId(name)] = endpoint
        return cls(epoch, members)

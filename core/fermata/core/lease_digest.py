"""Count and XOR over a set of live lease ids: two sides compare 16 bytes instead of their lists.

Ids are mixed before the XOR: serials are consecutive, and {1, 2} and {4, 7} XOR to the same value
raw.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from fermata.core.ids import LeaseId


class LeaseDigest:
    """O(1) an update. Adding an id twice, or removing one that is not in, breaks it: callers hold
    the set."""

    __slots__ = ("count", "xor")

    def __init__(self, leases: Iterable[LeaseId] = ()) -> None:
        self.count = 0
        self.xor = 0
        for lease in leases:
            self.add(lease)

    def add(self, lease: LeaseId) -> None:
        self.count += 1
        self.xor ^= xxh3_64_intdigest(lease.to_bytes(8, "little"))

    def remove(self, lease: LeaseId) -> None:
        self.count -= 1
        self.xor ^= xxh3_64_intdigest(lease.to_bytes(8, "little"))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeaseDigest):
            return NotImplemented
        return self.count == other.count and self.xor == other.xor

    __hash__ = None  # type: ignore[assignment]  # mutable

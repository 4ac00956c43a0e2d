"""What this router may fill of each slot: all of it, or the share that its worker leases to it.

Of two routers that place turns on one rank neither knows what the other has admitted a moment ago. So each admits
programs inside its own share only, and the shares of a rank never add up to more than it holds; see the worker's
`budget`. A worker that leases nothing leaves all of it to the one router there is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Share:
    capacity: int
    """Tokens of KV the rank holds."""
    tokens: int
    number: int = 0
    """0: no share was ever told."""


class Shares:
    """By slot. All O(1)."""

    def __init__(self) -> None:
        self._shares: dict[int, _Share] = {}

    def open(self, slot: int, *, capacity: int) -> None:
        self._shares[slot] = _Share(capacity, capacity)

    def close(self, slot: int) -> None:
        self._shares.pop(slot, None)

    def told(self, slot: int, *, tokens: int, number: int) -> bool:
        """True when the slot holds more or less for us now."""
        share = self._shares[slot]
        before = share.tokens
        share.number = number
        share.tokens = min(max(0, tokens), share.capacity) if number else share.capacity
        return share.tokens != before

    def number(self, slot: int) -> int:
        """Of the share that is acted on."""
        return self._shares[slot].number

    def tokens(self, slot: int) -> int:
        share = self._shares.get(slot)
        return 0 if share is None else share.tokens

    @property
    def total(self) -> int:
        """O(slots)."""
        return sum(share.tokens for share in self._shares.values())

    def check_integrity(self, slots: set[int]) -> None:
        assert self._shares.keys() == slots
        assert all(0 <= share.tokens <= share.capacity for share in self._shares.values())

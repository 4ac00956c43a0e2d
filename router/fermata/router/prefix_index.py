"""Who has which prefix: for a turn's sequence hashes, per slot and tier, the longest prefix held whole.

Exact under any order of stored, removed, stored again, cleared and dropped, as long as workers tell true parents; what
one says untruly about parents costs time or its own exactness, never a crash. Slots go by the router's small numbers
(`model.Seats`), as everywhere inside the router.

Bounded in (block, slot) pairs: beyond the bound new blocks are refused and counted. Absent is always safe to say: a
match gets shorter, never longer. A rank whose events were lost is built again aside (`stage`, `swap`) and counts for
nothing meanwhile.
"""

from __future__ import annotations

from typing import Literal, get_args

from fermata.router.tier_index import Hashes, Holder, TierIndex

Tier = Literal["device", "host", "disk", "shared"]
TIERS: tuple[Tier, ...] = get_args(Tier)

Match = dict[Tier, dict[int, int]]
"""Tier -> slot -> depth in blocks, above 0. Tiers that match nothing are left out."""


class PrefixIndex:
    def __init__(self, *, limit_pairs: int, sweep_entries: int = 64) -> None:
        """`sweep_entries`: how many entries each call sweeps at least while a dropped holder's bit waits."""
        self.limit_pairs = limit_pairs
        self._sweep_entries = sweep_entries
        self.pairs = 0
        """(block, slot) pairs of live and staged holders."""
        self.refused_blocks = 0
        self._tiers: dict[Tier, TierIndex] = {}
        self._shown: dict[tuple[int, Tier], Holder] = {}
        self._staged: dict[tuple[int, Tier], Holder] = {}

    def stored(self, slot: int, tier: Tier, parent: int | None, hashes: Hashes) -> None:
        """A run of consecutive blocks appeared; `parent` is the block before it, None where it starts a chain."""
        holder = self._shown.get((slot, tier))
        if holder is None:
            holder = self._tier(tier).open(slot)
            self._tiers[tier].show(holder)
            self._shown[slot, tier] = holder
        self._store(holder, tier, parent, hashes)

    def removed(self, slot: int, tier: Tier, hashes: Hashes) -> None:
        holder = self._shown.get((slot, tier))
        if holder is None:
            self._tier(tier).absent_removals += len(hashes)
        else:
            self.pairs -= self._tiers[tier].removed(holder, hashes)

    def cleared(self, slot: int, tier: Tier | None = None) -> None:
        """Everything of the slot went, or of one of its tiers. O(1); memory comes back with later calls."""
        for each in TIERS if tier is None else (tier,):
            self._retire(self._shown, slot, each)

    def drop(self, slot: int) -> None:
        """The slot is gone, what is staged for it included. O(1) like `cleared`."""
        self.cleared(slot)
        self.unstage(slot)

    def stage(self, slot: int, tier: Tier, parent: int | None, hashes: Hashes) -> None:
        """Part of a snapshot: counts for nothing until `swap`."""
        holder = self._staged.get((slot, tier))
        if holder is None:
            holder = self._tier(tier).open(slot)
            self._staged[slot, tier] = holder
        self._store(holder, tier, parent, hashes)

    def swap(self, slot: int) -> None:
        """What was staged takes the place of what the slot had. O(1)."""
        for tier in TIERS:
            self._retire(self._shown, slot, tier)
            holder = self._staged.pop((slot, tier), None)
            if holder is not None:
                self._shown[slot, tier] = holder
                self._tiers[tier].show(holder)

    def unstage(self, slot: int) -> None:
        for tier in TIERS:
            self._retire(self._staged, slot, tier)

    def match(self, hashes: Hashes) -> Match:
        """O(slots with distinct depth x log depth) for each tier in use."""
        found: Match = {}
        for tier, index in self._tiers.items():
            groups = index.match(hashes)
            if groups:
                found[tier] = depths = dict[int, int]()
                for depth, slots in groups:
                    for slot in slots:
                        depths[slot] = depth
        return found

    def sweep(self, budget: int) -> bool:
        """Give back memory of dropped slots, about `budget` entries' worth of work. True: there is more to do."""
        return any([index.sweep(budget) for index in self._tiers.values()])

    @property
    def is_swept(self) -> bool:
        return all([index.is_swept for index in self._tiers.values()])

    @property
    def blocks(self) -> int:
        """Distinct blocks over tiers, those not yet swept included."""
        return sum(index.blocks for index in self._tiers.values())

    @property
    def absent_removals(self) -> int:
        return sum(index.absent_removals for index in self._tiers.values())

    @property
    def contradictions(self) -> int:
        return sum(index.contradictions for index in self._tiers.values())

    def held(self, slot: int, tier: Tier) -> set[int]:
        """O(blocks of the tier): for tests and for people."""
        holder = self._shown.get((slot, tier))
        return set() if holder is None else self._tiers[tier].held(holder)

    def check_integrity(self) -> None:
        """O(index)."""
        holders = [*self._shown.values(), *self._staged.values()]
        assert self.pairs == sum(holder.blocks for holder in holders), "pairs"
        for index in self._tiers.values():
            index.check_integrity()

    def _store(self, holder: Holder, tier: Tier, parent: int | None, hashes: Hashes) -> None:
        room = self.limit_pairs - self.pairs
        if len(hashes) > room:
            # Blocks the holder has already need no room, so a run at the bound may lose some that would fit.
            self.refused_blocks += len(hashes) - max(0, room)
            hashes = hashes[: max(0, room)]
        self.pairs += self._tiers[tier].stored(holder, parent, hashes)

    def _tier(self, tier: Tier) -> TierIndex:
        index = self._tiers.get(tier)
        if index is None:
            index = self._tiers[tier] = TierIndex(sweep_entries=self._sweep_entries)
        return index

    def _retire(self, holders: dict[tuple[int, Tier], Holder], slot: int, tier: Tier) -> None:
        holder = holders.pop((slot, tier), None)
        if holder is not None:
            self.pairs -= holder.blocks
            self._tiers[tier].retire(holder)

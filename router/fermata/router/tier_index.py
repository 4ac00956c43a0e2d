"""Which slots hold which blocks, for one tier: one dict hash -> bit mask of holders.

A *holder* is one life of a slot in the tier: a bit. Dropping it is O(1): its bit turns invisible, and a sweep takes
it out of the masks a few entries with each later call, after which the bit is used again. So a slot that is cleared,
dropped or swapped for a snapshot costs nothing at that moment, and a snapshot is built under an invisible bit.

While all visible holders are closed (see `chain_links`) and nothing else is in the masks, masks only shrink along a
chain, so as integers they only fall: a match is one bisection a distinct depth, in C, with the dict's own look-up
as key. Holders with gaps walk the chain: exact, and O(depth).

Events cost O(blocks named). Memory a block: an int key (48 bytes) and its entries in two dicts (30 to 60 bytes each).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeAlias

from fermata.router.chain_links import FORKED, ROOT, ChainLinks, bits
from fermata.router.mask_bisection import NotClosed, bisect_masks

Hashes: TypeAlias = "memoryview | array[int]"
"""Sequence hashes, format Q."""
Group = tuple[int, tuple[int, ...]]
"""A depth, and the slots whose match ends there."""

_SWEEP_A_BLOCK = 4
_DECODED_MASKS = 4096
_CROWD = 16


class Holder:
    """One life of a slot in the tier."""

    __slots__ = ("bit", "blocks", "contradicted", "gaps", "orphans", "slot")

    def __init__(self, slot: int, bit: int) -> None:
        self.slot = slot
        self.bit = bit
        self.blocks = 0
        self.gaps: dict[int, int] = {}
        """Absent block -> how many of its children are present."""
        self.orphans: dict[int, int] = {}
        """Present block -> its absent parent, unless the links know (twigs). May name parents that came back."""
        self.contradicted = False
        """Was told of a block under another parent than before: only walks are safe."""

    @property
    def is_closed(self) -> bool:
        return not self.gaps and not self.contradicted


class TierIndex:
    def __init__(self, *, sweep_entries: int) -> None:
        self._sweep_entries = sweep_entries
        self._masks: dict[int, int] = {}
        self._older: dict[int, int] = {}
        """During a sweep: entries still to be moved to `_masks`."""
        self._links = ChainLinks(self._mask)
        self._holders: dict[int, Holder] = {}
        self._visible = 0
        self._gapped = 0
        self._hidden = 0
        self._retired = 0
        self._sweeping = 0
        self._free: list[int] = []
        self._bits_made = 0
        self._decoded: dict[int, tuple[int, ...]] = {}
        self._slot_of: dict[int, int] = {}
        self.absent_removals = 0
        self.contradictions = 0

    @property
    def blocks(self) -> int:
        """Distinct blocks, those of dropped holders included until swept."""
        return len(self._masks) + len(self._older)

    def open(self, slot: int) -> Holder:
        """A new, invisible life of the slot."""
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self._bits_made
            self._bits_made += 1
        holder = Holder(slot, bit)
        self._holders[bit] = holder
        self._hidden |= bit
        return holder

    def show(self, holder: Holder) -> None:
        self._hidden &= ~holder.bit
        self._visible |= holder.bit
        self._slot_of[holder.bit] = holder.slot
        self._note_gaps(holder)

    def retire(self, holder: Holder) -> None:
        """O(1); the holder must not be used again."""
        bit = holder.bit
        del self._holders[bit]
        self._hidden &= ~bit
        self._visible &= ~bit
        self._gapped &= ~bit
        if self._slot_of.pop(bit, None) is not None:
            # The bit will stand for another slot.
            self._decoded.clear()
        if holder.blocks:
            self._retired |= bit
        else:
            self._free.append(bit)

    def stored(self, holder: Holder, parent: int | None, hashes: Hashes) -> int:
        """Add a run of consecutive blocks; returns how many the holder did not have."""
        run = hashes.tolist()
        if not run:
            return 0
        prev = ROOT if parent is None else parent
        if self._older or self._retired:
            self._sweep_past(run, prev)
        bit = holder.bit
        held = list(map(self._masks.get, run))
        # What a sweep has not reached yet is named here only as a parent, which was settled just now.
        is_new_orphan = (
            prev != ROOT and not self._masks.get(prev, 0) & bit and not (held[0] or 0) & bit
        )
        added = self._add_run(holder, prev, run, held)
        holder.blocks += added
        if is_new_orphan:
            if prev in self._links.child and not self._mask(prev):
                self._links.haunt(prev)
            holder.gaps[prev] = holder.gaps.get(prev, 0) + 1
            holder.orphans[run[0]] = prev
        if holder.gaps:
            self._close_gaps(holder, run)
        return added

    def _add_run(self, holder: Holder, prev: int, run: list[int], held: list[int | None]) -> int:
        """Runs are mostly uniform, and those need no decision a block: three times as fast.

        Inside a run blocks follow one another by construction, so only the link to its first is checked.
        """
        mask = held[0]
        if held.count(mask) != len(run):
            return self._add_each(holder, prev, run)
        if mask is None:
            return self._add_new_run(holder, prev, run)
        if mask & holder.bit:
            return 0
        links = self._links
        if not links.twigs.keys().isdisjoint(run[1:]):
            return self._add_each(holder, prev, run)
        if links.child.get(prev) != run[0] and not links.gained(prev, run[0], holder.bit):
            self._contradicted(mask | holder.bit)
        # One shared int for the run: 48 bytes a block less where many slots have it.
        masks, shared = self._masks, mask | holder.bit
        for block in run:
            masks[block] = shared
        return len(set(run))

    def _add_new_run(self, holder: Holder, prev: int, run: list[int]) -> int:
        links = self._links
        if not links.ghosts.isdisjoint(run):
            return self._add_each(holder, prev, run)
        masks, bit = self._masks, holder.bit
        before = len(masks)
        for block in run:
            masks[block] = bit
        links.child.update(pairwise(run))
        if links.child.setdefault(prev, run[0]) != run[0]:
            links.link(prev, run[0])
        return len(masks) - before

    def _add_each(self, holder: Holder, prev: int, run: list[int]) -> int:
        masks, links, bit = self._masks, self._links, holder.bit
        added = 0
        for block in run:
            mask = masks.get(block, 0)
            if not mask & bit:
                masks[block] = mask | bit
                added += 1
                if not mask:
                    links.ghosts.discard(block)
                    if links.child.setdefault(prev, block) != block:
                        links.link(prev, block)
                elif links.child.get(prev) != block and not links.gained(prev, block, bit):
                    self._contradicted(mask | bit)
            prev = block
        return added

    def _contradicted(self, mask: int) -> None:
        """Nobody knows who is wrong: all that hold the block walk from now on, until dropped or cleared."""
        self.contradictions += 1
        for bit in bits(mask):
            holder = self._holders.get(bit)
            if holder is not None:
                holder.contradicted = True
                self._note_gaps(holder)

    def removed(self, holder: Holder, hashes: Iterable[int]) -> int:
        """Take blocks away; returns how many were there."""
        named = hashes if isinstance(hashes, list) else list(hashes)
        if self._older or self._retired:
            self._sweep_past(named, ROOT)
        masks, links, bit = self._masks, self._links, holder.bit
        had_gaps = bool(holder.gaps)
        gone = 0
        for block in named:
            mask = masks.get(block, 0)
            if not mask & bit:
                self.absent_removals += 1
                continue
            gone += 1
            children = links.children_on(block, bit) if block in links.child else 0
            if block in links.twigs:
                links.lost(block, bit)
            if mask == bit:
                del masks[block]
                links.forget(block)
            else:
                masks[block] = mask ^ bit
            if children:
                self._open_gap(holder, block, children)
            if holder.gaps:
                self._leave_gap(holder, block)
        holder.blocks -= gone
        if had_gaps or holder.gaps:
            self._note_gaps(holder)
        return gone

    def _open_gap(self, holder: Holder, block: int, children: int) -> None:
        holder.gaps[block] = children
        child = self._links.child.get(block, FORKED)
        if child != FORKED:
            holder.orphans[child] = block

    def _leave_gap(self, holder: Holder, block: int) -> None:
        """A removed block is no longer an orphan."""
        parent = holder.orphans.pop(block, None)
        if parent is None:
            parent = self._links.twigs.get(block)
        if parent is None or parent not in holder.gaps:
            return
        holder.gaps[parent] -= 1
        if not holder.gaps[parent]:
            del holder.gaps[parent]
            self._clean_orphans(holder)

    def _close_gaps(self, holder: Holder, run: list[int]) -> None:
        for block in run:
            holder.gaps.pop(block, None)
        self._clean_orphans(holder)
        self._note_gaps(holder)

    def _clean_orphans(self, holder: Holder) -> None:
        if not holder.gaps:
            holder.orphans.clear()

    def _note_gaps(self, holder: Holder) -> None:
        if holder.is_closed or not self._visible & holder.bit:
            self._gapped &= ~holder.bit
        else:
            self._gapped |= holder.bit

    def match(self, hashes: Hashes) -> list[Group]:
        """Longest prefix held whole, by slot: (depth, slots) with depths rising; slots with none are left out."""
        if not len(hashes) or not self._visible:
            return []
        view = memoryview(hashes)
        closed = self._visible & ~self._gapped
        if self._gapped or self._hidden or self._retired or self._sweeping:
            found = self._bisect_among(view, closed)
            found += self._walk(view, self._gapped)
        else:
            masks = self._masks
            try:
                found = bisect_masks(view, masks.__contains__, masks.__getitem__)
            except (KeyError, NotClosed):
                # A worker told untruths about parents. It costs time, not exactness.
                found = self._walk(view, self._visible)
        decoded = self._decoded
        return [(depth, decoded.get(mask) or self._decode(mask)) for depth, mask in found]

    def _bisect_among(self, view: memoryview, among: int) -> list[tuple[int, int]]:
        get = self._masks.get
        older = self._older.get

        def item(block: int) -> int:
            return (get(block) or older(block, 0)) & among

        try:
            return bisect_masks(view, item, item)
        except NotClosed:
            return self._walk(view, among)

    def _walk(self, view: memoryview, among: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        alive = among
        for depth, block in enumerate(view):
            if not alive:
                return found
            still = alive & self._mask(block)
            if still != alive:
                if depth:
                    found.append((depth, alive ^ still))
                alive = still
        if alive:
            found.append((len(view), alive))
        return found

    def _decode(self, mask: int) -> tuple[int, ...]:
        if len(self._decoded) >= _DECODED_MASKS:
            self._decoded.clear()
        slots = tuple(self._slot_of[bit] for bit in bits(mask))
        self._decoded[mask] = slots
        return slots

    def _mask(self, block: int) -> int:
        return self._masks.get(block) or self._older.get(block, 0)

    @property
    def is_swept(self) -> bool:
        return not (self._retired or self._sweeping)

    def sweep(self, budget: int) -> bool:
        """Take bits of retired holders out of up to `budget` masks. True: there is more to do."""
        if not self._older:
            if not self._retired:
                return False
            self._older, self._masks = self._masks, {}
            self._sweeping, self._retired = self._retired, 0
        older = self._older
        for _ in range(min(budget, len(older))):
            self._settle(*older.popitem())
        self._finish_sweep()
        return not self.is_swept

    def _finish_sweep(self) -> None:
        if self._sweeping and not self._older:
            self._free += bits(self._sweeping)
            self._sweeping = 0

    def _sweep_past(self, named: Iterable[int], parent: int) -> None:
        """Do a share of the sweep, the more the more bits wait for it, and bring the named entries up to date."""
        crowd = (self._retired | self._sweeping).bit_count()
        blocks = [parent, *named]
        self.sweep((self._sweep_entries + _SWEEP_A_BLOCK * len(blocks)) * (1 + crowd // _CROWD))
        for block in blocks:
            mask = self._older.pop(block, 0)
            if mask:
                self._settle(block, mask)
        self._finish_sweep()

    def _settle(self, block: int, mask: int) -> None:
        dead = mask & self._sweeping
        if dead and block in self._links.twigs:
            for bit in bits(dead):
                self._links.lost(block, bit)
        if mask != dead:
            self._masks[block] = mask ^ dead
        else:
            self._links.forget(block)

    def held(self, holder: Holder) -> set[int]:
        """O(blocks of the tier): for tests."""
        entries = (*self._masks.items(), *self._older.items())
        return {block for block, mask in entries if mask & holder.bit}

    def check_integrity(self) -> None:
        """O(index). Recounts everything that is kept incrementally."""
        assert not self._masks.keys() & self._older.keys()
        known = self._retired | self._sweeping
        for bit, holder in self._holders.items():
            assert not known & bit, "one bit, one life"
            known |= bit
            held = self.held(holder)
            assert holder.blocks == len(held), "blocks of a holder"
            assert bool(self._visible & bit) != bool(self._hidden & bit)
            assert bool(self._gapped & bit) == bool(self._visible & bit and not holder.is_closed)
            if not holder.contradicted:
                assert holder.gaps == self._recount_gaps(held), "gaps of a holder"
        assert self._visible | self._hidden == known & ~(self._retired | self._sweeping)
        for mask in (*self._masks.values(), *self._older.values()):
            assert mask, "a block has a holder"
            assert not mask & ~known, "no bit without a life"
        assert not any(mask & self._sweeping for mask in self._masks.values())
        assert sum(self._free) | known == (1 << self._bits_made) - 1, "no bit is lost"
        assert not sum(self._free) & known
        assert bool(self._sweeping) == bool(self._older)
        self._links.check_integrity()

    def _recount_gaps(self, held: set[int]) -> dict[int, int]:
        gaps: dict[int, int] = {}
        for parent, child in self._links.child.items():
            if parent != ROOT and parent not in held:
                children = self._links.forks[parent].children if child < 0 else {child}
                if count := len(children & held):
                    gaps[parent] = count
        return gaps

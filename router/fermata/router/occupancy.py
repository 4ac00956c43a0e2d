"""How much of a slot's KV its programs fill, with every block that several of them share charged once.

A program's charge is the chain of its last turn (full blocks), its tail (the unfilled block and what was generated
since), and a reserve for growth. Chains live in one `ChainTrie` whose holders are (slot, group), so a charge, a release
and a program that changes its group cost O(log chain + forks along it), and every sum is read in O(1).

Groups nest, which is how a block that a running and an idle program share gets the dearer of the two weights:
`REASONING` holds the programs with a turn, `TOOL` these and those in a tool gap, `HUMAN` all. `STAYING` holds all but
those marked to be paused when their turn ends: what will be left of the use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fermata.router.chain_trie import ChainTrie, Node
from fermata.router.tier_index import Hashes

REASONING, TOOL, HUMAN, STAYING = range(4)
_GROUP_BITS = 2


@dataclass(frozen=True, slots=True)
class Weights:
    """What a token counts for. `reserve` is in tokens, a program."""

    tool: float = 1.0
    human: float = 1.0
    reserve: int = 0


@dataclass(slots=True, eq=False)
class Room:
    """One slot while it is open; a slot number used again is another room."""

    slot: int
    capacity: int | None
    """Tokens; None where the worker publishes none."""
    model: str
    is_open: bool = True
    tails: list[int] = field(default_factory=lambda: [0] * 4)
    counts: list[int] = field(default_factory=lambda: [0] * 4)
    """Tail tokens and programs, by the group that a program is in, and of those that stay."""


@dataclass(slots=True, eq=False)
class Charge:
    """One program's part of a room."""

    room: Room
    node: Node
    tokens: int
    tail: int
    group: int
    stays: bool = True


class Occupancy:
    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._trie = ChainTrie()
        self._rooms: dict[int, Room] = {}
        self.weights = Weights()
        self._changed: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        return slot in self._rooms

    def __getitem__(self, slot: int) -> Room:
        return self._rooms[slot]

    @property
    def rooms(self) -> dict[int, Room]:
        """By slot; not to be changed."""
        return self._rooms

    @property
    def has_changed(self) -> bool:
        return bool(self._changed)

    @property
    def refused_chains(self) -> int:
        return self._trie.refused_chains

    def take_changed(self) -> set[int]:
        """Slots whose use or capacity changed since the last call; closed ones may be among them."""
        changed, self._changed = self._changed, set()
        return changed

    def open(self, slot: int, capacity: int | None, *, model: str) -> Room:
        assert slot not in self._rooms
        room = self._rooms[slot] = Room(slot, capacity, model)
        self._changed.add(slot)
        return room

    def resize(self, slot: int, capacity: int | None, *, model: str) -> bool:
        """True when that changed it."""
        room = self._rooms[slot]
        room.model = model
        if room.capacity == capacity:
            return False
        room.capacity = capacity
        self._changed.add(slot)
        return True

    def close(self, slot: int) -> None:
        """Its charges were released."""
        room = self._rooms.pop(slot)
        assert not any(room.counts), "charges of a closed room"
        room.is_open = False
        self._changed.add(slot)

    def charge(self, room: Room, chain: Hashes, *, tokens: int, group: int, stays: bool) -> Charge:
        base = room.slot << _GROUP_BITS
        node = self._trie.hold(chain, base | HUMAN)
        charge = Charge(
            room, node, tokens, max(0, tokens - node.end * self._block_size), group, stays
        )
        for inner in range(group, HUMAN):
            self._trie.hold_again(node, base | inner)
        self._count(room, group, charge.tail, 1)
        if stays:
            self._trie.hold_again(node, base | STAYING)
            self._count(room, STAYING, charge.tail, 1)
        return charge

    def release(self, charge: Charge) -> None:
        room, node = charge.room, charge.node
        base = room.slot << _GROUP_BITS
        if charge.stays:
            self._count(room, STAYING, -charge.tail, -1)
            self._trie.release(node, base | STAYING)
        self._count(room, charge.group, -charge.tail, -1)
        for inner in range(charge.group, HUMAN):
            self._trie.release(node, base | inner)
        self._trie.release(node, base | HUMAN)

    def grow(self, charge: Charge, tokens: int) -> None:
        """The context has `tokens` now; blocks beyond the chain are its own."""
        tail = max(0, tokens - charge.node.end * self._block_size)
        more, charge.tail, charge.tokens = tail - charge.tail, tail, tokens
        self._count(charge.room, charge.group, more, 0)
        if charge.stays:
            self._count(charge.room, STAYING, more, 0)

    def regroup(self, charge: Charge, group: int) -> None:
        room, base = charge.room, charge.room.slot << _GROUP_BITS
        for inner in range(group, charge.group):
            self._trie.hold_again(charge.node, base | inner)
        for inner in range(charge.group, group):
            self._trie.release(charge.node, base | inner)
        self._count(room, charge.group, -charge.tail, -1)
        self._count(room, group, charge.tail, 1)
        charge.group = group

    def mark(self, charge: Charge, *, stays: bool) -> None:
        if stays == charge.stays:
            return
        charge.stays = stays
        holder = charge.room.slot << _GROUP_BITS | STAYING
        if stays:
            self._trie.hold_again(charge.node, holder)
            self._count(charge.room, STAYING, charge.tail, 1)
        else:
            self._count(charge.room, STAYING, -charge.tail, -1)
            self._trie.release(charge.node, holder)

    def use(self, slot: int) -> float:
        """Tokens, weighed. O(1)."""
        room, size, weights = self._rooms[slot], self._trie.size, self.weights
        base = slot << _GROUP_BITS
        reasoning, tool = size(base), size(base | TOOL)
        blocks = (
            reasoning
            + weights.tool * (tool - reasoning)
            + weights.human * (size(base | HUMAN) - tool)
        )
        tails, counts, reserve = room.tails, room.counts, weights.reserve
        return (
            blocks * self._block_size
            + (tails[REASONING] + reserve * counts[REASONING])
            + weights.tool * (tails[TOOL] + reserve * counts[TOOL])
            + weights.human * (tails[HUMAN] + reserve * counts[HUMAN])
        )

    def staying(self, slot: int) -> int:
        """Tokens, not weighed, of the programs that are not to leave."""
        room = self._rooms[slot]
        blocks = self._trie.size(slot << _GROUP_BITS | STAYING)
        return (
            blocks * self._block_size
            + room.tails[STAYING]
            + self.weights.reserve * room.counts[STAYING]
        )

    def programs(self, slot: int) -> int:
        return sum(self._rooms[slot].counts[:STAYING])

    def staying_programs(self, slot: int) -> int:
        return self._rooms[slot].counts[STAYING]

    def shared(self, chain: Hashes) -> dict[int, int]:
        """By slot, tokens of the chain that programs there hold already: they would not be charged again."""
        found: dict[int, int] = {}
        for holder, depth in self._trie.match(chain).items():
            if holder & 3 == HUMAN:
                found[holder >> _GROUP_BITS] = depth * self._block_size
        return found

    def reweigh(self, weights: Weights) -> None:
        self.weights = weights
        self._changed.update(self._rooms)

    def _count(self, room: Room, group: int, tail: int, programs: int) -> None:
        room.tails[group] += tail
        room.counts[group] += programs
        self._changed.add(room.slot)

    def check_integrity(self, charges: list[Charge]) -> None:
        """O(blocks of all charges): every sum equals a recount over them."""
        self._trie.check_integrity()
        by_slot: dict[int, list[Charge]] = {slot: [] for slot in self._rooms}
        for charge in charges:
            assert charge.room is self._rooms[charge.room.slot]
            assert charge.tail == max(0, charge.tokens - charge.node.end * self._block_size)
            by_slot[charge.room.slot].append(charge)
        for slot, those in by_slot.items():
            self._check_room(slot, those)

    def _check_room(self, slot: int, charges: list[Charge]) -> None:
        room = self._rooms[slot]
        for group in (REASONING, TOOL, HUMAN):
            own = [charge for charge in charges if charge.group == group]
            assert room.counts[group] == len(own)
            assert room.tails[group] == sum(charge.tail for charge in own)
            inside = [charge for charge in charges if charge.group <= group]
            assert self._trie.size(slot << _GROUP_BITS | group) == _distinct(inside)
        stay = [charge for charge in charges if charge.stays]
        assert room.counts[STAYING] == len(stay)
        assert room.tails[STAYING] == sum(charge.tail for charge in stay)
        assert self._trie.size(slot << _GROUP_BITS | STAYING) == _distinct(stay)
        assert self.use(slot) >= 0
        assert self.staying(slot) >= 0


def _distinct(charges: list[Charge]) -> int:
    blocks: set[int] = set()
    for charge in charges:
        blocks.update(charge.node.chain[: charge.node.end])
    return len(blocks)

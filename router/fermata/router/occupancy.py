"""How much of a slot's KV its programs fill, with every block that several of them share charged once.

A program's charge is the chain of its last turn (full blocks), its tail (the unfilled block and what was generated
since), and a reserve for growth. Chains live in one `ChainTrie` whose holders are (slot, level), so a charge, a release
and a program whose phase changes cost O(log chain + forks along it) at most, O(1) where a turn goes on from the one
before, and every sum is read in O(1).

A program is in one of three groups: with a turn, in a tool gap, in a human gap. Groups of one weight are one *level*,
and levels nest, dearest first: that is how a block shared by a running and an idle program gets the dearer weight. Of
programs that are marked to leave, a fourth holder keeps count of what will be left; it exists on slots that have any.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fermata.router.chain_trie import ChainTrie, Node
from fermata.router.tier_index import Hashes

REASONING, TOOL, HUMAN = range(3)
"""Groups."""
_STAYING = 3
_LEVEL_BITS = 2


@dataclass(frozen=True, slots=True)
class Weights:
    """What a token counts for; of a program with a turn, 1. `reserve` is in tokens, a program."""

    tool: float = 1.0
    human: float = 1.0
    reserve: int = 0


@dataclass(slots=True, eq=False)
class Charge:
    """One program's part of a room."""

    room: Room
    node: Node
    tokens: int
    tail: int
    group: int
    stays: bool = True


@dataclass(slots=True, eq=False)
class Room:
    """One slot while it is open; a slot number used again is another room."""

    slot: int
    capacity: int | None
    """Tokens; None where the worker publishes none."""
    model: str
    is_open: bool = True
    charges: dict[Charge, None] = field(default_factory=dict[Charge, None])
    tails: list[int] = field(default_factory=lambda: [0] * 3)
    counts: list[int] = field(default_factory=lambda: [0] * 3)
    """Tail tokens and programs, by level."""
    marked: int = 0
    """Programs that are to leave, and their tails."""
    marked_tails: int = 0


class Occupancy:
    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._trie = ChainTrie()
        self._rooms: dict[int, Room] = {}
        self._changed: set[int] = set()
        self.weights = Weights()
        self._levels: tuple[int, ...] = (0, 0, 0)
        """Of the groups."""
        self._level_weights: tuple[float, ...] = (1.0,)

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
        assert not room.charges, "charges of a closed room"
        room.is_open = False
        self._changed.add(slot)

    def charge(
        self,
        room: Room,
        chain: Hashes,
        *,
        tokens: int,
        group: int,
        stays: bool,
        after: Charge | None = None,
    ) -> Charge:
        """`after`: the same program's last charge, still held, which the chain may go on from."""
        holder = room.slot << _LEVEL_BITS | len(self._level_weights) - 1
        trie = self._trie
        node = trie.hold_after(after.node, chain, holder) if after else trie.hold(chain, holder)
        charge = Charge(room, node, tokens, max(0, tokens - node.end * self._block_size), group)
        for inner in range(holder - 1, holder - len(self._level_weights) + self._levels[group], -1):
            self._trie.hold_again(node, inner)
        if room.marked:
            self._trie.hold_again(node, room.slot << _LEVEL_BITS | _STAYING)
        room.charges[charge] = None
        self._count(room, self._levels[group], charge.tail, 1)
        if not stays:
            self.mark(charge, stays=False)
        return charge

    def release(self, charge: Charge) -> None:
        room, level = charge.room, self._levels[charge.group]
        if not charge.stays:
            self.mark(charge, stays=True)
        if room.marked:
            self._trie.release(charge.node, room.slot << _LEVEL_BITS | _STAYING)
        holder = room.slot << _LEVEL_BITS | level
        for each in range(holder, holder + len(self._level_weights) - level):
            self._trie.release(charge.node, each)
        del room.charges[charge]
        self._count(room, level, -charge.tail, -1)

    def grow(self, charge: Charge, tokens: int) -> None:
        """The context has `tokens` now; blocks beyond the chain are its own."""
        tail = max(0, tokens - charge.node.end * self._block_size)
        more, charge.tail, charge.tokens = tail - charge.tail, tail, tokens
        if more:
            self._count(charge.room, self._levels[charge.group], more, 0)
            if not charge.stays:
                charge.room.marked_tails += more

    def regroup(self, charge: Charge, group: int) -> None:
        before, level = self._levels[charge.group], self._levels[group]
        charge.group = group
        if before == level:
            return
        room, base = charge.room, charge.room.slot << _LEVEL_BITS
        for inner in range(level, before):
            self._trie.hold_again(charge.node, base | inner)
        for inner in range(before, level):
            self._trie.release(charge.node, base | inner)
        self._count(room, before, -charge.tail, -1)
        self._count(room, level, charge.tail, 1)

    def mark(self, charge: Charge, *, stays: bool) -> None:
        """O(programs of the slot) for its first mark and its last, O(1) else."""
        if stays == charge.stays:
            return
        room = charge.room
        holder = room.slot << _LEVEL_BITS | _STAYING
        charge.stays = stays
        self._changed.add(room.slot)
        if not stays:
            if not room.marked:
                for each in room.charges:
                    self._trie.hold_again(each.node, holder)
            self._trie.release(charge.node, holder)
            room.marked += 1
            room.marked_tails += charge.tail
            return
        room.marked -= 1
        room.marked_tails -= charge.tail
        if room.marked:
            self._trie.hold_again(charge.node, holder)
            return
        for each in room.charges:
            if each is not charge:
                self._trie.release(each.node, holder)

    def use(self, slot: int) -> float:
        """Tokens, weighed. O(1)."""
        room, size, reserve = self._rooms[slot], self._trie.size, self.weights.reserve
        base, used, inside = slot << _LEVEL_BITS, 0.0, 0
        for level, weight in enumerate(self._level_weights):
            blocks = size(base | level)
            tokens = (blocks - inside) * self._block_size + room.tails[level]
            used += weight * (tokens + reserve * room.counts[level])
            inside = blocks
        return used

    def staying(self, slot: int) -> int:
        """Tokens, not weighed, of the programs that are not to leave."""
        room = self._rooms[slot]
        last = _STAYING if room.marked else len(self._level_weights) - 1
        blocks = self._trie.size(slot << _LEVEL_BITS | last)
        tails = sum(room.tails) - room.marked_tails
        reserve = self.weights.reserve * (len(room.charges) - room.marked)
        return blocks * self._block_size + tails + reserve

    def programs(self, slot: int) -> int:
        return len(self._rooms[slot].charges)

    def staying_programs(self, slot: int) -> int:
        room = self._rooms[slot]
        return len(room.charges) - room.marked

    def shared(self, chain: Hashes) -> dict[int, int]:
        """By slot, tokens of the chain that programs there hold already: they would not be charged again."""
        found: dict[int, int] = {}
        last, mask = len(self._level_weights) - 1, (1 << _LEVEL_BITS) - 1
        for holder, depth in self._trie.match(chain).items():
            if holder & mask == last:
                found[holder >> _LEVEL_BITS] = depth * self._block_size
        return found

    def reweigh(self, weights: Weights) -> None:
        """O(charges), when it changes what weighs alike."""
        by_group = (1.0, weights.tool, weights.human)
        distinct = sorted(set(by_group), reverse=True)
        levels = tuple(distinct.index(weight) for weight in by_group)
        self.weights = weights
        self._changed.update(self._rooms)
        if levels == self._levels:
            self._level_weights = tuple(distinct)
            return
        held = [(room, list(room.charges)) for room in self._rooms.values()]
        unmarked = [charge for _, charges in held for charge in charges if not charge.stays]
        for charge in unmarked:
            self.mark(charge, stays=True)
        self._rehold(held, levels, tuple(distinct))
        for charge in unmarked:
            self.mark(charge, stays=False)

    def _rehold(
        self,
        held: list[tuple[Room, list[Charge]]],
        levels: tuple[int, ...],
        level_weights: tuple[float, ...],
    ) -> None:
        """All charges under other levels; the new ones are held before the old ones go, so no chain is lost."""
        before, depth = self._levels, len(self._level_weights)
        self._levels, self._level_weights = levels, level_weights
        for room, charges in held:
            base = room.slot << _LEVEL_BITS
            room.tails, room.counts = [0] * 3, [0] * 3
            for charge in charges:
                level = levels[charge.group]
                for each in range(level, len(level_weights)):
                    self._trie.hold_again(charge.node, base | each)
                for each in range(before[charge.group], depth):
                    self._trie.release(charge.node, base | each)
                self._count(room, level, charge.tail, 1)

    def _count(self, room: Room, level: int, tail: int, programs: int) -> None:
        room.tails[level] += tail
        room.counts[level] += programs
        self._changed.add(room.slot)

    def check_integrity(self, charges: list[Charge]) -> None:
        """O(blocks of all charges): every sum equals a recount over them."""
        self._trie.check_integrity()
        assert sum(len(room.charges) for room in self._rooms.values()) == len(charges)
        for charge in charges:
            assert charge.room is self._rooms[charge.room.slot]
            assert charge in charge.room.charges
            assert charge.tail == max(0, charge.tokens - charge.node.end * self._block_size)
        for room in self._rooms.values():
            self._check_room(room)

    def _check_room(self, room: Room) -> None:
        base = room.slot << _LEVEL_BITS
        of_level = {each: self._levels[each.group] for each in room.charges}
        for level in range(len(self._level_weights)):
            own = [charge for charge in room.charges if of_level[charge] == level]
            assert room.counts[level] == len(own)
            assert room.tails[level] == sum(charge.tail for charge in own)
            inside = [charge for charge in room.charges if of_level[charge] <= level]
            assert self._trie.size(base | level) == _distinct(inside)
        stay = [charge for charge in room.charges if charge.stays]
        assert room.marked == len(room.charges) - len(stay)
        assert self._trie.size(base | _STAYING) == (_distinct(stay) if room.marked else 0)
        reserve = self.weights.reserve
        tokens = sum(charge.tail + reserve for charge in stay)
        assert self.staying(room.slot) == _distinct(stay) * self._block_size + tokens
        assert self.use(room.slot) >= 0


def _distinct(charges: list[Charge]) -> int:
    blocks: set[int] = set()
    for charge in charges:
        blocks.update(charge.node.chain[: charge.node.end])
    return len(blocks)

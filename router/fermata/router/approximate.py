"""An index without events: what a rank should have, judged by the turns this router sent there.

An engine that publishes no KV events still keeps what it prefilled, so each prompt that was prefilled on a slot is
taken to be there. A grant's chain is one *record*, kept whole until it ages out: shared prefixes are stored once
(`chain_trie`), and a record that a later turn of the same session extends is dropped at once, since the later one
covers it. So a turn costs O(log history), like its match.

Two rules say when a record goes. `Lru` alone: the least recently used ones of a slot go while its distinct blocks are
more than the rank can hold. `Ttl`: each also goes some time after it was last used, for engines that share memory with
others. What a rank evicted earlier than that is matched in vain, which costs a worse placement and no wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from fermata.core.spec import KvSpec
from fermata.router.chain_trie import ChainTrie, Node
from fermata.router.expiry import Expiry
from fermata.router.tier_index import Hashes

_MOST_RECORDS = 4096
"""Of a slot: bounds what chains of few blocks cost beyond their blocks."""


@dataclass(slots=True)
class _Memory:
    """Of one slot: its records, the one used longest ago first."""

    capacity_blocks: int
    records: OrderedDict[Node, None] = field(default_factory=OrderedDict[Node, None])


class ApproximateIndex:
    def __init__(self, spec: KvSpec, *, width_s: float) -> None:
        self._spec = spec
        self._trie = ChainTrie()
        self._slots: dict[int, _Memory] = {}
        self._ages: Expiry[tuple[int, Node]] = Expiry(width_s=width_s)
        self.aged_out = 0
        self.displaced = 0
        """Records that went because the rank can not hold more."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def __len__(self) -> int:
        return sum(len(memory.records) for memory in self._slots.values())

    def blocks(self, slot: int) -> int:
        """Distinct ones the slot is taken to have."""
        return self._trie.size(slot)

    def open(self, slot: int, *, capacity_blocks: int) -> None:
        assert slot not in self._slots, slot
        self._slots[slot] = _Memory(max(0, capacity_blocks))

    def close(self, slot: int) -> None:
        """O(records of the slot). A slot that is not here is no mistake."""
        memory = self._slots.get(slot)
        if memory is not None:
            for node in list(memory.records):
                self._drop(slot, memory, node)
            del self._slots[slot]

    def learn(self, slot: int, chain: Hashes, now: float) -> None:
        """The slot has prefilled this, or used it again. Nothing for a slot that is not here."""
        memory = self._slots.get(slot)
        if memory is None or not len(chain):
            return
        node = self._trie.hold(chain, slot)
        if node.parent is None:
            return  # no chain: the trie refused it, and counted
        if node in memory.records:
            self._trie.release(node, slot)
            memory.records.move_to_end(node)
        else:
            memory.records[node] = None
        self._supersede(slot, memory, node)
        if self._spec.approximate == "Ttl":
            self._ages.set((slot, node), now + self._spec.approximate_ttl_s)
        self._displace(slot, memory)

    def match(self, chain: Hashes) -> dict[int, int]:
        """Slot -> depth in blocks, above 0."""
        return self._trie.match(chain) if self._slots else {}

    def expire(self, now: float) -> None:
        """O(records that expire)."""
        for slot, node in self._ages.due(now):
            self.aged_out += 1
            self._drop(slot, self._slots[slot], node)

    def next_expiry(self) -> float | None:
        return self._ages.next()

    def apply(self, spec: KvSpec, now: float) -> None:
        """Another policy. Records stay; their age counts from now where it did not count. O(records) at a change."""
        before, self._spec = self._spec, spec
        if (before.approximate, before.approximate_ttl_s) == (
            spec.approximate,
            spec.approximate_ttl_s,
        ):
            return
        for slot, memory in self._slots.items():
            for node in memory.records:
                if spec.approximate == "Ttl":
                    self._ages.set((slot, node), now + spec.approximate_ttl_s)
                else:
                    self._ages.cancel((slot, node))

    def _supersede(self, slot: int, memory: _Memory, node: Node) -> None:
        """Records of prefixes of this one: it covers them and is younger. O(forks above it)."""
        above = node.parent
        while above is not None:
            # Releasing may join nodes, so the way up is read first; the one above it stays, as it holds `node`.
            at, above = above, above.parent
            if at in memory.records:
                self._drop(slot, memory, at)

    def _displace(self, slot: int, memory: _Memory) -> None:
        while self._trie.size(slot) > memory.capacity_blocks or len(memory.records) > _MOST_RECORDS:
            self.displaced += 1
            self._drop(slot, memory, next(iter(memory.records)))

    def _drop(self, slot: int, memory: _Memory, node: Node) -> None:
        del memory.records[node]
        self._ages.cancel((slot, node))
        self._trie.release(node, slot)

    def check_integrity(self) -> None:
        """O(everything)."""
        self._trie.check_integrity()
        for slot, memory in self._slots.items():
            blocks: set[int] = set()
            for node in memory.records:
                blocks.update(node.chain[: node.end])
                assert ((slot, node) in self._ages) == (self._spec.approximate == "Ttl")
            assert self.blocks(slot) == len(blocks) <= memory.capacity_blocks
            assert len(memory.records) <= _MOST_RECORDS
        assert len(self._ages) in (0, len(self))

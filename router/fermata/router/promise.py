"""What leases promise: their prefix on their slot, from the Grant until the KV events that prove it were applied.

So siblings forked within a prefill, and a turn that outruns its events, still find their prefix. A lease is *active*
until it ends; a promise may linger a moment longer, because the last Output and the rank's events travel on different
links. `chain_trie` keeps both: a slot's active chains and its promised ones are two holders there.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from fermata.router.chain_trie import ChainTrie, Node
from fermata.router.tier_index import Hashes

_MOST_LINGERING = 1024


class Promises:
    def __init__(self) -> None:
        self._trie = ChainTrie()
        self._lingering: dict[int, list[tuple[int, int, Node]]] = {}
        """Slot -> heap of (event sequence that ends it, tie-break, chain)."""
        self._ties = count()
        self.lingering = 0

    @property
    def refused_chains(self) -> int:
        return self._trie.refused_chains

    def distinct_blocks(self, slot: int) -> int:
        """Blocks of the slot's active leases, shared ones counted once."""
        return self._trie.size(_active(slot))

    def match(self, hashes: Hashes) -> tuple[dict[int, int], dict[int, int]]:
        """By slot, how far the chain runs along what is promised there, and along what is active there."""
        promised: dict[int, int] = {}
        active: dict[int, int] = {}
        for holder, depth in self._trie.match(hashes).items():
            (promised if holder & 1 else active)[holder >> 1] = depth
        return promised, active

    def hold(self, slot: int, hashes: Hashes) -> Node:
        node = self._trie.hold(hashes, _active(slot))
        self._trie.hold_again(node, _promised(slot))
        return node

    def keep(self, slot: int, node: Node, sequence: int) -> None:
        """Its lease finished; the promise stands until the slot's event `sequence` was applied."""
        self._trie.release(node, _active(slot))
        lingering = self._lingering.setdefault(slot, [])
        heappush(lingering, (sequence, next(self._ties), node))
        self.lingering += 1
        if len(lingering) > _MOST_LINGERING:
            self._release_first(slot, lingering)

    def withdraw(self, slot: int, node: Node) -> None:
        """Its lease ended and promises nothing any more."""
        self._trie.release(node, _active(slot))
        self._trie.release(node, _promised(slot))

    def settle(self, slot: int, applied: int) -> None:
        """The slot's events up to `applied` are in the index. O(promises that end)."""
        lingering = self._lingering.get(slot)
        while lingering and lingering[0][0] <= applied:
            self._release_first(slot, lingering)

    def drop(self, slot: int) -> None:
        """The slot is gone, or is known to have lost what it had. Active leases are the caller's."""
        lingering = self._lingering.pop(slot, [])
        while lingering:
            self._release_first(slot, lingering)

    def _release_first(self, slot: int, lingering: list[tuple[int, int, Node]]) -> None:
        _, _, node = heappop(lingering)
        self.lingering -= 1
        self._trie.release(node, _promised(slot))

    def check_integrity(self, active: dict[int, list[Node]]) -> None:
        """`active`: the chains of each slot's leases."""
        self._trie.check_integrity()
        assert self.lingering == sum(map(len, self._lingering.values()))
        for slot, nodes in active.items():
            paths = {id(above): above for node in nodes for above in node.path()}
            blocks = sum(above.end - above.start for above in paths.values())
            assert self.distinct_blocks(slot) == blocks, "distinct blocks of a slot"
        for lingering in self._lingering.values():
            ordered = list(lingering)
            heapify(ordered)
            assert (
                ordered[0][0] == min(sequence for sequence, _, _ in lingering)
                if lingering
                else True
            )


def _active(slot: int) -> int:
    return slot << 1


def _promised(slot: int) -> int:
    return slot << 1 | 1

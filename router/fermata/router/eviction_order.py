"""In which order a slot's engine would evict its idle chains: a mirror of its LRU, from what the router sees.

A chain becomes evictable when its turn finishes, and is dropped from its tail; so the order is that of the last
finishes, and a Removed event that names a chain's last block says that the engine began to take it. O(1) a finish,
O(blocks named) a removal. Kept for rules that ask what an admission would destroy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fermata.core.ids import SessionId


@dataclass(frozen=True, slots=True)
class IdleChain:
    session: SessionId
    leaf: int
    """Hash of its last full block."""
    tokens: int
    since: float


class EvictionOrder:
    def __init__(self) -> None:
        self._chains: dict[int, OrderedDict[SessionId, IdleChain]] = {}
        self._leaves: dict[int, dict[int, set[SessionId]]] = {}

    def idle(self, slot: int, chain: IdleChain) -> None:
        """Its turn finished there: now the engine may take it, after all that were idle before."""
        self.busy(slot, chain.session)
        self._chains.setdefault(slot, OrderedDict())[chain.session] = chain
        self._leaves.setdefault(slot, {}).setdefault(chain.leaf, set()).add(chain.session)

    def busy(self, slot: int, session: SessionId) -> None:
        """A turn holds the chain, or it is of no more interest."""
        chains = self._chains.get(slot)
        chain = None if chains is None else chains.pop(session, None)
        if chains is None or chain is None:
            return
        leaves = self._leaves[slot]
        sharers = leaves[chain.leaf]
        sharers.discard(session)
        if not sharers:
            del leaves[chain.leaf]
        if not chains:
            del self._chains[slot], self._leaves[slot]

    def removed(self, slot: int, hashes: Iterable[int]) -> list[SessionId]:
        """Blocks that the engine dropped; returns the sessions whose idle chain it began to take."""
        leaves = self._leaves.get(slot)
        if not leaves:
            return []
        gone = [session for h in hashes if h in leaves for session in leaves[h]]
        for session in gone:
            self.busy(slot, session)
        return gone

    def drop(self, slot: int) -> None:
        self._chains.pop(slot, None)
        self._leaves.pop(slot, None)

    def oldest(self, slot: int) -> Iterator[IdleChain]:
        """What would go first, first."""
        yield from self._chains.get(slot, OrderedDict[SessionId, IdleChain]()).values()

    def __len__(self) -> int:
        return sum(len(chains) for chains in self._chains.values())

    def check_integrity(self) -> None:
        assert self._chains.keys() == self._leaves.keys()
        for slot, chains in self._chains.items():
            assert chains
            named = {(s, leaf) for leaf, those in self._leaves[slot].items() for s in those}
            assert named == {(s, chain.leaf) for s, chain in chains.items()}

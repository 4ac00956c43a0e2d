"""The chains of live leases as a compressed trie, searched by halves.

Two questions about leases would cost O(history) a turn if answered block by block: how far does a new turn's prefix
run along a chain some lease promised on each slot, and how many *distinct* blocks do a slot's leases hold. A sequence
hash names its whole prefix, so a hash table over few chosen prefixes of each chain answers both (a z-fast trie,
Belazzougui, Boldi, Pagh and Vigna 2009): a node covers the prefix lengths (start, end] of its chain and is filed under
the one length in there which is divisible by the highest power of two. A search tries those lengths in the order of a
bisection: O(log length) look-ups, then the path up, which is as long as live chains fork along it.

Holders of a chain are ints of the caller's (slots). A holder's `size` counts each block once however many of its
chains share it. Frames are kept by reference while a chain through them lives. A frame that is no chain (one hash under
two prefixes) is refused as soon as it would put two nodes in one place: it is counted and promises nothing.
"""

from __future__ import annotations

from fermata.router.tier_index import Hashes


class Node:
    """Prefix lengths (start, end] of the chains through it. `counts`: per holder, its chains that end here plus the
    children it is in; `held` is how many chains end here."""

    __slots__ = ("chain", "children", "counts", "end", "held", "parent", "start")

    def __init__(self, parent: Node | None, chain: Hashes, start: int, end: int) -> None:
        self.parent = parent
        self.chain = chain
        self.start = start
        self.end = end
        self.children: dict[int, Node] = {}
        self.counts: dict[int, int] = {}
        self.held = 0

    def path(self) -> list[Node]:
        """From here up, the root left out."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found

    @property
    def handle(self) -> int:
        return _fattest(self.start, self.end)


class ChainTrie:
    def __init__(self) -> None:
        self._root = Node(None, memoryview(b"").cast("Q"), 0, 0)
        self._nodes: dict[int, Node] = {}
        """By the hash at their handle."""
        self._sizes: dict[int, int] = {}
        self.refused_chains = 0
        self._found: tuple[Hashes, Node, int] | None = None
        """The last search, while no node was made, cut or dropped since: a turn is matched, then held."""

    def __len__(self) -> int:
        return len(self._nodes)

    def size(self, holder: int) -> int:
        """Distinct blocks in the holder's chains. O(1)."""
        return self._sizes.get(holder, 0)

    def match(self, chain: Hashes) -> dict[int, int]:
        """Per holder, how far `chain` runs along one of its chains; 0 is left out."""
        node, depth = self._locate(chain)
        found: dict[int, int] = {}
        for above in reversed(node.path()):
            found.update(dict.fromkeys(above.counts, min(above.end, depth)))
        return found

    def hold(self, chain: Hashes, holder: int) -> Node:
        """Add a chain of a holder; the node is the receipt for `release` (the root for a chain without blocks)."""
        node = self._leaf(chain)
        self.hold_again(node, holder)
        return node

    def hold_after(self, node: Node, chain: Hashes, holder: int) -> Node:
        """Like `hold`, for a chain that most often goes on from a held one's end: then O(1)."""
        end = node.end
        if node.parent is None or end > len(chain) or node.chain[end - 1] != chain[end - 1]:
            return self.hold(chain, holder)
        if end < len(chain):
            leaf = Node(node, chain, end, len(chain))
            if chain[end] in node.children or not self._file(leaf):
                return self.hold(chain, holder)
            node.children[chain[end]] = leaf
            node = leaf
        self.hold_again(node, holder)
        return node

    def hold_again(self, node: Node, holder: int) -> None:
        """Another holder of the same chain."""
        if node.parent is not None:
            node.held += 1
            self._enter(node, holder)

    def release(self, node: Node, holder: int) -> None:
        if node.parent is None:
            return
        node.held -= 1
        at = node
        while (above := at.parent) is not None:
            at.counts[holder] -= 1
            if at.counts[holder]:
                break
            del at.counts[holder]
            self._grow(holder, at.start - at.end)
            if not at.counts:
                self._unfile(at)
                del above.children[at.chain[at.start]]
            at = above
        self._join(node)

    def _enter(self, node: Node, holder: int) -> None:
        at = node
        while (above := at.parent) is not None:
            before = at.counts.get(holder, 0)
            at.counts[holder] = before + 1
            if before:
                return
            self._grow(holder, at.end - at.start)
            at = above

    def _grow(self, holder: int, blocks: int) -> None:
        size = self._sizes.get(holder, 0) + blocks
        if size:
            self._sizes[holder] = size
        else:
            self._sizes.pop(holder, None)

    def _locate(self, chain: Hashes) -> tuple[Node, int]:
        """The deepest node that shares a block with `chain`, and how many blocks are shared in all."""
        if self._found is not None and self._found[0] is chain:
            return self._found[1], self._found[2]
        node = self._deepest_handle(chain)
        shared = _shared(node, chain, node.handle)
        if shared == node.end < len(chain):
            # The divergence may lie in a child, before the child's handle.
            child = node.children.get(chain[shared])
            if child is not None:
                node, shared = child, _shared(child, chain, shared + 1)
        self._found = (chain, node, shared)
        return node, shared

    def _deepest_handle(self, chain: Hashes) -> Node:
        best = self._root
        low, high = 0, len(chain)
        nodes = self._nodes
        while low < high:
            middle = high & -1 << (
                (low ^ high).bit_length() - 1
            )  # _fattest: this loop is what a search costs
            node = nodes.get(chain[middle - 1])
            if node is not None and node.handle == middle:
                best = node
                low = node.end
            else:
                high = middle - 1
        return best

    def _leaf(self, chain: Hashes) -> Node:
        """The node that ends exactly where `chain` does, made if need be; the root for a chain that is refused."""
        node, shared = self._locate(chain)
        if shared < node.end:
            upper = self._split(node, shared)
            if upper is None:
                return self._refused()
            node = upper
        if shared == len(chain):
            return node
        leaf = Node(node, chain, shared, len(chain))
        if chain[shared] in node.children or not self._file(leaf):
            self._join(node)
            return self._refused()
        node.children[chain[shared]] = leaf
        return leaf

    def _refused(self) -> Node:
        self.refused_chains += 1
        return self._root

    def _split(self, node: Node, at: int) -> Node | None:
        """Cut a node in two; the lower part keeps its identity, since receipts point to ends. Returns the upper one."""
        above = node.parent
        assert above is not None
        upper = Node(above, node.chain, node.start, at)
        if not self._move(node, upper, at):
            return None
        upper.counts = dict.fromkeys(node.counts, 1)
        above.children[node.chain[upper.start]] = upper
        node.parent = upper
        upper.children[node.chain[at]] = node
        return upper

    def _move(self, node: Node, upper: Node, start: int) -> bool:
        """File `upper`, and `node` anew with another start. False: one of their places is taken, nothing changed."""
        was = node.start
        self._unfile(node)
        if self._file(upper):
            node.start = start
            if self._file(node):
                return True
            self._unfile(upper)
            node.start = was
        self._file(node)
        return False

    def _join(self, node: Node) -> None:
        """Undo the splits that nothing needs any more, around a chain that ended."""
        at = node
        while (above := at.parent) is not None and not at.counts:
            at = above
        if above is None or at.held or len(at.children) != 1:
            return
        (child,) = at.children.values()
        first = child.chain[at.start]
        if above.children.get(first) is not at:
            return
        self._unfile(at)
        self._unfile(child)
        below, child.start = child.start, at.start
        if self._file(child):
            child.parent = above
            above.children[first] = child
        else:
            child.start = below
            self._file(at)
            self._file(child)

    def _file(self, node: Node) -> bool:
        self._found = None
        place = node.chain[node.handle - 1]
        return self._nodes.setdefault(place, node) is node

    def _unfile(self, node: Node) -> None:
        self._found = None
        del self._nodes[node.chain[node.handle - 1]]

    def check_integrity(self) -> None:
        """O(nodes)."""
        sizes: dict[int, int] = {}
        nodes = self._check_below(self._root, sizes)
        assert nodes == len(self._nodes)
        assert sizes == self._sizes, "distinct blocks a holder"

    def _check_below(self, node: Node, sizes: dict[int, int]) -> int:
        nodes = 0
        entered: dict[int, int] = {}
        for first, child in node.children.items():
            assert child.parent is node
            assert node.end == child.start < child.end
            assert child.chain[child.start] == first
            assert self._nodes[child.chain[child.handle - 1]] is child
            assert child.counts, "a node has a holder"
            for holder in child.counts:
                entered[holder] = entered.get(holder, 0) + 1
                sizes[holder] = sizes.get(holder, 0) + child.end - child.start
            nodes += 1 + self._check_below(child, sizes)
        if node.parent is not None:
            assert node.counts.keys() >= entered.keys()
            own = [count - entered.get(holder, 0) for holder, count in node.counts.items()]
            assert min(own) >= 0
            assert sum(own) == node.held, "chains that end here"
        return nodes


def _fattest(low: int, high: int) -> int:
    """The number in (low, high] divisible by the highest power of two; 0 where there is none."""
    return high & -1 << ((low ^ high).bit_length() - 1) if high > low else 0


def _shared(node: Node, chain: Hashes, known: int) -> int:
    """Blocks `chain` shares with the node's chain, given that `known` are."""
    low, high = known, min(node.end, len(chain))
    if high > low and node.chain[high - 1] == chain[high - 1]:
        return high
    while low < high:
        middle = (low + high) >> 1
        if node.chain[middle] == chain[middle]:
            low = middle + 1
        else:
            high = middle
    return low

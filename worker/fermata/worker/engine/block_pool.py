"""KV pages of one rank, vLLM-style: a lease per request owns pages, and content outlives the lease until evicted.

A page is free, private to one lease, or a *copy* of some content named by its hash. Copies are
shared (counted references) and stay, unreferenced, in LRU order until their page is needed. Two
leases that computed the same content each keep their copy, as in vLLM: duplicates of a hash are
legal and each costs a page. A lease gives its pages back from the tail, so of one sequence the tail
is evicted first.

Two consequences carry the rest of the engine. First, what is visible is closed under "the content
before it": whoever holds a copy of a block holds one of its parent and lets go of the parent later,
so the parent lies behind it in the LRU queue. Hence the longest cached prefix is found by
bisection, and a routing block is present exactly when its last page is. Second, where a referenced
copy exists the primary copy is referenced (kept so below), hence "in use" is closed in the same way
and the room an admission would take is known in O(log n), before anything is touched.

Cost: match O(log pages), admit and release O(pages of the lease), extend O(new pages). Pages are
plain integers into flat lists; nothing is allocated per page after construction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockLease:
    """The pages of one request, in order; the first `published` of them are copies, the rest is private.

    Only the pool changes it. It is released once; a second release is a bug and asserts.
    """

    __slots__ = ("is_live", "pages", "published")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.published = 0
        self.is_live = True


class BlockPool:
    """Counters `evictions` and `duplicates` (copies made beside one that was visible) only grow."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.referenced = 0
        self.cached = 0
        """Pages that hold reusable content, each copy counted."""
        self.evictions = 0
        self.duplicates = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._references = [0] * capacity
        self._hash_of: list[int | None] = [None] * capacity
        self._inactive: OrderedDict[int, None] = OrderedDict()
        self._primary: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}
        self._evicted: list[int] = []

    @property
    def room(self) -> int:
        """Pages that no lease holds: free or evictable."""
        return self.capacity - self.referenced

    def is_visible(self, content: int) -> bool:
        return content in self._primary

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """How many of the first `limit` hashes, which chain from the root, are visible."""
        primary = self._primary
        return bisect_left(hashes, True, hi=limit, key=lambda h: h not in primary)

    def admit(
        self, hashes: Sequence[int], *, matched: int, pages: int, whole: int, reserve: int
    ) -> BlockLease | None:
        """A lease on the first `matched` copies and `pages - matched` private pages, or None and nothing changed.

        Room for `whole` pages and `reserve` more is required, though only `pages` are taken: a request whose prompt
        comes in chunks is not let in to be preempted before it answered.
        """
        in_use = self._referenced_prefix(hashes, matched)
        if whole - in_use + reserve > self.room:
            return None
        lease = BlockLease()
        for content in hashes[:matched]:
            self._acquire(self._primary[content])
            lease.pages.append(self._primary[content])
        lease.published = matched
        self._take(lease, pages - matched)
        return lease

    def extend(self, lease: BlockLease, pages: int) -> bool:
        """Brings the lease to `pages` pages; False and nothing changed when there is no room."""
        assert lease.is_live
        missing = pages - len(lease.pages)
        if missing > self.room:
            return False
        self._take(lease, missing)
        return True

    def publish(self, lease: BlockLease, hashes: Sequence[int], upto: int) -> list[int]:
        """The lease's first `upto` pages hold what `hashes` say. Returns the indices whose content became visible."""
        assert lease.is_live
        fresh: list[int] = []
        for index in range(lease.published, upto):
            page, content = lease.pages[index], hashes[index]
            assert self._hash_of[page] is None
            self._hash_of[page] = content
            if content in self._primary:
                self._add_twin(content, page)
            else:
                self._primary[content] = page
                fresh.append(index)
        self.cached += max(0, upto - lease.published)
        lease.published = max(lease.published, upto)
        return fresh

    def release(self, lease: BlockLease) -> None:
        """Private pages are free at once; copies become evictable, the tail first."""
        assert lease.is_live, "a lease is released once"
        lease.is_live = False
        references = self._references
        for index in range(len(lease.pages) - 1, -1, -1):
            page = lease.pages[index]
            references[page] -= 1
            if references[page]:
                continue
            self.referenced -= 1
            if index >= lease.published:
                self._free.append(page)
                continue
            self._inactive[page] = None
            if self._twins:
                self._promote_referenced(page)
        lease.pages = []

    def take_evicted(self) -> list[int]:
        """Hashes whose last copy went since the last call, oldest first."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> bool:
        """Forgets all content; False and nothing changed while any page is referenced."""
        if self.referenced:
            return False
        self._free.extend(self._inactive)
        for page in self._inactive:
            self._hash_of[page] = None
        self._inactive.clear()
        self.cached = 0
        self._primary.clear()
        self._twins.clear()
        return True

    def _referenced_prefix(self, hashes: Sequence[int], matched: int) -> int:
        primary, references = self._primary, self._references
        return bisect_left(hashes, True, hi=matched, key=lambda h: not references[primary[h]])

    def _acquire(self, page: int) -> None:
        if not self._references[page]:
            del self._inactive[page]
            self.referenced += 1
        self._references[page] += 1

    def _take(self, lease: BlockLease, count: int) -> None:
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            assert not self._references[page]
            self._references[page] = 1
            lease.pages.append(page)
        self.referenced += count

    def _evict(self) -> int:
        page, _ = self._inactive.popitem(last=False)
        content = self._hash_of[page]
        assert content is not None
        self._hash_of[page] = None
        self.cached -= 1
        self.evictions += 1
        twins = self._twins.get(content)
        if twins is None:
            del self._primary[content]
            self._evicted.append(content)
            return page
        # The primary lost its last reference after its twins did, so it lies behind them.
        assert self._primary[content] != page
        twins.remove(page)
        if not twins:
            del self._twins[content]
        return page

    def _add_twin(self, content: int, page: int) -> None:
        self.duplicates += 1
        primary = self._primary[content]
        if not self._references[primary]:
            self._primary[content], page = page, primary
        self._twins.setdefault(content, []).append(page)

    def _promote_referenced(self, page: int) -> None:
        """`page` lost its last reference: where it was primary, a referenced twin takes over."""
        content = self._hash_of[page]
        assert content is not None
        twins = self._twins.get(content)
        if twins is None or self._primary[content] != page:
            return
        for at, twin in enumerate(twins):
            if self._references[twin]:
                twins[at] = page
                self._primary[content] = twin
                return

    def check_integrity(self, leases: Iterable[BlockLease]) -> None:
        """Recounts everything from all live leases. O(capacity): for tests."""
        counted = [0] * self.capacity
        private: set[int] = set()
        for lease in leases:
            assert lease.is_live
            assert 0 <= lease.published <= len(lease.pages)
            assert len(set(lease.pages)) == len(lease.pages)
            for index, page in enumerate(lease.pages):
                counted[page] += 1
                assert (self._hash_of[page] is not None) == (index < lease.published)
                if index >= lease.published:
                    private.add(page)
        assert counted == self._references
        assert all(counted[page] == 1 for page in private)
        self._check_copies(counted)
        free, inactive = set(self._free), set(self._inactive)
        assert len(free) == len(self._free)
        assert not any(self._hash_of[page] is not None or counted[page] for page in free)
        assert inactive == {
            page
            for page in range(self.capacity)
            if self._hash_of[page] is not None and not counted[page]
        }
        assert self.referenced == sum(1 for count in counted if count)
        assert self.referenced + len(free) + len(inactive) == self.capacity

    def _check_copies(self, counted: list[int]) -> None:
        copies: dict[int, set[int]] = {}
        for page, content in enumerate(self._hash_of):
            if content is not None:
                copies.setdefault(content, set()).add(page)
        assert self.cached == sum(map(len, copies.values()))
        assert copies.keys() == self._primary.keys()
        for content, pages in copies.items():
            primary, twins = self._primary[content], self._twins.get(content, [])
            assert content not in self._twins or twins
            assert {primary, *twins} == pages
            assert len(twins) + 1 == len(pages)
            assert counted[primary] or not any(counted[page] for page in pages)
        assert self._twins.keys() <= copies.keys()

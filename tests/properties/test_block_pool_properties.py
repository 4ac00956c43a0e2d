"""The block pool against a naive model that keeps whole contents, not pages, and recounts everything.

Contents are paths in a small tree (tuples of symbols), so prefixes are shared, forked and computed twice all the time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from fermata.worker.engine.block_pool import BlockLease, BlockPool

CAPACITY = 9
paths = st.sampled_from(["a", "ab", "abc", "abcd", "abd", "abdef", "abcdefg", "b", "bcdefg"])


def chain(path: str) -> list[int]:
    """A hash for each prefix: equal prefixes, equal hashes."""
    return [
        int.from_bytes(path[: i + 1].encode().ljust(8, b"."), "little") for i in range(len(path))
    ]


@dataclass
class Held:
    lease: BlockLease
    path: str
    hashes: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(CAPACITY)
        self.leases: list[Held] = []
        self.visible: set[int] = set()
        self.evictions = 0

    def _naive_match(self, hashes: list[int]) -> int:
        count = 0
        while count < len(hashes) and hashes[count] in self.visible:
            count += 1
        return count

    def _room(self) -> int:
        return CAPACITY - len({page for held in self.leases for page in held.lease.pages})

    def _drop_evicted(self) -> None:
        evicted = self.pool.take_evicted()
        if self.pool.evictions - self.evictions > len(evicted):
            self.seen["evicted a spare copy"] += 1
        self.evictions = self.pool.evictions
        assert len(set(evicted)) == len(evicted)
        assert self.visible.issuperset(evicted)
        self.visible.difference_update(evicted)
        if evicted:
            self.seen["evicted the last copy"] += 1

    @rule(target=held, path=paths, first=st.sampled_from([0, 1, 7, 7]), reserve=st.integers(0, 3))
    def admit(self, path: str, first: int, reserve: int) -> object:
        hashes = chain(path)
        matched = self.pool.match(hashes, len(hashes))
        assert matched == self._naive_match(hashes)
        pages = min(len(path), matched + first)
        # Naively: what is held already costs nothing, everything else must be free or evictable.
        copies = {h: page for held in self.leases for h, page in self._copies(held)}
        in_use = sum(1 for h in hashes[:matched] if h in copies)
        fits = len(path) - in_use + reserve <= self._room()
        before = self._fingerprint()
        lease = self.pool.admit(
            hashes, matched=matched, pages=pages, whole=len(path), reserve=reserve
        )
        assert (lease is not None) == fits
        if lease is None:
            assert self._fingerprint() == before
            self.seen["refused for want of room"] += 1
            return multiple()
        if matched:
            self.seen["reused a prefix"] += 1
        held = Held(lease, path, hashes)
        self.leases.append(held)
        self._drop_evicted()
        assert len(lease.pages) == pages
        assert lease.published == matched
        assert self.pool.match(hashes, matched) == matched
        return held

    @staticmethod
    def _copies(held: Held) -> list[tuple[int, int]]:
        return list(zip(held.hashes, held.lease.pages[: held.lease.published], strict=False))

    def _fingerprint(self) -> object:
        return (self.pool.referenced, self.pool.cached, set(self.visible), self.pool.evictions)

    @rule(held=held, more=st.integers(1, 4))
    def extend(self, held: Held, more: int) -> None:
        if not held.lease.is_live:
            return
        pages = min(len(held.path), len(held.lease.pages) + more)
        fits = pages - len(held.lease.pages) <= self._room()
        before = list(held.lease.pages)
        assert self.pool.extend(held.lease, pages) == fits
        assert held.lease.pages[: len(before)] == before
        assert len(held.lease.pages) == (pages if fits else len(before))
        self._drop_evicted()

    @rule(held=held, count=st.sampled_from([1, 2, 7, 7]))
    def publish(self, held: Held, count: int) -> None:
        if not held.lease.is_live:
            return
        upto = min(held.lease.published + count, len(held.lease.pages))
        duplicates = self.pool.duplicates
        expected = [
            i for i in range(held.lease.published, upto) if held.hashes[i] not in self.visible
        ]
        published = held.lease.published
        assert self.pool.publish(held.lease, held.hashes, upto) == expected
        assert self.pool.duplicates - duplicates == upto - published - len(expected)
        if upto - published > len(expected):
            self.seen["made a duplicate"] += 1
        self.visible.update(held.hashes[i] for i in expected)

    @rule(held=consumes(held))
    def release(self, held: Held) -> None:
        self.leases.remove(held)
        mine = dict(self._copies(held))
        for other in self.leases:
            if any(mine.get(content, page) != page for content, page in self._copies(other)):
                self.seen["left a twin in use"] += 1
        self.pool.release(held.lease)
        assert not held.lease.is_live
        try:
            self.pool.release(held.lease)
        except AssertionError:
            return
        raise RuntimeError("a double release went unnoticed")

    @rule(path=paths)
    def run_a_whole_request(self, path: str) -> None:
        held = self.admit(path, first=len(path), reserve=0)
        if isinstance(held, Held):
            self.publish(held, len(path))
            self.release(held)

    @rule(target=held, path=paths, ended=st.booleans())
    def compute_the_same_twice_at_once(self, path: str, ended: bool) -> object:
        both = [self.admit(path, first=len(path), reserve=0) for _ in range(2)]
        started = [held for held in both if isinstance(held, Held)]
        for held in started:
            self.publish(held, len(path))
        if not ended:
            return multiple(*started)
        for held in started:
            self.release(held)
        return multiple()

    @rule(dice=st.integers(0, 24))
    def clear(self, dice: int) -> None:
        if dice != 17:
            return
        holds = any(held.lease.pages for held in self.leases)
        assert self.pool.clear() == (not holds)
        if not holds:
            self.visible.clear()
            self.seen["cleared"] += 1

    @invariant()
    def counts_equal_a_recount(self) -> None:
        self.pool.check_integrity(held.lease for held in self.leases)
        assert self.pool.room == self._room()
        if self.pool.cached > len(self.visible):
            self.seen["held duplicates"] += 1

    @invariant()
    def what_is_visible_is_exactly_what_was_published_and_not_evicted(self) -> None:
        for path in self._all_paths():
            for content in chain(path):
                assert self.pool.is_visible(content) == (content in self.visible)

    @invariant()
    def whatever_is_visible_has_its_parent_visible(self) -> None:
        for path in self._all_paths():
            hashes = chain(path)
            for parent, child in pairwise(hashes):
                assert child not in self.visible or parent in self.visible

    def _all_paths(self) -> list[str]:
        self.paths_seen = getattr(self, "paths_seen", set())
        self.paths_seen.update(held.path for held in self.leases)
        return sorted(self.paths_seen)

    def teardown(self) -> None:
        for held in list(self.leases):
            self.release(held)
        assert self.pool.referenced == 0
        self.pool.check_integrity([])


def test_the_block_pool_equals_a_naive_model_under_any_order_of_calls() -> None:
    PoolMachine.seen.clear()
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=250,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for event in (
        "reused a prefix",
        "refused for want of room",
        "evicted the last copy",
        "evicted a spare copy",
        "made a duplicate",
        "held duplicates",
        "left a twin in use",
        "cleared",
    ):
        assert PoolMachine.seen[event] > 10, (event, PoolMachine.seen)

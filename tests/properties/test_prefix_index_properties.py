"""The prefix index and the leases' chains against sets: whatever the order, they find what a walk over sets finds."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from xxhash import xxh3_64_intdigest

from fermata.router.chain_trie import ChainTrie, Node
from fermata.router.prefix_index import TIERS, PrefixIndex, Tier

pytestmark = pytest.mark.timeout(300)

Path = tuple[int, ...]
"""A block of the test's forest: the branches taken from the root. Its hash depends on all of it, as it should."""

SLOTS = range(3)
LENGTH = 8
# One trunk that forks three ways after two blocks, two ways after five, and another tree.
FORKS = ((2, 1), (2, 2), (5, 1), (0, 1))
CHAINS = [(0,) * LENGTH] + [
    (0,) * at + (branch,) + (0,) * (LENGTH - 1 - at) for at, branch in FORKS
]
WHAT = [
    *["store"] * 5,
    *["store from the middle"] * 3,
    *["remove a tail"] * 2,
    *["remove one"] * 4,
    *["stage"] * 2,
    *["clear tier", "clear", "drop", "swap", "swap", "unstage", "sweep", "sweep"],
]
slots = st.sampled_from(SLOTS)
tiers = st.sampled_from(["device", "device", "device", "host"])
trie_paths = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=17).map(tuple)


def hash_of(path: Path) -> int:
    return xxh3_64_intdigest(bytes(path), seed=7)


def chain(path: Path) -> array[int]:
    return array("Q", [hash_of(path[: i + 1]) for i in range(len(path))])


class IndexMachine(RuleBasedStateMachine):
    """Naive model: one set of hashes per slot and tier, one more for what is staged."""

    seen: Counter[str] = Counter()

    @initialize(sweep_entries=st.sampled_from([0, 64]))
    def start(self, sweep_entries: int) -> None:
        self.index = PrefixIndex(limit_pairs=10_000, sweep_entries=sweep_entries)
        keys: list[tuple[int, Tier]] = [(slot, tier) for slot in SLOTS for tier in TIERS]
        self.shown: dict[tuple[int, Tier], set[int]] = {key: set() for key in keys}
        self.staged: dict[tuple[int, Tier], set[int]] = {key: set() for key in keys}

    @rule(
        what=st.sampled_from(WHAT),
        slot=slots,
        tier=tiers,
        whole=st.sampled_from(CHAINS),
        start=st.integers(1, LENGTH - 1),
        count=st.integers(1, LENGTH),
    )
    def event(self, what: str, slot: int, tier: Tier, whole: Path, start: int, count: int) -> None:
        """One rule for all events, so that every run mixes all of them."""
        match what:
            case "store":
                self.store(slot, tier, whole[:count], 0, aside=False)
            case "store from the middle":
                self.store(slot, tier, whole, start, aside=False)
            case "stage":
                self.store(slot, tier, whole[:count], 0, aside=True)
            case "remove a tail":
                self.remove(slot, tier, chain(whole)[-count:][::-1])
            case "remove one":
                self.remove_one_that_is_held(slot, tier, whole, start)
            case "sweep":
                self.seen["sweep in steps"] += self.index.sweep(count)
            case _:
                self.end_a_life(slot, tier, what)
        self.match(whole)

    def store(self, slot: int, tier: Tier, path: Path, start: int, *, aside: bool) -> None:
        run = chain(path)[start:]
        parent = hash_of(path[:start]) if start else None
        held = (self.staged if aside else self.shown)[slot, tier]
        self.seen["stored again"] += bool(held.intersection(run))
        if start:
            self.seen["stored under a parent the slot has not"] += parent not in held
            known = any(parent in other for other in self.shown.values())
            self.seen["stored under a parent nobody has"] += not known
        held.update(run)
        (self.index.stage if aside else self.index.stored)(slot, tier, parent, run)

    def remove(self, slot: int, tier: Tier, named: array[int]) -> None:
        self.shown[slot, tier].difference_update(named)
        self.index.removed(slot, tier, memoryview(named))

    def remove_one_that_is_held(self, slot: int, tier: Tier, whole: Path, pick: int) -> None:
        held = self.shown[slot, tier]
        there = [i for i, h in enumerate(chain(whole)) if h in held]
        if there:
            at = there[pick % len(there)]
            self.seen["hole"] += at + 1 < LENGTH and hash_of(whole[: at + 2]) in held
            self.remove(slot, tier, chain(whole)[at : at + 1])

    def end_a_life(self, slot: int, tier: Tier, what: str) -> None:
        each = [tier] if what == "clear tier" else TIERS
        self.seen[what] += any(self.shown[slot, t] for t in each)
        for t in each:
            if what == "swap":
                self.seen["swap for something"] += bool(self.staged[slot, t])
                self.shown[slot, t] = self.staged[slot, t]
                self.staged[slot, t] = set()
            if what in ("clear tier", "clear", "drop"):
                self.shown[slot, t] = set()
            if what in ("drop", "unstage"):
                self.staged[slot, t] = set()
        if what == "clear tier":
            self.index.cleared(slot, tier)
        else:
            call = {
                "clear": self.index.cleared,
                "drop": self.index.drop,
                "swap": self.index.swap,
                "unstage": self.index.unstage,
            }[what]
            call(slot)

    def match(self, path: Path) -> None:
        hashes = chain(path)
        expected: dict[str, dict[int, int]] = {}
        for (slot, tier), held in self.shown.items():
            depth = next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
            if depth:
                expected.setdefault(tier, {})[slot] = depth
        assert self.index.match(hashes) == expected
        depths = set(expected.get("device", {}).values())
        self.seen["several depths in one match"] += len(depths) > 1

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "index"):
            self.index.check_integrity()
            held = (*self.shown.values(), *self.staged.values())
            assert self.index.pairs == sum(map(len, held))

    def teardown(self) -> None:
        if hasattr(self, "index"):
            for whole in CHAINS:
                self.match(whole)
            for (slot, tier), held in self.shown.items():
                assert self.index.held(slot, tier) == held


def test_a_match_is_exact_under_any_order_of_events() -> None:
    IndexMachine.seen.clear()
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for event in (
        "stored under a parent the slot has not",
        "stored under a parent nobody has",
        "stored again",
        "hole",
        "clear",
        "clear tier",
        "drop",
        "swap for something",
        "sweep in steps",
        "several depths in one match",
    ):
        assert IndexMachine.seen[event] > 10, f"never happened enough: {event} {IndexMachine.seen}"


class TrieMachine(RuleBasedStateMachine):
    """Naive model: the list of held chains."""

    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.trie = ChainTrie()
        self.held: list[tuple[Path, int, Node]] = []

    @rule(path=trie_paths, holder=slots)
    def hold(self, path: Path, holder: int) -> None:
        if any(
            path[: len(other)] == other or other[: len(path)] == path for other, _, _ in self.held
        ):
            self.seen["one chain inside another"] += 1
        self.held.append((path, holder, self.trie.hold(memoryview(chain(path)), holder)))

    @rule(pick=st.integers(0, 100), holder=slots)
    def hold_again(self, pick: int, holder: int) -> None:
        if self.held:
            path, _, node = self.held[pick % len(self.held)]
            self.trie.hold_again(node, holder)
            self.held.append((path, holder, node))

    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        if self.held:
            path, holder, node = self.held.pop(pick % len(self.held))
            nodes = len(self.trie)
            self.trie.release(node, holder)
            self.seen["nodes joined"] += len(self.trie) < nodes - 1
            self.seen["shared chain released"] += any(p == path for p, _, _ in self.held)

    @rule(path=trie_paths)
    def match(self, path: Path) -> None:
        expected: dict[int, int] = {}
        for other, holder, _ in self.held:
            shared = next(
                (i for i, (a, b) in enumerate(zip(path, other, strict=False)) if a != b),
                min(len(path), len(other)),
            )
            if shared > expected.get(holder, 0):
                expected[holder] = shared
        assert self.trie.match(chain(path)) == expected
        self.seen["match ends inside a node"] += bool(expected) and max(expected.values()) < len(
            path
        )

    @invariant()
    def is_sound(self) -> None:
        self.trie.check_integrity()
        for holder in SLOTS:
            blocks = {h for path, other, _ in self.held if other == holder for h in chain(path)}
            assert self.trie.size(holder) == len(blocks)
        assert len(self.trie) <= 2 * len(self.held), "no more nodes than chains and their forks"
        assert not self.trie.refused_chains


def test_promised_prefixes_and_distinct_blocks_are_exact() -> None:
    TrieMachine.seen.clear()
    run_state_machine_as_test(
        TrieMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for event in (
        "one chain inside another",
        "nodes joined",
        "shared chain released",
        "match ends inside a node",
    ):
        assert TrieMachine.seen[event] > 10, f"never happened enough: {event} {TrieMachine.seen}"


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=9), slots, st.booleans()),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_frames_that_are_no_chains_do_no_harm(steps: list[tuple[list[int], int, bool]]) -> None:
    """One hash at several places: what is matched means nothing, but every count stays a recount's."""
    trie = ChainTrie()
    held: list[tuple[int, Node]] = []
    for hashes, holder, ends in steps:
        held.append((holder, trie.hold(array("Q", hashes), holder)))
        trie.match(array("Q", hashes))
        trie.check_integrity()
        if ends:
            other, node = held.pop(0)
            trie.release(node, other)
            trie.check_integrity()
    for holder, node in held:
        trie.release(node, holder)
    assert not len(trie)
    assert not any(trie.size(holder) for holder in SLOTS)

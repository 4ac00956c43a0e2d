"""Prefix index: cases worth telling one by one; orders in general are the property tests' matter."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from fermata.router.mask_bisection import NotClosed, bisect_masks
from fermata.router.prefix_index import PrefixIndex


def run(*names: int) -> array[int]:
    return array("Q", names)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(limit_pairs=1000)


def test_depths_are_of_the_longest_whole_prefix_on_each_slot_and_tier(index):
    index.stored(0, "device", None, run(1, 2, 3, 4))
    index.stored(1, "device", None, run(1, 2))
    index.stored(2, "device", None, run(9))
    index.stored(1, "host", None, run(1, 2, 3))
    assert index.match(run(1, 2, 3, 5)) == {"device": {0: 3, 1: 2}, "host": {1: 3}}
    assert index.match(run(7, 1, 2)) == {}
    assert index.match(run()) == {}
    index.check_integrity()


def test_nothing_matches_past_a_hole_until_the_block_comes_back(index):
    index.stored(0, "device", None, run(1, 2, 3, 4))
    index.stored(1, "device", None, run(1, 2, 3, 4))
    index.removed(0, "device", run(2))
    assert index.match(run(1, 2, 3, 4)) == {"device": {0: 1, 1: 4}}
    index.stored(0, "device", 1, run(2))
    assert index.match(run(1, 2, 3, 4)) == {"device": {0: 4, 1: 4}}


def test_a_suffix_may_be_stored_before_its_prefix(index):
    index.stored(0, "device", 2, run(3, 4))
    assert index.match(run(1, 2, 3, 4)) == {}
    index.stored(0, "device", None, run(1, 2))
    assert index.match(run(1, 2, 3, 4)) == {"device": {0: 4}}


def test_a_fork_inside_a_known_run_is_counted_for_each_slot_that_gets_it(index):
    index.stored(0, "device", None, run(1, 2, 3, 4))
    index.stored(0, "device", 2, run(7))
    index.stored(1, "device", None, run(1))
    index.stored(1, "device", 1, run(2, 3, 4))
    index.removed(1, "device", run(2))
    assert index.match(run(1, 2, 3, 4)) == {"device": {0: 4, 1: 1}}
    index.check_integrity()


def test_several_depths_among_sixty_four_slots_are_told_apart():
    chain = array("Q", range(1, 129))
    index = PrefixIndex(limit_pairs=100_000)
    for slot in range(64):
        index.stored(slot, "device", None, chain[: slot * 2 + 1])
    assert index.match(chain) == {"device": {slot: slot * 2 + 1 for slot in range(64)}}


def test_more_slots_than_a_machine_word_has_bits_are_no_matter():
    index = PrefixIndex(limit_pairs=100_000)
    for slot in range(200):
        index.stored(slot, "device", None, run(*range(1, slot % 3 + 2)))
    depths = index.match(run(1, 2, 3))["device"]
    assert depths == {slot: slot % 3 + 1 for slot in range(200)}


def test_a_match_looks_up_blocks_by_the_logarithm_of_the_depth():
    """Counted, not timed: 8,192 blocks, 64 slots at 8 depths."""
    draw = Random(5).getrandbits
    chain = array("Q", [draw(64) for _ in range(8192)])
    masks: dict[int, int] = {}
    for slot in range(64):
        for block in chain[: (slot % 8 + 1) * 1024]:
            masks[block] = masks.get(block, 0) | 1 << slot
    looked_up: list[int] = []

    def item(block: int) -> int:
        looked_up.append(block)
        return masks[block]

    found = bisect_masks(memoryview(chain), masks.__contains__, item)
    assert [depth for depth, _ in found] == [(i + 1) * 1024 for i in range(8)]
    assert len(looked_up) <= 8 * (13 + 2)


def test_masks_that_grow_along_a_chain_are_noticed():
    masks = {1: 2, 2: 1}
    with pytest.raises(NotClosed):
        bisect_masks(memoryview(run(1, 2)), masks.__contains__, masks.__getitem__)


def test_beyond_its_bound_the_index_refuses_blocks_and_says_less_never_more():
    index = PrefixIndex(limit_pairs=5)
    index.stored(0, "device", None, run(1, 2, 3))
    index.stored(1, "device", None, run(1, 2, 3))
    assert index.pairs == 5
    assert index.refused_blocks == 1
    assert index.match(run(1, 2, 3)) == {"device": {0: 3, 1: 2}}
    index.stored(1, "device", 3, run(4))
    assert index.match(run(1, 2, 3, 4)) == {"device": {0: 3, 1: 2}}
    index.removed(1, "device", run(3))
    assert index.absent_removals == 1, "what was refused is removed without harm"
    index.limit_pairs = 2
    index.stored(2, "device", None, run(1))
    assert index.pairs == 5, "a lower bound takes nothing away"
    index.drop(0)
    index.stored(2, "device", None, run(1))
    assert index.match(run(1, 2, 3)) == {"device": {1: 2}}
    index.check_integrity()


def test_removals_of_what_nobody_stored_are_counted(index):
    index.removed(0, "device", run(1, 2))
    index.stored(0, "device", None, run(1))
    index.removed(0, "device", run(1, 1, 2))
    assert index.absent_removals == 4
    assert index.pairs == 0
    assert index.blocks == 0


def test_a_dropped_slot_matches_nothing_at_once_and_its_memory_comes_back_in_steps():
    index = PrefixIndex(limit_pairs=100_000, sweep_entries=1)
    index.stored(0, "device", None, array("Q", range(1, 1001)))
    index.stored(1, "device", None, array("Q", range(1, 11)))
    index.drop(0)
    chain = array("Q", range(1, 1001))
    assert index.match(chain) == {"device": {1: 10}}
    assert index.pairs == 10
    assert index.blocks == 1000
    steps = 0
    while index.sweep(100):
        steps += 1
        index.check_integrity()
        assert index.match(chain) == {"device": {1: 10}}
    assert steps == 9
    assert index.blocks == 10
    assert not index.sweep(100)


def test_a_sweep_ends_when_the_last_entry_is_named_by_an_event():
    index = PrefixIndex(limit_pairs=1000, sweep_entries=0)
    index.stored(0, "device", None, array("Q", range(1, 10)))
    index.drop(0)
    # Eight entries are swept from the young end; the ninth is the one that is named.
    index.stored(1, "device", None, run(1))
    index.check_integrity()
    assert not index.sweep(1)
    assert index.blocks == 1


def test_many_lives_of_one_slot_reuse_few_bits():
    index = PrefixIndex(limit_pairs=100_000)
    for life in range(500):
        index.stored(0, "device", None, array("Q", range(life * 10 + 1, life * 10 + 11)))
        index.cleared(0)
    tier = index._tiers["device"]
    assert tier._bits_made < 40
    index.check_integrity()


def test_what_is_staged_counts_for_nothing_until_it_is_swapped_in(index):
    index.stored(0, "device", None, run(1, 2))
    index.stage(0, "device", None, run(1, 2, 3))
    index.stage(0, "host", None, run(1))
    assert index.match(run(1, 2, 3)) == {"device": {0: 2}}
    index.swap(0)
    assert index.match(run(1, 2, 3)) == {"device": {0: 3}, "host": {0: 1}}
    index.swap(0)
    assert index.match(run(1, 2, 3)) == {}, "an empty snapshot is one too"
    assert index.held(0, "device") == set()


def test_a_contradicted_parent_costs_time_not_exactness(index):
    index.stored(0, "device", None, run(1, 2, 3))
    index.stored(1, "device", 9, run(3))
    assert index.contradictions == 1
    index.stored(1, "device", None, run(1))
    assert index.match(run(1, 2, 3)) == {"device": {0: 3, 1: 1}}
    index.stored(2, "device", None, run(1, 2, 3))
    index.removed(2, "device", run(2))
    assert index.match(run(1, 2, 3)) == {"device": {0: 3, 1: 1, 2: 1}}


def test_a_root_that_turns_out_to_have_a_parent_is_a_contradiction(index):
    index.stored(0, "device", None, run(3, 4))
    index.stored(1, "device", None, run(1, 2, 3, 4))
    assert index.contradictions == 1
    assert index.match(run(1, 2, 3, 4)) == {"device": {1: 4}}
    assert index.match(run(3, 4)) == {"device": {0: 2, 1: 2}}


def test_whoever_lies_about_parents_harms_only_itself():
    random = Random(12)
    names = {(): None} | {
        path: random.getrandbits(64)
        for path in [(0,) * n for n in range(1, 9)]
        + [(0,) * 3 + (1,) * n for n in range(1, 6)]
        + [(1,) * n for n in range(1, 4)]
    }
    leaves = [(0,) * 8, (0,) * 3 + (1,) * 5, (1,) * 3]
    walks = 0
    for _ in range(300):
        index = PrefixIndex(limit_pairs=10_000)
        held: dict[int, set[int]] = {slot: set() for slot in range(3)}
        for _ in range(40):
            slot, leaf = random.randrange(4), random.choice(leaves)
            start = random.randrange(len(leaf))
            end = random.randrange(start, len(leaf)) + 1
            blocks = run(*[names[leaf[:i]] for i in range(start + 1, end + 1)])
            if slot == 3:
                index.stored(3, "device", random.choice(list(names.values())), blocks)
            elif random.random() < 0.7:
                index.stored(slot, "device", names[leaf[:start]], blocks)
                held[slot].update(blocks)
            else:
                index.removed(slot, "device", blocks)
                held[slot].difference_update(blocks)
            asked = [names[leaf[:i]] for i in range(1, len(leaf) + 1)]
            found = index.match(run(*asked)).get("device", {})
            for honest, blocks_held in held.items():
                depth = next((i for i, b in enumerate(asked) if b not in blocks_held), len(asked))
                assert found.get(honest, 0) == depth
        walks += index.contradictions > 0
    assert walks > 100


def test_untruths_that_nobody_contradicts_end_in_a_walk_not_in_an_error(index):
    index.stored(0, "device", None, run(1, 2))
    index.stored(1, "device", None, run(4))
    index.stored(1, "device", None, run(8))
    assert index.match(run(1, 2, 3, 4, 5, 6, 7, 8)) == {"device": {0: 2}}
    index.stored(2, "device", None, run(1))
    index.stored(3, "device", None, run(5, 6))
    assert index.match(run(1, 2, 5, 6))["device"] == {0: 2, 2: 1}


def test_parents_that_died_are_forgotten_in_the_end():
    index = PrefixIndex(limit_pairs=100_000)
    for parent in range(1, 5000, 2):
        index.stored(0, "device", parent, run(parent + 1))
        index.removed(0, "device", run(parent + 1))
    links = index._tiers["device"]._links
    assert len(links.ghosts) < 2500
    assert len(links.child) < 2600
    index.check_integrity()


def test_a_ghost_that_forks_lives_as_long_as_its_children(index):
    index.stored(0, "device", 1, run(2))
    index.stored(0, "device", 1, run(3))
    assert index._tiers["device"]._links.ghosts == {1}
    index.stored(1, "device", None, run(1))
    index.check_integrity()
    index.removed(1, "device", run(1))
    index.removed(0, "device", run(2, 3))
    assert index._tiers["device"]._links.ghosts == set()
    index.check_integrity()


def test_a_run_that_names_a_block_twice_is_counted_once(index):
    index.stored(0, "device", None, run(5, 5, 6))
    index.stored(1, "device", None, run(5, 5, 6))
    assert index.pairs == 4
    index.removed(0, "device", run(5, 6))
    index.removed(1, "device", run(5, 6))
    assert (index.pairs, index.blocks) == (0, 0)


def test_random_untruths_never_raise_and_never_lose_count():
    random = Random(11)
    for _ in range(200):
        index = PrefixIndex(limit_pairs=60, sweep_entries=random.choice([0, 64]))
        held: dict[int, set[int]] = {slot: set() for slot in range(4)}
        for _ in range(60):
            slot = random.randrange(4)
            names = run(*[random.randrange(1, 9) for _ in range(random.randrange(4))])
            match random.randrange(5):
                case 0 | 1:
                    parent = random.choice([None, *range(1, 9)])
                    index.stored(slot, "device", parent, names)
                    held[slot].update(names)
                case 2:
                    index.removed(slot, "device", names)
                    held[slot].difference_update(names)
                case 3:
                    index.match(names)
                case _ if random.random() < 0.3:
                    index.cleared(slot)
                    held[slot].clear()
            assert index.pairs == sum(map(len, held.values()))
            assert all(index.held(slot, "device") == blocks for slot, blocks in held.items())

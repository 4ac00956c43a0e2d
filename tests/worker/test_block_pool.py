from __future__ import annotations

import pytest

from fermata.worker.engine.block_pool import BlockLease, BlockPool


def admit(
    pool: BlockPool, hashes: list[int], *, pages: int | None = None, reserve: int = 0
) -> BlockLease | None:
    return pool.admit(
        hashes,
        matched=pool.match(hashes, len(hashes)),
        pages=len(hashes) if pages is None else pages,
        whole=len(hashes),
        reserve=reserve,
    )


def hold(pool: BlockPool, hashes: list[int]) -> BlockLease:
    lease = admit(pool, hashes)
    assert lease is not None
    return lease


def run(pool: BlockPool, hashes: list[int]) -> None:
    lease = hold(pool, hashes)
    pool.publish(lease, hashes, len(hashes))
    pool.release(lease)


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    run(pool, [1, 2, 3, 4])
    hold(pool, [50, 51])
    assert pool.take_evicted() == [4, 3]
    assert pool.match([1, 2, 3, 4], 4) == 2


def test_the_sequence_used_longest_ago_is_evicted_first() -> None:
    pool = BlockPool(4)
    run(pool, [1, 2])
    run(pool, [11, 12])
    run(pool, [1, 2])
    hold(pool, [50])
    assert pool.take_evicted() == [12]


def test_a_duplicate_costs_a_page_and_removal_is_told_only_of_the_last_copy() -> None:
    pool = BlockPool(2)
    first, second = hold(pool, [1]), hold(pool, [1])
    assert pool.publish(first, [1], 1) == [0]
    assert pool.publish(second, [1], 1) == []
    assert (pool.cached, pool.duplicates) == (2, 1)
    pool.release(first)
    pool.release(second)
    one = hold(pool, [8])
    assert pool.take_evicted() == []
    assert pool.is_visible(1)
    hold(pool, [9])
    assert pool.take_evicted() == [1]
    assert not pool.is_visible(1)
    assert one.pages


def test_an_admission_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4)
    run(pool, [1, 2])
    held = hold(pool, [7, 8])
    assert admit(pool, [1, 2, 3]) is None
    assert pool.take_evicted() == []
    assert pool.match([1, 2], 2) == 2
    pool.check_integrity([held])


def test_matched_pages_that_are_in_use_cost_an_admission_nothing() -> None:
    pool = BlockPool(3)
    first = hold(pool, [1, 2])
    pool.publish(first, [1, 2], 2)
    second = hold(pool, [1, 2, 3])
    assert second.pages[:2] == first.pages
    assert pool.room == 0
    pool.check_integrity([first, second])


def test_the_reserve_keeps_pages_free() -> None:
    pool = BlockPool(4)
    assert admit(pool, [1, 2, 3], reserve=2) is None
    assert admit(pool, [1, 2, 3], reserve=1) is not None


def test_a_chunked_admission_takes_only_its_chunk_but_needs_room_for_the_whole() -> None:
    pool = BlockPool(4)
    lease = admit(pool, [1, 2, 3], pages=1)
    assert lease is not None
    assert len(lease.pages) == 1
    assert admit(pool, [11, 12, 13, 14], pages=1) is None


def test_private_pages_are_free_at_once() -> None:
    pool = BlockPool(2)
    pool.release(hold(pool, [1, 2]))
    assert pool.cached == 0
    hold(pool, [3, 4])
    assert pool.evictions == 0


def test_extending_beyond_the_room_changes_nothing() -> None:
    pool = BlockPool(2)
    lease = hold(pool, [1])
    assert not pool.extend(lease, 3)
    assert len(lease.pages) == 1
    assert pool.extend(lease, 2)


def test_a_lease_released_twice_is_a_bug() -> None:
    pool = BlockPool(2)
    lease = hold(pool, [1])
    pool.release(lease)
    with pytest.raises(AssertionError, match="released once"):
        pool.release(lease)


def test_content_is_cleared_only_while_nothing_is_held() -> None:
    pool = BlockPool(3)
    run(pool, [1, 2])
    lease = hold(pool, [3])
    assert not pool.clear()
    pool.release(lease)
    assert pool.clear()
    assert pool.cached == 0
    assert pool.match([1, 2], 2) == 0
    pool.check_integrity([])

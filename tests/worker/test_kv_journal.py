from __future__ import annotations

from array import array

from fermata.wire.messages import KvCleared, KvRemoved, KvStored
from fermata.worker.engine.kv_journal import KvJournal


def test_consecutive_blocks_are_one_run_and_others_start_a_new_one() -> None:
    journal = KvJournal()
    journal.stored(1, None)
    journal.stored(2, 1)
    journal.stored(3, 2)
    journal.stored(9, 1)
    journal.stored(20, None)
    journal.stored(30, None)
    assert journal.take() == (
        [
            KvStored(parent=None, count=3),
            KvStored(parent=1, count=1),
            KvStored(parent=None, count=1),
            KvStored(parent=None, count=1),
        ],
        array("Q", [1, 2, 3, 9, 20, 30]),
    )


def test_order_is_kept_between_kinds() -> None:
    journal = KvJournal()
    journal.removed(5)
    journal.removed(6)
    journal.stored(5, None)
    journal.removed(5)
    journal.cleared()
    journal.stored(5, None)
    assert journal.take() == (
        [
            KvRemoved(count=2),
            KvStored(parent=None, count=1),
            KvRemoved(count=1),
            KvCleared(),
            KvStored(parent=None, count=1),
        ],
        array("Q", [5, 6, 5, 5, 5]),
    )


def test_taking_empties_it_and_what_was_taken_stays_as_it_was() -> None:
    journal = KvJournal()
    assert journal.is_empty
    journal.stored(1, None)
    assert not journal.is_empty
    _, hashes = journal.take()
    assert journal.is_empty
    journal.stored(2, 1)
    assert hashes == array("Q", [1])
    assert journal.take() == ([KvStored(parent=1, count=1)], array("Q", [2]))
    assert journal.take() == ([], array("Q"))

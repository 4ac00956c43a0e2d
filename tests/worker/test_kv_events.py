from __future__ import annotations

from array import array
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from fermata.wire.messages import KvCleared, KvEvent, KvRemoved, KvStored
from fermata.worker.kv_events import SNAPSHOT_HASHES, RankEvents


def read(events: RankEvents) -> list[tuple[str, int, int | None]]:
    """(tier, block, parent) as a router would take them in, in order."""
    found: list[tuple[str, int, int | None]] = []
    for runs, hashes in events.snapshot():
        at = 0
        for run in runs:
            parent = run.parent
            for value in hashes[at : at + run.count]:
                found.append((run.tier, value, parent))
                parent = value
            at += run.count
        assert at == len(hashes) <= SNAPSHOT_HASHES
    return found


def test_events_are_numbered_without_a_gap() -> None:
    events = RankEvents(0)
    assert events.last == -1
    assert events.add([KvStored(None, 1), KvRemoved(1)], array("Q", [1, 1])) == 0
    assert events.add([KvStored(None, 1)], array("Q", [1])) == 2
    assert events.last == 2


def test_an_empty_snapshot_still_has_a_chunk() -> None:
    assert list(RankEvents(0).snapshot()) == [([], array("Q"))]


def test_a_snapshot_tells_runs_with_their_parents_first() -> None:
    events = RankEvents(0)
    events.add([KvStored(None, 3), KvStored(1, 2)], array("Q", [1, 2, 3, 20, 21]))
    events.add([KvRemoved(1)], array("Q", [3]))
    events.add([KvStored(None, 1, "host")], array("Q", [1]))
    assert list(events.snapshot()) == [
        (
            [KvStored(None, 2), KvStored(1, 2), KvStored(None, 1, "host")],
            array("Q", [1, 2, 20, 21, 1]),
        )
    ]
    assert events.blocks == 5


def test_clearing_takes_one_tier_or_all() -> None:
    events = RankEvents(0)
    events.add([KvStored(None, 1), KvStored(None, 1, "host")], array("Q", [1, 1]))
    events.add([KvCleared("host")], array("Q"))
    assert read(events) == [("device", 1, None)]
    events.add([KvCleared()], array("Q"))
    assert read(events) == []
    assert events.last == 3


def test_a_long_run_is_cut_into_chunks_that_join() -> None:
    events = RankEvents(0)
    count = 2 * SNAPSHOT_HASHES + 7
    events.add([KvStored(None, count)], array("Q", range(1, count + 1)))
    events.add([KvStored(5, 1)], array("Q", [1 << 40]))
    chunks = list(events.snapshot())
    assert [len(hashes) for _, hashes in chunks] == [SNAPSHOT_HASHES, SNAPSHOT_HASHES, 8]
    told = read(events)
    assert [value for _, value, _ in told] == [*range(1, count + 1), 1 << 40]
    assert [parent for _, _, parent in told] == [None, *range(1, count), 5]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[KvEvent, list[int]]]:
    """Events as an engine makes them: a block is stored after its parent and removed before it."""
    held: dict[int, int | None] = {}
    history: list[tuple[KvEvent, list[int]]] = []
    for number in range(draw(st.integers(0, 40))):
        leaves = [block for block in held if block not in held.values()]
        if leaves and draw(st.booleans()):
            gone = draw(st.sampled_from(leaves))
            del held[gone]
            history.append((KvRemoved(1), [gone]))
            continue
        parent = draw(st.sampled_from([None, *held]))
        run = [1 + number * 10 + i for i in range(draw(st.integers(1, 4)))]
        history.append((KvStored(parent, len(run)), run))
        for block in run:
            held[block] = parent
            parent = block
    return history


@settings(derandomize=True, deadline=None, max_examples=200)
@given(histories())
def test_a_snapshot_is_what_is_held_with_every_block_after_its_parent(
    history: list[tuple[KvEvent, list[int]]],
) -> None:
    events, held = RankEvents(0), dict[int, int | None]()
    for event, hashes in history:
        events.add([event], array("Q", hashes))
        for value, parent in _applied(event, hashes):
            if parent == -1:
                del held[value]
            else:
                held[value] = parent
    told = read(events)
    assert {value: parent for _, value, parent in told} == held
    seen: set[int | None] = {None}
    for _, value, parent in told:
        assert parent in seen
        seen.add(value)


def _applied(event: KvEvent, hashes: list[int]) -> Iterator[tuple[int, int | None]]:
    parent = event.parent if isinstance(event, KvStored) else -1
    for value in hashes:
        yield value, parent
        parent = value if isinstance(event, KvStored) else -1

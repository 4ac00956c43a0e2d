"""One rank's KV events: numbered once, sent to every router, and mirrored so that any router can
be told all.

The mirror is what a snapshot is read from, in one turn of the loop. It keeps what the events said,
run by run order: parent of each block and its tier, nothing else. O(blocks named) an event,
O(blocks held) a snapshot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from fermata.wire.messages import KvCleared, KvEvent, KvRemoved, KvStored
from fermata.wire.messages.router import Tier

SNAPSHOT_HASHES = 32_768
"""Hashes a chunk: 256 KiB of frame."""


class RankEvents:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last = -1
        """Sequence of the last event."""
        self._tiers: dict[Tier, dict[int, int | None]] = {}
        """Tier -> block -> the block before it."""

    @property
    def blocks(self) -> int:
        return sum(map(len, self._tiers.values()))

    def add(self, events: Sequence[KvEvent], hashes: array[int]) -> int:
        """Numbers the events; returns the sequence of the first."""
        first = self.last + 1
        self.last += len(events)
        start = 0
        for event in events:
            match event:
                case KvStored(parent, count, tier):
                    held = self._tiers.setdefault(tier, {})
                    for value in hashes[start : start + count]:
                        held[value] = parent
                        parent = value
                    start += count
                case KvRemoved(count, tier):
                    held = self._tiers.get(tier, {})
                    for value in hashes[start : start + count]:
                        held.pop(value, None)
                    start += count
                case KvCleared(tier):
                    if tier is None:
                        self._tiers.clear()
                    else:
                        self._tiers.pop(tier, None)
        return first

    def snapshot(self) -> Iterator[tuple[list[KvStored], array[int]]]:
        """Chunks of runs and their hashes; always at least one. Take all of it in one turn of the
        loop."""
        runs: list[KvStored] = []
        hashes = array("Q")
        for tier, held in self._tiers.items():
            for run_parent, run in _runs(held):
                for at in range(0, len(run), SNAPSHOT_HASHES):
                    part = run[at : at + SNAPSHOT_HASHES]
                    if hashes and len(hashes) + len(part) > SNAPSHOT_HASHES:
                        yield runs, hashes
                        runs, hashes = [], array("Q")
                    runs.append(KvStored(run[at - 1] if at else run_parent, len(part), tier))
                    hashes.extend(part)
        yield runs, hashes


def _runs(held: dict[int, int | None]) -> Iterator[tuple[int | None, array[int]]]:
    """Blocks as runs in the order they were stored: parents were stored before their children, so
    they come first."""
    start: int | None = None
    run = array("Q")
    for block, parent in held.items():
        if run and parent == run[-1]:
            run.append(block)
            continue
        if run:
            yield start, run
        start, run = parent, array("Q", [block])
    if run:
        yield start, run

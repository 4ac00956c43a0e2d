"""KV events of one rank, in order or not at all.

Every rank numbers its events. A gap, a heartbeat that names a later event, or a message that makes no sense drops the
rank from the index and asks for a snapshot; nothing of the rank counts as cached meanwhile. A snapshot arrives in
chunks and is built aside; events that arrive between its chunks are kept (bounded) and applied after the swap, from
the snapshot's sequence on. The worker takes a snapshot in one turn of its loop, so what is kept joins without a seam.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

from fermata.router.prefix_index import PrefixIndex
from fermata.wire.messages import (
    KvEvent,
    KvEvents,
    KvRemoved,
    KvStored,
    SnapshotChunk,
)

_MOST_KEPT_HASHES = 1 << 20
_MOST_KEPT_MESSAGES = 1 << 14


class Heard(Enum):
    """What a message did to the feed."""

    APPLIED = "applied"
    KEPT = "kept"
    IGNORED = "ignored"
    BROKEN = "broken"
    """In a gap, or senseless: `restart` must follow."""


class RankFeed:
    """The reader's place in a rank's events. It starts without: the first snapshot gives it one."""

    def __init__(self, *, slot: int, rank: int, index: PrefixIndex) -> None:
        self.slot = slot
        self.rank = rank
        self.applied = -1
        """Last event in the index; means nothing while not live."""
        self.is_live = False
        self.request = 0
        """Number of the snapshot that was asked for last."""
        self.asked_at = 0.0
        self.must_ask = False
        self._index = index
        self._next_chunk = 0
        self._sequence = -1
        self._kept: deque[tuple[KvEvents, memoryview]] = deque()
        self._kept_hashes = 0

    def restart(self) -> None:
        """Out of the index until the next snapshot is in."""
        self._index.drop(self.slot)
        self.is_live = False
        self.must_ask = True
        self._forget_kept()

    def ask(self, now: float) -> int:
        """The number to ask for a snapshot with; what was staged of an earlier one is void."""
        self._index.unstage(self.slot)
        self._next_chunk = 0
        self.request += 1
        self.asked_at = now
        self.must_ask = False
        return self.request

    def events(self, message: KvEvents, hashes: memoryview) -> Heard:
        if not _makes_sense(message.events, hashes):
            return Heard.BROKEN
        if not self.is_live:
            self._keep(message, hashes)
            return Heard.KEPT
        return self._apply(message, hashes)

    def chunk(self, message: SnapshotChunk, hashes: memoryview) -> Heard:
        if self.is_live or self.must_ask or message.request != self.request:
            return Heard.IGNORED
        if self._next_chunk == 0:
            self._sequence = message.sequence
        if (
            message.index != self._next_chunk
            or message.sequence != self._sequence
            or not _makes_sense(message.stored, hashes)
        ):
            return Heard.BROKEN
        self._next_chunk += 1
        at = 0
        for run in message.stored:
            self._index.stage(self.slot, run.tier, run.parent, hashes[at : at + run.count])
            at += run.count
        return self._swap() if message.last else Heard.KEPT

    def last_emitted(self, sequence: int) -> bool:
        """A heartbeat's word. False: events were lost, or the rank counts anew."""
        return not self.is_live or sequence == self.applied

    def _swap(self) -> Heard:
        self._index.swap(self.slot)
        self.is_live = True
        self.applied = self._sequence
        kept = list(self._kept)
        self._forget_kept()
        for message, hashes in kept:
            if self._apply(message, hashes) is Heard.BROKEN:
                return Heard.BROKEN
        return Heard.APPLIED

    def _apply(self, message: KvEvents, hashes: memoryview) -> Heard:
        skip = self.applied + 1 - message.first
        if skip < 0:
            return Heard.BROKEN
        if skip >= len(message.events):
            return Heard.IGNORED
        at = 0
        for event in message.events:
            count = event.count if isinstance(event, KvStored | KvRemoved) else 0
            if skip > 0:
                skip -= 1
            else:
                self._apply_one(event, hashes[at : at + count])
            at += count
        self.applied = message.first + len(message.events) - 1
        return Heard.APPLIED

    def _apply_one(self, event: KvEvent, hashes: memoryview) -> None:
        if isinstance(event, KvStored):
            self._index.stored(self.slot, event.tier, event.parent, hashes)
        elif isinstance(event, KvRemoved):
            self._index.removed(self.slot, event.tier, hashes)
        else:
            self._index.cleared(self.slot, event.tier)

    def _keep(self, message: KvEvents, hashes: memoryview) -> None:
        # What overflows leaves a gap behind, which is found after the swap.
        if (
            self._kept_hashes + len(hashes) > _MOST_KEPT_HASHES
            or len(self._kept) >= _MOST_KEPT_MESSAGES
        ):
            self._forget_kept()
        self._kept.append((message, hashes))
        self._kept_hashes += len(hashes)

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._kept_hashes = 0


def _makes_sense(events: Sequence[KvEvent], hashes: memoryview) -> bool:
    named = 0
    for event in events:
        if isinstance(event, KvStored | KvRemoved):
            if event.count < 0 or (isinstance(event, KvStored) and (event.parent or 0) < 0):
                return False
            named += event.count
    return named == len(hashes)

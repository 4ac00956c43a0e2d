"""What became visible and what went on one rank, as KV events of routing blocks, in order and in runs.

A run is the natural unit: a prefill publishes consecutive blocks and an eviction takes tails of
sequences, so most steps make one event. A router's cost is the blocks named, not the events.
"""

from __future__ import annotations

from array import array

from fermata.wire.messages import KvCleared, KvEvent, KvRemoved, KvStored


class KvJournal:
    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._hashes = array("Q")
        self._run: type[KvEvent] | None = None
        self._parent: int | None = None
        self._count = 0

    @property
    def is_empty(self) -> bool:
        return not self._hashes and not self._events

    def stored(self, content: int, parent: int | None) -> None:
        follows = self._run is KvStored and parent is not None and parent == self._hashes[-1]
        if not follows:
            self._close_run()
            self._run, self._parent = KvStored, parent
        self._hashes.append(content)
        self._count += 1

    def removed(self, content: int) -> None:
        if self._run is not KvRemoved:
            self._close_run()
            self._run = KvRemoved
        self._hashes.append(content)
        self._count += 1

    def cleared(self) -> None:
        self._close_run()
        self._events.append(KvCleared())

    def take(self) -> tuple[list[KvEvent], array[int]]:
        """All since the last call: the events and the hashes they name, event by event."""
        self._close_run()
        taken = self._events, self._hashes
        if self._events:
            self._events, self._hashes = [], array("Q")
        return taken

    def _close_run(self) -> None:
        if self._run is KvStored:
            self._events.append(KvStored(parent=self._parent, count=self._count))
        elif self._run is KvRemoved:
            self._events.append(KvRemoved(count=self._count))
        self._run, self._count = None, 0

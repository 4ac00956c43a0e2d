"""Owners that were declared dead: what they start up to that incarnation is refused, for as long
as it is remembered."""

from __future__ import annotations

from collections import OrderedDict

from fermata.core.ids import OwnerId

MAX_FENCES = 4096


class Fences:
    def __init__(self) -> None:
        self._fences: OrderedDict[OwnerId, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fences)

    def add(self, owner: OwnerId, incarnation: int) -> None:
        """Fences only rise."""
        self._fences[owner] = max(incarnation, self._fences.pop(owner, -1))
        if len(self._fences) > MAX_FENCES:
            self._fences.popitem(last=False)

    def holds(self, owner: OwnerId, incarnation: int) -> bool:
        return incarnation <= self._fences.get(owner, -1)

"""Words of the router's core: effects, turns, and the small numbers that slots go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import Buffer

from fermata.core.ids import Slot
from fermata.wire.messages import Message, Route
from fermata.wire.roles import Peer

NO_HASHES = memoryview(b"").cast("Q")


@dataclass(frozen=True, slots=True)
class Send:
    """The one effect of the core: this message goes to that peer."""

    to: Peer
    message: Message
    frame: Buffer = b""


class Effects:
    """What the present call has to send, in order."""

    __slots__ = ("_sends",)

    def __init__(self) -> None:
        self._sends: list[Send] = []

    def send(self, to: Peer, message: Message, frame: Buffer = b"") -> None:
        self._sends.append(Send(to, message, frame))

    def take(self) -> list[Send]:
        sends, self._sends = self._sends, []
        return sends


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn to be placed, as its owner asked for it."""

    owner: Peer
    route: Route
    model: str
    """Canonical name."""
    hashes: memoryview
    """Sequence hashes, format Q."""
    since: float
    """When it began to wait, elsewhere included."""


class Seats:
    """Slots by small numbers, which bit masks and dicts like better than names. Numbers are used again."""

    def __init__(self) -> None:
        self.names: Mapping[int, Slot] = {}
        """Another object after each change, so that who keeps it keeps the names of its time."""
        self._free: list[int] = []
        self._made = 0

    def take(self, slot: Slot) -> int:
        if self._free:
            number = self._free.pop()
        else:
            number = self._made
            self._made += 1
        self.names = {**self.names, number: slot}
        return number

    def leave(self, number: int) -> None:
        self.names = {taken: slot for taken, slot in self.names.items() if taken != number}
        self._free.append(number)

    def taken(self) -> set[int]:
        return set(self.names)

    def __getitem__(self, number: int) -> Slot:
        return self.names[number]

"""Session affinity: a session goes back to the slot of its first successful dispatch.

Bound when the engine accepts the session's turn, kept while turns of it are in flight and for a TTL after the last. A
cancellation never breaks a binding; the loss of its worker or a failed turn does. Siblings under one parent bind
together, apart from the parent itself: they share its prefix, and one worker prefills it once.

A turn remembers the binding it was placed under. When it was accepted elsewhere, the session moves there only if the
binding is still as the turn saw it: of two turns that race, the first to be accepted decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fermata.core.ids import RoutingKey, SessionId

_MOST_BINDINGS = 65_536
_NO_KEY = RoutingKey("")


@dataclass(slots=True, eq=False)
class Binding:
    key: str
    slot: int
    routing: RoutingKey = _NO_KEY
    """Says which router of the ring it belongs to."""
    told_of: float | None = None
    """For one that we were told of: when it was used last. None once a turn of ours was."""
    turns: int = 0
    version: int = 0
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class BoundTurn:
    """One turn's part in its session's binding."""

    key: str
    seen: Binding | None
    version: int
    routing: RoutingKey = _NO_KEY
    counted: Binding | None = None
    """The binding whose expiry it holds up."""


def affinity_key(session: SessionId, parent: SessionId) -> str:
    """Empty for an anonymous turn."""
    if not session:
        return ""
    return f"siblings:{parent}" if parent else f"session:{session}"


def affinity_name(key: str) -> tuple[SessionId, SessionId]:
    """Session and parent that bind by this key."""
    kind, _, name = key.partition(":")
    if kind == "siblings":
        return SessionId(name), SessionId(name)
    return SessionId(name), SessionId("")


class Affinity:
    """Bounded: beyond the bound the binding idle for longest is forgotten. All O(1), but for a slot that is lost."""

    def __init__(self, *, limit: int = _MOST_BINDINGS) -> None:
        self._limit = limit
        self._bindings: dict[str, Binding] = {}
        self._of_slot: dict[int, set[str]] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Key -> since when no turn of it is in flight; oldest first."""
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._bindings)

    def slot_of(self, key: str) -> int | None:
        binding = self._bindings.get(key)
        return None if binding is None else binding.slot

    def granted(self, key: str, routing: RoutingKey = _NO_KEY) -> BoundTurn | None:
        """A turn of the session is under way; from now on its binding, if there is one, does not expire."""
        if not key:
            return None
        binding = self._bindings.get(key)
        turn = BoundTurn(key, binding, binding.version if binding else 0, routing)
        if binding is not None:
            self._count(turn, binding)
        return turn

    def accepted(self, turn: BoundTurn, slot: int) -> None:
        binding = self._bindings.get(turn.key)
        if binding is None:
            binding = Binding(turn.key, slot, turn.routing)
            self._bindings[turn.key] = binding
            self._of_slot.setdefault(slot, set()).add(turn.key)
        elif binding.slot != slot and turn.seen is binding and turn.version == binding.version:
            self._leave_slot(binding)
            binding.slot = slot
            binding.version += 1
            self._of_slot.setdefault(slot, set()).add(turn.key)
        binding.told_of = None
        if turn.counted is not binding:
            self._count(turn, binding)
        self._evict()

    def adopt(
        self, key: str, routing: RoutingKey, slot: int, *, used_at: float, now: float
    ) -> None:
        """Somebody else's word: it counts until a turn of ours does, the latest use of several. Expires from now."""
        if not key:
            return
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = Binding(key, slot, routing, used_at)
            self._of_slot.setdefault(slot, set()).add(key)
            self._idle[key] = now
            self._evict()
        elif binding.told_of is not None and used_at > binding.told_of:
            binding.told_of = used_at
            if binding.slot != slot:
                self._leave_slot(binding)
                binding.slot = slot
                binding.version += 1
                self._of_slot.setdefault(slot, set()).add(key)

    def others(self, is_mine: Callable[[RoutingKey], bool]) -> list[Binding]:
        """Those whose key is another router's. O(bindings)."""
        return [b for b in self._bindings.values() if b.routing and not is_mine(b.routing)]

    def ended(self, turn: BoundTurn, now: float) -> None:
        """However it ended."""
        binding, turn.counted = turn.counted, None
        if binding is None:
            return
        binding.turns -= 1
        if not binding.turns and not binding.is_broken:
            self._idle[binding.key] = now

    def failed(self, turn: BoundTurn, slot: int) -> None:
        """The turn failed on `slot`: its session shall not go there again."""
        binding = self._bindings.get(turn.key)
        if binding is not None and binding.slot == slot:
            self._break(binding)

    def lose_slot(self, slot: int) -> None:
        """O(bindings of the slot)."""
        for key in list(self._of_slot.get(slot, ())):
            self._break(self._bindings[key])

    def unbind(self, key: str) -> None:
        binding = self._bindings.get(key)
        if binding is not None:
            self._break(binding)

    def expire(self, now: float, ttl_s: float) -> None:
        while self._idle:
            key, since = next(iter(self._idle.items()))
            if since + ttl_s > now:
                return
            self._break(self._bindings[key])

    def next_expiry(self, ttl_s: float) -> float | None:
        return next(iter(self._idle.values())) + ttl_s if self._idle else None

    def _count(self, turn: BoundTurn, binding: Binding) -> None:
        turn.counted = binding
        binding.turns += 1
        self._idle.pop(binding.key, None)

    def _evict(self) -> None:
        while len(self._bindings) > self._limit and self._idle:
            self.evicted += 1
            self._break(self._bindings[next(iter(self._idle))])

    def _break(self, binding: Binding) -> None:
        binding.is_broken = True
        del self._bindings[binding.key]
        self._idle.pop(binding.key, None)
        self._leave_slot(binding)

    def _leave_slot(self, binding: Binding) -> None:
        keys = self._of_slot[binding.slot]
        keys.discard(binding.key)
        if not keys:
            del self._of_slot[binding.slot]

    def check_integrity(self) -> None:
        by_slot: dict[int, set[str]] = {}
        for key, binding in self._bindings.items():
            assert binding.key == key
            assert not binding.is_broken
            assert binding.turns >= 0
            assert (key in self._idle) == (binding.turns == 0)
            by_slot.setdefault(binding.slot, set()).add(key)
        assert by_slot == self._of_slot
        assert self._idle.keys() <= self._bindings.keys()

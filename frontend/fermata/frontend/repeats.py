"""Turns that a client asks for again: it lost patience, or its connection, and its wait should not begin anew.

A repeat is the same session with the same prompt and the same sampling, whether streamed or not; or a prompt that goes
on from one that is still held. It inherits the age of the older turn, and so its place in the router's queue and its
deadline. Nothing is cancelled for it: the older turn ends when its own client's socket does, and while both are open
both are served, for parallel samples look just the same. Nor need a router be told: that both are one step of one
program, it sees by their hashes.

Clients close the old connection before they ask again, so a turn that was cancelled while it waited is remembered for
a while; bounded in number. O(turns of the session) a turn, which are a handful.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import msgspec

from fermata.core.hashing import HASH_BYTES, TOKEN_BYTES
from fermata.core.ids import RequestId, SessionId
from fermata.frontend.turn_model import TurnSpec
from fermata.wire.messages import Sampling

MEMORY_S = 600.0
MOST_LEFT = 8192


class Live(Protocol):
    """What is read of a turn that has not ended."""

    @property
    def is_held(self) -> bool: ...

    def queue_age_s(self, now: float) -> float:
        """How long it has waited for its slot, or did until it had one."""
        ...


class Print(msgspec.Struct, frozen=True, gc=False):
    """Tells prompts apart without keeping them: a sequence hash names all blocks up to its own."""

    session: SessionId
    tokens: int
    blocks: int
    last: bytes
    """Sequence hash of the last full block, as in the frame."""
    tail: bytes
    """Tokens after it."""
    sampling: Sampling

    @classmethod
    def of(cls, spec: TurnSpec) -> Print:
        blocks = len(spec.hashes) // HASH_BYTES
        return cls(
            spec.session,
            len(spec.prompt) // TOKEN_BYTES,
            blocks,
            spec.hashes[-HASH_BYTES:],
            spec.prompt[blocks * spec.block_size * TOKEN_BYTES :],
            spec.sampling,
        )

    def is_same(self, other: Print) -> bool:
        """The same turn again. Its session is."""
        return (
            self.tokens == other.tokens
            and self.last == other.last
            and self.tail == other.tail
            and self.sampling == other.sampling
        )

    def goes_on_from(self, other: Print, hashes: bytes) -> bool:
        """As far as full blocks tell; `hashes` are its own. Less than a block tells nothing."""
        if not other.blocks or other.blocks > self.blocks:
            return False
        end = other.blocks * HASH_BYTES
        return hashes[end - HASH_BYTES : end] == other.last


class _Known:
    """One turn: live, or left by its client while it waited."""

    __slots__ = ("age_s", "left_at", "live", "print", "was_held")

    def __init__(self, turn_print: Print, live: Live) -> None:
        self.print = turn_print
        self.live: Live | None = live
        self.age_s = 0.0
        """Of one that was left, as of then."""
        self.was_held = False
        self.left_at = 0.0

    @property
    def is_held(self) -> bool:
        return self.was_held if self.live is None else self.live.is_held

    def queue_age_s(self, now: float) -> float:
        return self.age_s if self.live is None else self.live.queue_age_s(now)


class Repeats:
    def __init__(self, *, memory_s: float = MEMORY_S, most_left: int = MOST_LEFT) -> None:
        self.found = 0
        """Turns that were repeats."""
        self._memory_s = memory_s
        self._most_left = most_left
        self._sessions: dict[SessionId, dict[RequestId, _Known]] = {}
        self._left: OrderedDict[RequestId, _Known] = OrderedDict()
        """Those that were left, the oldest first."""

    def __len__(self) -> int:
        """Turns known, those that were left included."""
        return sum(len(turns) for turns in self._sessions.values())

    def age_s(self, spec: TurnSpec, now: float) -> float:
        """How long the turn has waited already, as the one it repeats. 0 for one that is new."""
        self._forget(now)
        others = self._sessions.get(spec.session)
        if not others:
            return 0.0
        mine = Print.of(spec)
        ages = [
            known.queue_age_s(now)
            for known in others.values()
            if mine.is_same(known.print)
            or (known.is_held and mine.goes_on_from(known.print, spec.hashes))
        ]
        self.found += bool(ages)
        return max(ages, default=0.0)

    def began(self, spec: TurnSpec, live: Live) -> None:
        if spec.session:
            turns = self._sessions.setdefault(spec.session, {})
            turns[spec.request] = _Known(Print.of(spec), live)

    def ended(self, spec: TurnSpec) -> None:
        """It has its answer, or will never have one."""
        self._drop(spec.session, spec.request)

    def left(self, spec: TurnSpec, *, age_s: float, was_held: bool, now: float) -> None:
        """Its client went away before it had an answer."""
        known = self._sessions.get(spec.session, {}).get(spec.request)
        if known is None:
            return
        known.live, known.age_s, known.was_held, known.left_at = None, age_s, was_held, now
        self._left[spec.request] = known
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._left:
            request, known = next(iter(self._left.items()))
            if len(self._left) <= self._most_left and now - known.left_at < self._memory_s:
                return
            self._drop(known.print.session, request)

    def _drop(self, session: SessionId, request: RequestId) -> None:
        self._left.pop(request, None)
        turns = self._sessions.get(session)
        if turns is not None and turns.pop(request, None) is not None and not turns:
            del self._sessions[session]

    def check_integrity(self) -> None:
        assert len(self._left) <= self._most_left
        assert all(self._sessions.values()), "a session without turns"
        left = {
            request: known
            for turns in self._sessions.values()
            for request, known in turns.items()
            if known.live is None
        }
        assert left == dict(self._left)

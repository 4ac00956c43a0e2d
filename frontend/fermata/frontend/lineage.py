"""Sessions of clients that name none: the turn whose prompt extends the last one's is its next turn.

Half of the real clients send no identity, yet each turn of theirs resends the whole history. A sequence hash
names a block and everything before it, so the new prompt covers the first p blocks of an old one exactly if it
has the old hash at p. A lineage leaves its last turn's hashes at a few depths: at the end, one, three, seven...
blocks before it, and at 90 % of it (templates rewrite the last words, so the very end may not come back). The
new prompt is walked from its end until it meets one of them: O(new blocks), O(log) entries a lineage.

Two conversations may share more than 90 % of their first prompts (one large system prompt, two short questions). The
continuation of a chat has more messages than the turn it continues and a sibling's first turn has not, so the count of
messages tells them apart; the same prompt again is the same turn again.

Bounded: the least recently used lineage goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from fermata.core.ids import SessionId

COVER = 0.9
MAX_LINEAGES = 16_384


@dataclass(slots=True)
class _Lineage:
    session: SessionId
    blocks: int
    messages: int
    digest: int
    """Of the last turn's last full block and the rest after it, so of its whole prompt: tells a repeat."""
    keys: list[int]


class Lineages:
    """Not bound to any tenant: `scope` (who holds the API key) keeps clients apart."""

    def __init__(self, *, name: str, limit: int = MAX_LINEAGES) -> None:
        """`name` is this boot of this frontend: what it invents must not be what another one invents."""
        self._name = name
        self._limit = limit
        self._by_session: OrderedDict[SessionId, _Lineage] = OrderedDict()
        self._index: dict[int, _Lineage] = {}
        self.continued = 0
        self.begun = 0

    def __len__(self) -> int:
        return len(self._by_session)

    def infer(
        self, *, scope: str, hashes: array[int], tail: bytes, messages: int
    ) -> SessionId | None:
        """The session this turn belongs to, a new one where it continues none; None for less than a block.

        `tail` is the frame of the tokens after the last full block. `messages` is 0 where the
        dialect has none; then the prompt must have grown instead.
        """
        if not hashes:
            return None
        salt = xxh3_64_intdigest(scope.encode())
        digest = xxh3_64_intdigest(tail, seed=hashes[-1] ^ salt)
        found = self._find(salt, hashes, digest, messages)
        if found is None:
            self.begun += 1
            found = _Lineage(self._new_session(), 0, 0, 0, [])
        else:
            self.continued += 1
            self._forget_keys(found)
        found.blocks, found.messages, found.digest = len(hashes), messages, digest
        found.keys = [hashes[depth - 1] ^ salt for depth in depths(len(hashes))]
        for key in found.keys:
            self._index[key] = found
        self._by_session[found.session] = found
        self._by_session.move_to_end(found.session)
        if len(self._by_session) > self._limit:
            self._forget_keys(self._by_session.popitem(last=False)[1])
        return found.session

    def _new_session(self) -> SessionId:
        return SessionId("anon-" + xxh3_64_hexdigest(f"{self._name}/{self.begun}".encode()))

    def _find(self, salt: int, hashes: array[int], digest: int, messages: int) -> _Lineage | None:
        index = self._index
        for depth in range(len(hashes), 0, -1):
            lineage = index.get(hashes[depth - 1] ^ salt)
            if lineage is not None and _continues(lineage, len(hashes), digest, messages):
                return lineage
        return None

    def _forget_keys(self, lineage: _Lineage) -> None:
        for key in lineage.keys:
            if self._index.get(key) is lineage:  # a sibling may have taken a shared one over
                del self._index[key]

    def check_integrity(self) -> None:
        assert len(self._by_session) <= self._limit
        for key, lineage in self._index.items():
            assert self._by_session[lineage.session] is lineage
            assert key in lineage.keys


def depths(blocks: int) -> Iterator[int]:
    """Where a turn of so many blocks leaves its hashes, deepest first: its end, then 1, 3, 7... before it,
    then 90 % of it."""
    floor = max(1, -(-blocks * 9 // 10))
    step = 0
    while blocks - step > floor:
        yield blocks - step
        step = step * 2 or 1
    yield floor


def _continues(lineage: _Lineage, blocks: int, digest: int, messages: int) -> bool:
    if digest == lineage.digest:
        return True
    if messages or lineage.messages:
        return messages > lineage.messages
    return blocks > lineage.blocks

"""What was decided lately, for whoever asks why: a bounded memory of grants, and one of holds and refusals.

Remembering one is an append of references to what the decision had in hand anyway (masks, depths, costs); it is made
readable when somebody asks. Holds have a memory of their own: a thousand turns that wait must not push out the grants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from typing import Literal

import msgspec

from fermata.core.ids import OwnerId, RequestId, Slot, WorkerId
from fermata.router.chain_links import bits
from fermata.router.load import SlotLoad
from fermata.router.prefix_index import Match
from fermata.wire.messages import Candidate, Decision, Route

MOST = 1024
MOST_OTHERS = 4096


class Granted(msgspec.Struct, frozen=True):
    at: float
    owner: str
    route: Route
    slot: int
    waited_s: float
    eligible: int
    """Slots that could take the turn at all, as a mask, and those of them that had room."""
    free: int
    preferred: int | None
    admitted: bool
    """Its program's admission had left fewer slots than could take it."""
    match: Match
    shared: Mapping[int, int]
    scored: Sequence[SlotLoad]
    costs: Sequence[float]
    names: Mapping[int, Slot]
    """Of slots at that time; numbers are used again."""
    policy: str
    revision: int


class Other(msgspec.Struct, frozen=True):
    at: float
    owner: str
    route: Route
    what: Literal["hold", "reject", "moved"]
    reason: str
    deadline_s: float
    policy: str
    revision: int


class Decisions:
    def __init__(self, *, most: int = MOST, most_others: int = MOST_OTHERS) -> None:
        self._grants: deque[tuple[int, Granted]] = deque(maxlen=most)
        self._others: deque[tuple[int, Other]] = deque(maxlen=most_others)
        self._serial = 0
        """Many are made in one moment, so time alone gives no order."""

    def __len__(self) -> int:
        return len(self._grants) + len(self._others)

    def granted(self, decision: Granted) -> None:
        self._serial += 1
        self._grants.append((self._serial, decision))

    def other(self, decision: Other) -> None:
        self._serial += 1
        self._others.append((self._serial, decision))

    def explain(self, *, request: RequestId, prefix: str, limit: int, now: float) -> list[Decision]:
        """Newest first. O(what is remembered); without a request only as far back as `limit` needs."""
        found: list[Decision] = []
        for one in self._newest_first():
            route = one.route
            if (request and route.request != request) or not route.session.startswith(prefix):
                continue
            if len(found) >= limit:
                break
            found.append(_grant(one, now) if isinstance(one, Granted) else _other(one, now))
        return found

    def _newest_first(self) -> Iterator[Granted | Other]:
        grants: Iterator[_Numbered] = reversed(self._grants)
        others: Iterator[_Numbered] = reversed(self._others)
        return (one for _, one in merge(grants, others, key=_age))


_Numbered = tuple[int, Granted | Other]


def _age(numbered: _Numbered) -> int:
    return -numbered[0]


def _grant(one: Granted, now: float) -> Decision:
    place = one.names[one.slot]
    return Decision(
        age_s=max(0.0, now - one.at),
        request=one.route.request,
        attempt=one.route.attempt,
        owner=OwnerId(one.owner),
        session=one.route.session,
        what="grant",
        reason=_why(one),
        policy=one.policy,
        policy_revision=one.revision,
        input_tokens=one.route.input_tokens,
        worker=place.worker,
        rank=place.rank,
        waited_s=one.waited_s,
        candidates=_candidates(one),
    )


def _why(one: Granted) -> str:
    if one.preferred == one.slot and not one.scored:
        return "affinity"
    if one.free & (one.free - 1) == 0:
        return "program" if one.admitted else "only"
    return "cost" if one.scored else "policy"


def _candidates(one: Granted) -> list[Candidate]:
    costs = {load.slot: cost for load, cost in zip(one.scored, one.costs, strict=True)}
    found: list[Candidate] = []
    for bit in bits(one.eligible):
        slot = bit.bit_length() - 1
        name = one.names.get(slot, Slot(WorkerId("?"), 0))
        matched = {str(tier): depths[slot] for tier, depths in one.match.items() if slot in depths}
        found.append(
            Candidate(
                worker=name.worker,
                rank=name.rank,
                has_room=bool(one.free & bit),
                score=costs.get(slot),
                matched=matched,
                shared_blocks=one.shared.get(slot, 0),
            )
        )
    return sorted(found, key=lambda c: (c.score is None, c.score or 0.0, c.worker, c.rank))


def _other(one: Other, now: float) -> Decision:
    return Decision(
        age_s=max(0.0, now - one.at),
        request=one.route.request,
        attempt=one.route.attempt,
        owner=OwnerId(one.owner),
        session=one.route.session,
        what=one.what,
        reason=one.reason,
        policy=one.policy,
        policy_revision=one.revision,
        input_tokens=one.route.input_tokens,
        waited_s=one.deadline_s,
    )

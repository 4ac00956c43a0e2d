"""All turns of one frontend, by request and by lease, and what routers are told about them. Pure.

The table is the one place where messages meet turns. It keeps, incrementally, the digest of live leases for
each router number, and the highest lease id seen of each router's present boot, which every heartbeat carries.

A Grant whose turn is gone is given back at once. Ended leases are remembered for a while (bounded), so that a
Grant that comes twice is not given back twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fermata.core.errors import PoisonTurn, TurnError
from fermata.core.hashing import HASH_BYTES, TOKEN_BYTES
from fermata.core.ids import LeaseId, RequestId, lease_incarnation, lease_router
from fermata.core.lease_digest import LeaseDigest
from fermata.frontend.repeats import Repeats
from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import (
    Cancelled,
    Dispatch,
    Effect,
    Effects,
    Failed,
    Reader,
    Report,
    RevokeReason,
    Stage,
    TurnLimits,
    TurnSpec,
)
from fermata.wire.messages import (
    Accepted,
    Grant,
    Hold,
    LeaseClaim,
    LeaseClaims,
    LeaseProgress,
    Output,
    Refused,
    Reject,
)

REMEMBERED_LEASES = 8192
CLAIMS = 2048
CLAIM_BYTES = 16 << 20
"""Of one message: far below what a router takes."""
_END = frozenset({"finished", "cancelled", "failed"})


@dataclass(slots=True)
class TurnCounters:
    turns: int = 0
    migrations: int = 0
    """Of turns that ended; see `TurnTable.migrations`."""
    cancellations: int = 0
    poisons: int = 0
    stale_grants: int = 0
    """Grants whose turn had ended or had moved on: given back."""
    stale_outputs: int = 0
    """Entries of leases that are not (any more) ours."""
    ragged_outputs: int = 0
    """Output whose frame is not as long as its entries say."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A lease nobody waits for: tell its router."""

    progress: LeaseProgress


TableEffect = Effect | GiveBack


class TurnTable:
    def __init__(self, limits: TurnLimits) -> None:
        self.counters = TurnCounters()
        self.repeats = Repeats()
        self._limits = limits
        self._turns: dict[RequestId, Turn] = {}
        self._routing: dict[RequestId, Turn] = {}
        self._by_lease: dict[LeaseId, Turn] = {}
        self._digests: dict[int, LeaseDigest] = {}
        self._seen: dict[int, LeaseId] = {}
        self._closed: OrderedDict[LeaseId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns.values())

    @property
    def leases(self) -> int:
        return len(self._by_lease)

    @property
    def routing(self) -> Iterable[Turn]:
        """Turns that wait for a Grant."""
        return self._routing.values()

    @property
    def migrations(self) -> int:
        return self.counters.migrations + sum(turn.migrations for turn in self._turns.values())

    def digest(self, router: int) -> LeaseDigest:
        return self._digests.get(router) or LeaseDigest()

    def seen(self, router: int, incarnation: int) -> int:
        """0 until a Grant of this boot of the router came."""
        lease = self._seen.get(router)
        return lease if lease is not None and _is_of(lease, incarnation) else 0

    def leases_of(self, router: int) -> list[LeaseId]:
        return [lease for lease in self._by_lease if lease_router(lease) == router]

    def start(self, spec: TurnSpec, *, reader: Reader, now: float) -> tuple[Turn, Effects]:
        assert spec.request not in self._turns, spec.request
        waited_s = self.repeats.age_s(spec, now)
        turn = Turn(spec, reader=reader, now=now, limits=self._limits, waited_s=waited_s)
        self._turns[spec.request] = turn
        self.repeats.began(spec, turn)
        self.counters.turns += 1
        self._routing[spec.request] = turn
        return turn, turn.start()

    def grant(self, grant: Grant, now: float) -> list[TableEffect]:
        self._see(grant.lease)
        turn = self._turns.get(grant.request)
        if turn is not None:
            effects = turn.granted(grant, now)
            self.counters.stale_grants += any(isinstance(e, Report) for e in effects)
            return [*self._kept(turn, effects)]
        if grant.lease in self._closed:
            return []
        self.counters.stale_grants += 1
        self._close(grant.lease)
        return [GiveBack(LeaseProgress(grant.lease, "cancelled", reason="stale"))]

    def hold(self, hold: Hold, now: float) -> Effects:
        turn = self._turns.get(hold.request)
        return () if turn is None else self._kept(turn, turn.held(hold, now))

    def reject(self, reject: Reject, now: float) -> Effects:
        turn = self._turns.get(reject.request)
        return () if turn is None else self._kept(turn, turn.rejected(reject, now))

    def moved(self, request: RequestId, attempt: int, now: float) -> Effects:
        turn = self._turns.get(request)
        if turn is None or turn.attempt != attempt:
            return ()
        return self._kept(turn, turn.ask_again(now))

    def accepted(self, accepted: Accepted) -> Effects:
        turn = self._by_lease.get(accepted.lease)
        return () if turn is None else turn.accepted(accepted.lease)  # no index knows of it

    def refused(self, refused: Refused, now: float) -> Effects:
        turn = self._by_lease.get(refused.lease)
        return () if turn is None else self._kept(turn, turn.refused(refused, now))

    def output(self, output: Output, frame: memoryview, now: float) -> list[Effect]:
        """O(entries + tokens)."""
        tokens = frame.cast("B")
        if sum([entry.count for entry in output.entries]) * TOKEN_BYTES != len(tokens):
            self.counters.ragged_outputs += 1  # the gap it leaves is found by what comes next
            return []
        effects: list[Effect] = []
        at = 0
        for entry in output.entries:
            end = at + entry.count * TOKEN_BYTES
            turn = self._by_lease.get(entry.lease)
            if turn is None:
                self.counters.stale_outputs += 1
            else:
                done = turn.output(entry, tokens[at:end], now)
                if turn.stage is not Stage.GENERATING:  # else it is where it was in every index
                    self._kept(turn, done)
                effects.extend(done)
            at = end
        return effects

    def revoke(self, leases: Iterable[int], reason: RevokeReason, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for raw in leases:
            turn = self._by_lease.get(LeaseId(raw))
            if turn is not None:
                effects.extend(self._kept(turn, turn.revoked(LeaseId(raw), reason, now)))
        return effects

    def cancel(self, turn: Turn, now: float) -> Effects:
        if turn.ended:
            return ()
        self.counters.cancellations += 1
        age_s, was_held = turn.queue_age_s(now), turn.is_held
        self.repeats.left(turn.spec, age_s=age_s, was_held=was_held, now=now)
        return self._kept(turn, turn.cancel(now))

    def stop(self, turn: Turn, now: float) -> Effects:
        return self._kept(turn, turn.stop(now))

    def fail(self, turn: Turn, error: TurnError, now: float) -> Effects:
        return self._kept(turn, turn.fail(error, now))

    def ask_again(self, turns: Iterable[Turn], now: float) -> list[Effect]:
        return [e for turn in list(turns) for e in self._kept(turn, turn.ask_again(now))]

    def disown_all(self, now: float) -> list[Effect]:
        """Our incarnation was fenced; the routers forgot our leases, and every turn is routed again."""
        effects = [
            e for turn in list(self._turns.values()) for e in self._kept(turn, turn.disowned(now))
        ]
        self._seen.clear()
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Deadlines of turns that wait. O(those)."""
        return [
            e for turn in list(self._routing.values()) for e in self._kept(turn, turn.tick(now))
        ]

    def progress(self) -> list[LeaseProgress]:
        """Token counts that changed since last told. O(live leases), once a second."""
        told = (turn.progress() for turn in self._by_lease.values())
        return [entry for entry in told if entry is not None]

    def claims(self, router: int) -> Iterator[tuple[LeaseClaims, bytes]]:
        """Everything owned of this router number, for its new boot, in messages of a size that is taken; each
        frame has the hashes of its claims."""
        claims: list[LeaseClaim] = []
        frames: list[bytes] = []
        size = 0
        for lease, turn in self._by_lease.items():
            if lease_router(lease) != router:
                continue
            hashes = turn.input_hashes()
            if claims and (size + len(hashes) > CLAIM_BYTES or len(claims) == CLAIMS):
                yield LeaseClaims(claims, last=False), b"".join(frames)
                claims, frames, size = [], [], 0
            claims.append(_claim(lease, turn))
            frames.append(hashes)
            size += len(hashes)
        yield LeaseClaims(claims), b"".join(frames)

    def check_integrity(self) -> None:
        """For tests: every index agrees with the turns themselves."""
        live = {t.lease: t for t in self._turns.values() if t.lease is not None}
        assert live == self._by_lease
        routing = {r: t for r, t in self._turns.items() if t.stage is Stage.ROUTING}
        assert routing == self._routing
        assert not any(turn.ended for turn in self._turns.values())
        for router in {lease_router(lease) for lease in self._by_lease} | set(self._digests):
            assert self.digest(router) == LeaseDigest(self.leases_of(router))
        assert len(self._closed) <= REMEMBERED_LEASES
        self.repeats.check_integrity()

    def _see(self, lease: LeaseId) -> None:
        router = lease_router(lease)
        known = self._seen.get(router)
        if known is None or lease_incarnation(known) != lease_incarnation(lease) or known < lease:
            self._seen[router] = lease

    def _kept(self, turn: Turn, effects: Effects) -> Effects:
        """Follows what a turn just did in every index."""
        for effect in effects:
            if isinstance(effect, Dispatch):
                assert turn.lease is not None
                self._open(turn.lease, turn)
            elif isinstance(effect, Report) and effect.progress.kind in _END:
                self._close(effect.progress.lease)
        request = turn.spec.request
        if turn.stage is Stage.ROUTING:
            self._routing[request] = turn
        else:
            self._routing.pop(request, None)
            if turn.ended and self._turns.pop(request, None) is not None:
                self._count_end(turn)
        return effects

    def _open(self, lease: LeaseId, turn: Turn) -> None:
        self._by_lease[lease] = turn
        self._digests.setdefault(lease_router(lease), LeaseDigest()).add(lease)

    def _close(self, lease: LeaseId) -> None:
        if self._by_lease.pop(lease, None) is not None:
            self._digests[lease_router(lease)].remove(lease)
        self._closed[lease] = None
        if len(self._closed) > REMEMBERED_LEASES:
            self._closed.popitem(last=False)

    def _count_end(self, turn: Turn) -> None:
        self.counters.migrations += turn.migrations
        match turn.outcome:
            case Cancelled():
                return  # its client may come back
            case Failed(PoisonTurn()):
                self.counters.poisons += 1
            case _:
                pass
        self.repeats.ended(turn.spec)


def _claim(lease: LeaseId, turn: Turn) -> LeaseClaim:
    grant, spec = turn.grant, turn.spec
    assert grant is not None
    return LeaseClaim(
        lease=lease,
        request=spec.request,
        attempt=turn.attempt,
        worker=grant.worker,
        rank=grant.rank,
        input_tokens=turn.input_tokens,
        output_tokens=turn.attempt_tokens,
        blocks=len(turn.input_hashes()) // HASH_BYTES,
        accepted=turn.stage is Stage.GENERATING,
        prefilled=turn.prefilled,
        key=spec.key,
        session=spec.session,
        parent=spec.parent,
    )


def _is_of(lease: LeaseId, incarnation: int) -> bool:
    return lease_incarnation(lease) == lease_incarnation(LeaseId(incarnation << 32))

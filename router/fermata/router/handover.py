"""What outlives a router or moves between routers: sessions, with slots and programs, and the age of waiting turns.

Three ways in. A worker's snapshot tells a router that booted of the sessions whose KV the worker has. A `Handover`
tells a router that a ring epoch gave keys to what their former router knew: the same, and programs that are paused,
which no worker has. And one way out: at a later epoch, whatever this router knows of keys that are another's now goes
there, and is forgotten here. Turns that run keep their leases here until they end, and their programs go with that end.
Turns that wait are asked about again by their owners, who are told (`Moved`); that they are the same, and how old, the
new router learns from both.

A router that is new in the ring knows no worker yet. It is told which ones there are, and holds turns until they have
said Hello, as one that boots does: what it placed before would all go to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from fermata.core.ids import OwnerId, RouterId, RoutingKey, WorkerId
from fermata.core.ring import Ring
from fermata.router.affinity import affinity_key, affinity_name
from fermata.router.program import Program
from fermata.router.state import RouterState
from fermata.router.worker import Worker
from fermata.wire.messages import Handover, HeldTurn, Role, SessionRecord
from fermata.wire.roles import Peer

_MOST_A_MESSAGE = 2048
_MOST_EXPECTED = 65_536


@dataclass(slots=True)
class _Parcel:
    """What goes to one router."""

    records: list[SessionRecord] = field(default_factory=list[SessionRecord])
    turns: list[HeldTurn] = field(default_factory=list[HeldTurn])


class Handovers:
    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._expected: dict[WorkerId, list[SessionRecord]] = {}
        """Handed over, of workers that have not registered here yet."""
        self._count = 0

    def remember(self, records: Iterable[SessionRecord], slot: int, now: float) -> None:
        """The sessions that the slot's worker says it has, those used last first.

        Which of them were paused no worker knows. Its engine keeps what was used last, so these have a place again, as
        far as a round of pausing would leave them one; the others have to be resumed.
        """
        state = self._state
        room = state.policy.scheduler.thunder_agent.pause_target * state.shares.tokens(slot)
        for record in sorted(records, key=_idlest_last):
            if not self._is_mine(record.key):
                continue
            use = state.programs.occupancy.use(slot)
            is_paused = not record.reasoning and use + record.context_tokens > room
            self._take_in(msgspec.structs.replace(record, paused=is_paused), slot, now)

    def registered(self, worker: Worker, now: float) -> None:
        """Its slots are open: what was handed over of it finds its place."""
        for record in self._expected.pop(worker.id, ()):
            self._count -= 1
            if record.rank < len(worker.slots):
                self._take_in(record, worker.slots[record.rank], now)

    def take(self, message: Handover, now: float) -> None:
        """From the router that had the keys. It may come before our own word of the epoch, and twice."""
        state = self._state
        state.counters["handovers_taken"] += 1
        for turn in message.turns:
            state.handed.put((turn.owner, turn.request), now - max(0.0, turn.waited_s))
        for record in message.programs:
            if message.epoch > state.ring.epoch or self._is_mine(record.key):
                self._take_handed(record, now)
        unknown = {name for name in message.workers if state.workers.by_id(name) is None}
        if unknown and not state.workers.ready_count:
            state.await_workers(unknown, now)

    def held_turns(self, now: float) -> list[tuple[RoutingKey, HeldTurn]]:
        """Those that wait here and whose key is another's now. O(waiting)."""
        found: list[tuple[RoutingKey, HeldTurn]] = []
        for waiting in self._state.waiting:
            turn = waiting.turn
            if not self._is_mine(turn.route.key):
                waited_s = max(0.0, now - turn.since)
                held = HeldTurn(OwnerId(turn.owner.id), turn.route.request, waited_s)
                found.append((turn.route.key, held))
        return found

    def ring_moved(
        self, before: Ring, held: Iterable[tuple[RoutingKey, HeldTurn]], now: float
    ) -> None:
        """The state has the later ring, and what waited has been sent on. O(what this router knows)."""
        state = self._state
        parcels: dict[RouterId, _Parcel] = {
            name: _Parcel() for name in state.ring.members if name not in before.members
        }
        parcels.pop(state.config.id, None)
        self._pack_programs(parcels, now)
        self._pack_bindings(parcels)
        for key, turn in held:
            self._parcel(parcels, key).turns.append(turn)
        if (
            before.epoch
        ):  # a boot's first ring moves nothing: those who have the keys know as much as we do
            self._send(parcels)

    def follow_turns(self, now: float) -> None:
        """Programs whose last turn here is over go after their keys."""
        state = self._state
        parcels: dict[RouterId, _Parcel] = {}
        for session in state.over:
            program = state.programs.get(session)
            if program is not None and not program.turns:
                self._pack(program, parcels, now)
            if program is None or not program.turns:
                state.leaving.pop(session, None)
        state.over.clear()
        if parcels:
            self._send(parcels)

    def _pack_programs(self, parcels: dict[RouterId, _Parcel], now: float) -> None:
        state = self._state
        state.leaving.clear()
        for program in list(state.programs):
            if self._is_mine(program.key):
                continue
            if program.turns:
                state.leaving[program.session] = None
            else:
                self._pack(program, parcels, now)

    def _pack(self, program: Program, parcels: dict[RouterId, _Parcel], now: float) -> None:
        self._parcel(parcels, program.key).records.append(self._record(program, now))
        self._state.programs.release(program.session)

    def _pack_bindings(self, parcels: dict[RouterId, _Parcel]) -> None:
        state = self._state
        for binding in state.affinity.others(self._is_mine):
            session, parent = affinity_name(binding.key)
            slot = state.seats[binding.slot]
            record = SessionRecord(
                session, parent, binding.routing, 0, 0.0, worker=slot.worker, rank=slot.rank
            )
            self._parcel(parcels, binding.routing).records.append(record)
            state.affinity.unbind(binding.key)

    def _record(self, program: Program, now: float) -> SessionRecord:
        slot = None if program.slot is None else self._state.seats[program.slot]
        return SessionRecord(
            session=program.session,
            parent=program.parent,
            key=program.key,
            context_tokens=program.context_tokens,
            idle_s=max(0.0, now - program.acting_since),
            finish_class=program.gap,
            paused=program.is_paused,
            worker=slot.worker if slot else WorkerId(""),
            rank=slot.rank if slot else 0,
        )

    def _parcel(self, parcels: dict[RouterId, _Parcel], key: RoutingKey) -> _Parcel:
        return parcels.setdefault(self._state.ring.router_for(key), _Parcel())

    def _send(self, parcels: dict[RouterId, _Parcel]) -> None:
        state = self._state
        workers = [worker.id for worker in state.workers]
        for router, parcel in parcels.items():
            # A router is one address whatever its boot; see the shell.
            to = Peer(Role.ROUTER, router, 0)
            for records, turns in _chunks(parcel):
                state.counters["handovers_sent"] += 1
                state.effects.send(to, Handover(state.ring.epoch, records, turns, workers))

    def _take_handed(self, record: SessionRecord, now: float) -> None:
        worker = self._state.workers.by_id(record.worker)
        if worker is not None:
            if record.rank < len(worker.slots):
                self._take_in(record, worker.slots[record.rank], now)
        elif not record.worker:
            self._take_in(record, None, now)
        elif self._count < _MOST_EXPECTED:
            self._count += 1
            self._expected.setdefault(record.worker, []).append(record)

    def _take_in(self, record: SessionRecord, slot: int | None, now: float) -> None:
        state = self._state
        state.counters["sessions_remembered"] += 1
        if slot is not None:
            used_at = now - max(0.0, record.idle_s)
            key = affinity_key(record.session, record.parent)
            if used_at + state.policy.session_affinity.ttl_s > now:
                state.affinity.adopt(key, record.key, slot, used_at=used_at, now=now)
        if record.context_tokens > 0 and (slot is not None or record.paused):
            state.programs.remember(record, -1 if slot is None else slot, now)

    def _is_mine(self, key: RoutingKey) -> bool:
        """Before the first epoch everything is."""
        state = self._state
        return not state.ring.epoch or state.ring.router_for(key) == state.config.id


def _idlest_last(record: SessionRecord) -> float:
    return record.idle_s


def _chunks(parcel: _Parcel) -> Iterator[tuple[list[SessionRecord], list[HeldTurn]]]:
    """At least one, so that a new router hears of the workers."""
    for at in range(0, max(1, len(parcel.records), len(parcel.turns)), _MOST_A_MESSAGE):
        end = at + _MOST_A_MESSAGE
        yield parcel.records[at:end], parcel.turns[at:end]

"""The programs of one router: made by their first turn, moved by their turns, gone at the end.

Kept under every policy, so that a switch finds it. Every turn of a session goes through `begin`, perhaps `granted`,
and `end`; a turn that comes to nothing leaves its program exactly as it stood before. Who may hold a place on a slot is
an admission rule's business (`admission`): it calls `pause`, `resume` and `mark`, and is told what happens.

All O(log chain) a turn. Bounded in programs and in blocks of their chains: beyond that the program idle for longest is
forgotten, which costs it a cache hit and nothing else. created - ended = live, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from fermata.core.ids import RoutingKey, SessionId
from fermata.router.eviction_order import EvictionOrder, IdleChain
from fermata.router.expiry import Expiry
from fermata.router.gap import GapStatistics
from fermata.router.model import NO_HASHES
from fermata.router.occupancy import Occupancy, Room
from fermata.router.program import Gap, Program, ProgramTurn, Standing, TurnKey, extends
from fermata.router.tier_index import Hashes
from fermata.wire.messages import SessionRecord

How = Literal["finished", "cancelled"]
End = Literal["final", "cancelled", "expired", "evicted"]

_NO_SESSION = SessionId("")
_NO_KEY = RoutingKey("")
_MOST_PROGRAMS = 131_072
_MOST_BLOCKS = 1 << 25
"""256 MiB of hashes."""


@dataclass(frozen=True, slots=True)
class Released:
    """A program whose client is done with it had its KV there, up to the block `leaf`."""

    slot: int
    session: SessionId
    leaf: int


class Watcher(Protocol):
    """What an admission rule has to know of programs that it did not move itself."""

    def moved(self, program: Program) -> None:
        """Its phase or its place changed."""
        ...

    def program_ended(self, program: Program) -> None: ...

    def capacity_changed(self, slot: int) -> None: ...

    def chain_evicted(self, slot: int, session: SessionId) -> None:
        """The engine began to evict a chain that was idle there."""
        ...


class ProgramTable:
    def __init__(
        self,
        *,
        block_size: int,
        width_s: float,
        idle_timeout_s: float = 1800.0,
        most: int = _MOST_PROGRAMS,
        most_blocks: int = _MOST_BLOCKS,
    ) -> None:
        self.occupancy = Occupancy(block_size=block_size)
        self.idle: Expiry[SessionId] = Expiry(width_s=width_s)
        """When those between turns are forgotten."""
        self.gaps = GapStatistics()
        self.evictions = EvictionOrder()
        self.watcher: Watcher | None = None
        self.created = 0
        self.ended: Counter[End] = Counter()
        self.counters: Counter[str] = Counter()
        self.paused = 0
        self.blocks = 0
        """In the chains of all programs."""
        self._released: list[Released] = []
        self._idle_timeout_s = idle_timeout_s
        self._most = most
        self._most_blocks = most_blocks
        self._programs: dict[SessionId, Program] = {}
        self._turns: dict[TurnKey, ProgramTurn] = {}
        self._on_slot: dict[int, dict[Program, None]] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def get(self, session: SessionId) -> Program | None:
        return self._programs.get(session)

    def turn(self, key: TurnKey) -> ProgramTurn | None:
        """None for a turn of no session, and for one that is over."""
        return self._turns.get(key)

    def on_slot(self, slot: int) -> Iterator[Program]:
        return iter(self._on_slot.get(slot, ()))

    # What turns do.

    def begin(
        self,
        key: TurnKey,
        *,
        session: SessionId,
        chain: Hashes,
        tokens: int,
        now: float,
        parent: SessionId = _NO_SESSION,
        routing_key: RoutingKey = _NO_KEY,
        model: str = "",
        inferred: bool = False,
        final: bool = False,
        priority: int = 0,
    ) -> ProgramTurn | None:
        """A turn of a session arrived. None without a session: such a turn is no program's."""
        if not session:
            return None
        assert key not in self._turns, key
        program = self._programs.get(session)
        is_known = program is not None
        if program is None:
            program = self._create(Program(session, parent, routing_key, inferred, now))
        turn = self._turns[key] = ProgramTurn(key, program, chain, tokens)
        program.is_final |= final
        program.drops_kv |= final
        if program.turns:
            turn.is_beside = not any(extends(chain, t.chain) for t in program.turns.values())
            self.counters["turns_beside"] += turn.is_beside
        elif is_known:
            self._leave_gap(program)
        program.is_hearsay = False
        if not turn.is_beside:
            program.turns[key] = turn
            program.priority, program.model = priority, model
            self._regroup(program)
            self._tell(program)
        return turn

    def granted(self, key: TurnKey, slot: int) -> None:
        """It goes to the slot, and its program's charge with it."""
        turn = self._turns.get(key)
        if turn is None:
            return
        turn.is_running = True
        turn.slot = slot
        if turn.is_beside:
            return
        room, standing = self.occupancy[slot], turn.program.standing
        if standing is not None and standing.room is room:
            turn.expected_tokens = min(standing.context_tokens, turn.tokens)
        self._take_place(turn.program, room, turn.chain, turn.tokens)

    def progress(self, key: TurnKey, output_tokens: int) -> None:
        """`output_tokens` in total; the caller sees to it that they grow."""
        turn = self._turns.get(key)
        if turn is None or turn.is_beside or turn.program.chain is not turn.chain:
            return
        program = turn.program
        program.context_tokens = max(program.context_tokens, turn.tokens + output_tokens)
        if program.charge is not None:
            self.occupancy.grow(program.charge, program.context_tokens)

    def end(
        self, key: TurnKey, how: How, now: float, *, context_tokens: int = 0, gap: Gap = "tool"
    ) -> ProgramTurn | None:
        """However it ended, at whatever stage. `context_tokens` and `gap` are of one that finished.

        None for what is no program's turn, or not any more.
        """
        turn = self._turns.pop(key, None)
        if turn is None:
            return None
        program = turn.program
        if not turn.is_beside:
            del program.turns[key]
            if how == "finished":
                self._finished(turn, max(context_tokens, turn.tokens), gap, now)
        if program.is_live and not program.turns:
            if not turn.is_beside:
                self._settle(program, now)
            elif program.is_final:
                self._remove(program, "final")
        elif program.is_live:
            self._tell(program)
        return turn

    def release(self, session: SessionId, *, drops_kv: bool = False) -> bool:
        """It goes at once, or with its last turn. `drops_kv`: nobody will come back for it. False: it was not known."""
        program = self._programs.get(session)
        if program is None:
            return False
        program.is_final = True
        program.drops_kv |= drops_kv
        if not program.turns:
            self._remove(program, "final")
        return True

    def take_released(self) -> list[Released]:
        """Whose KV nobody will come back for, since the last call."""
        released, self._released = self._released, []
        return released

    # What time and workers do.

    def expire(self, now: float) -> None:
        for session in self.idle.due(now):
            self._remove(self._programs[session], "expired")

    def set_idle_timeout(self, seconds: float) -> None:
        """O(programs), when it changes."""
        if seconds == self._idle_timeout_s:
            return
        self._idle_timeout_s = seconds
        for program in self._programs.values():
            if not program.turns:
                self._set_idle(program)

    def open_slot(self, slot: int, capacity: int | None = None, *, model: str = "") -> None:
        """Capacity in tokens; None while it is not known."""
        self.occupancy.open(slot, capacity, model=model)
        self._on_slot[slot] = {}
        if self.watcher is not None:
            self.watcher.capacity_changed(slot)

    def resize_slot(self, slot: int, capacity: int | None, *, model: str = "") -> None:
        if self.occupancy.resize(slot, capacity, model=model) and self.watcher is not None:
            self.watcher.capacity_changed(slot)

    def close_slot(self, slot: int) -> None:
        """With it went what its programs had there. O(programs of the slot)."""
        if slot not in self.occupancy:
            return
        for program in list(self._on_slot[slot]):
            self.counters["displaced"] += 1
            self._lose_place(program)
            self._tell(program)
        self.evictions.drop(slot)
        del self._on_slot[slot]
        self.occupancy.close(slot)
        if self.watcher is not None:
            self.watcher.capacity_changed(slot)

    def removed(self, slot: int, hashes: Hashes) -> None:
        """Blocks the slot's engine evicted."""
        for session in self.evictions.removed(slot, hashes):
            self.counters["chains_evicted"] += 1
            if self.watcher is not None:
                self.watcher.chain_evicted(slot, session)

    def remember(self, record: SessionRecord, slot: int, now: float) -> None:
        """What a worker, or the router that had it, tells of a program. Its chain is not known before its next turn.

        Of several that tell of one the latest use is believed, and a turn of its own over all of them.
        """
        since = now - max(0.0, record.idle_s)
        program = self._programs.get(record.session)
        if not record.session or since + self._idle_timeout_s <= now:
            return
        if program is None:
            program = self._create(Program(record.session, record.parent, record.key, False, now))
            program.steps, program.is_hearsay = 1, True
            self.counters["remembered"] += 1
        elif not program.is_hearsay or since <= program.acting_since:
            return
        self._uncharge(program)
        program.acting_since, program.gap = since, record.finish_class
        program.context_tokens = max(0, record.context_tokens)
        if record.paused:
            self._set_paused(program, paused=True)
        else:
            program.model = self.occupancy[slot].model
            self._charge(program, self.occupancy[slot])
        self._set_idle(program)
        self._tell(program)

    # What an admission rule does.

    def pause(self, program: Program) -> None:
        assert program.charge is not None
        self.counters["pauses"] += 1
        self._lose_place(program)
        self._tell(program)

    def resume(self, program: Program, slot: int) -> None:
        """Give it a place: a paused one its own again, a new one its first."""
        assert program.charge is None
        self.counters["resumes" if program.is_paused else "admissions"] += 1
        self._take_place(program, self.occupancy[slot], program.need_chain, program.need_tokens)

    def mark(self, program: Program, *, marked: bool) -> None:
        assert program.charge is not None
        if marked and not program.is_marked:
            self.counters["marks"] += 1
        program.is_marked = marked
        self.occupancy.mark(program.charge, stays=not marked)

    def _create(self, program: Program) -> Program:
        while len(self._programs) >= self._most or self.blocks >= self._most_blocks:
            idlest = self.idle.first()
            if idlest is None:  # the rest have turns, which are bounded elsewhere
                break
            self._remove(self._programs[idlest], "evicted")
        self.created += 1
        self._programs[program.session] = program
        return program

    def _remove(self, program: Program, why: End) -> None:
        assert not program.turns
        if program.drops_kv and program.charge is not None and len(program.chain):
            self._released.append(
                Released(program.charge.room.slot, program.session, program.chain[-1])
            )
        self._uncharge(program)
        self._set_paused(program, paused=False)
        self._set_chain(program, NO_HASHES)
        del self._programs[program.session]
        self.idle.cancel(program.session)
        program.is_live = False
        self.ended[why] += 1
        if self.watcher is not None:
            self.watcher.program_ended(program)

    def _leave_gap(self, program: Program) -> None:
        self.idle.cancel(program.session)
        room = None if program.charge is None else program.charge.room
        program.standing = Standing(
            room, program.chain, program.context_tokens, program.acting_since, program.gap
        )
        program.has_finished = False
        if room is not None:
            self.evictions.busy(room.slot, program.session)

    def _finished(self, turn: ProgramTurn, context_tokens: int, gap: Gap, now: float) -> None:
        program = turn.program
        if not program.has_finished and program.standing is not None:
            self.gaps[program.standing.gap].add(now - program.standing.acting_since)
        program.has_finished = True
        program.gap = gap
        program.context_tokens = context_tokens
        if program.chain is turn.chain and program.charge is not None:
            self.occupancy.grow(program.charge, context_tokens)
        else:
            room = None if program.charge is None else program.charge.room
            self._set_chain(program, turn.chain)
            if room is not None:
                self._charge(program, room)

    def _settle(self, program: Program, now: float) -> None:
        """Its last turn is over."""
        if program.is_final:
            self._remove(program, "final")
            return
        if program.has_finished:
            program.steps += 1
            program.acting_since = now
            self._became_evictable(program, now)
        elif program.standing is None:
            self._remove(program, "cancelled")
            return
        else:
            self._restore(program, program.standing)
        program.standing = None
        program.has_finished = False
        self._regroup(program)
        self._set_idle(program)
        self._tell(program)

    def _restore(self, program: Program, standing: Standing) -> None:
        self.counters["rollbacks"] += 1
        room = standing.room if standing.room is not None and standing.room.is_open else None
        as_it_was = (
            program.charge is not None
            and program.charge.room is room
            and program.chain is standing.chain
        )
        self._set_chain(program, standing.chain)
        program.context_tokens = standing.context_tokens
        if room is None:
            self._uncharge(program)
            self._set_paused(program, paused=True)
        elif as_it_was and program.charge is not None:
            self.occupancy.grow(program.charge, program.context_tokens)
        else:
            self._charge(program, room)

    def _became_evictable(self, program: Program, now: float) -> None:
        slot, chain = program.slot, program.chain
        if slot is not None and len(chain):
            self.evictions.idle(
                slot, IdleChain(program.session, chain[-1], program.context_tokens, now)
            )

    def _take_place(self, program: Program, room: Room, chain: Hashes, tokens: int) -> None:
        if program.charge is not None and program.charge.room is not room:
            program.is_marked = False
        self._set_chain(program, chain)
        program.context_tokens = tokens
        self._charge(program, room)
        self._tell(program)

    def _lose_place(self, program: Program) -> None:
        """A place is lost by pausing, and by the loss of the slot; either way the next turn has to be resumed."""
        self._uncharge(program)
        self._set_paused(program, paused=True)

    def _charge(self, program: Program, room: Room) -> None:
        before = program.charge
        charge = program.charge = self.occupancy.charge(
            room,
            program.chain,
            tokens=program.context_tokens,
            group=program.group,
            stays=not program.is_marked,
            after=before,
        )
        if before is None:
            self._set_paused(program, paused=False)
        else:
            self.occupancy.release(before)
            if before.room is charge.room:
                return
            del self._on_slot[before.room.slot][program]
        self._on_slot[room.slot][program] = None

    def _uncharge(self, program: Program) -> None:
        program.is_marked = False
        charge, program.charge = program.charge, None
        if charge is not None:
            self.occupancy.release(charge)
            del self._on_slot[charge.room.slot][program]
            self.evictions.busy(charge.room.slot, program.session)

    def _regroup(self, program: Program) -> None:
        if program.charge is not None and program.charge.group != program.group:
            self.occupancy.regroup(program.charge, program.group)

    def _set_chain(self, program: Program, chain: Hashes) -> None:
        self.blocks += len(chain) - len(program.chain)
        program.chain = chain

    def _set_paused(self, program: Program, *, paused: bool) -> None:
        self.paused += paused - program.is_paused
        program.is_paused = paused

    def _set_idle(self, program: Program) -> None:
        self.idle.set(program.session, program.acting_since + self._idle_timeout_s)

    def _tell(self, program: Program) -> None:
        if self.watcher is not None:
            self.watcher.moved(program)

    def check_integrity(self) -> None:
        """O(blocks of all programs)."""
        programs = self._programs
        assert self.created - self.ended.total() == len(programs)
        assert self.paused == sum(program.is_paused for program in programs.values())
        assert self.blocks == sum(len(program.chain) for program in programs.values())
        assert len(self.idle) == sum(not program.turns for program in programs.values())
        charges = [p.charge for p in programs.values() if p.charge is not None]
        self.occupancy.check_integrity(charges)
        placed = [program for those in self._on_slot.values() for program in those]
        assert len(placed) == len(charges)
        counting = [turn for program in programs.values() for turn in program.turns.values()]
        assert counting == [self._turns[turn.key] for turn in counting]
        assert len(counting) == sum(not turn.is_beside for turn in self._turns.values())
        for program in programs.values():
            self._check(program)
        self.evictions.check_integrity()

    def _check(self, program: Program) -> None:
        assert program.is_live
        assert self._programs[program.session] is program
        assert (program.session in self.idle) == (not program.turns)
        assert not (program.is_paused and program.charge), "a paused program holds no slot"
        assert program.is_paused or program.charge or program.turns, "it stands somewhere"
        assert program.turns or not program.is_final, "final removes"
        if program.charge is not None:
            charge = program.charge
            assert program in self._on_slot[charge.room.slot]
            assert charge.group == program.group
            assert charge.stays == (not program.is_marked)
            assert charge.tokens == program.context_tokens
        else:
            assert not program.is_marked

"""Programs hold their KV between turns while it fits; beyond a watermark some are paused until there is room again.

A slot above the pause threshold pauses Acting programs, in the policy's order, down to the pause target; if that is not
enough, Reasoning ones are marked to be paused when their turn ends, only as many as the target needs. Nothing that runs
is interrupted. There is room for a paused program below a ceiling some way under the threshold (hysteresis): first for
those with a turn waiting, then for new ones, then for those between turns; of each the smallest that fit together,
placed largest first where there is most room, with what is still cached counted as room. Resuming comes before pausing,
so nothing bounces within a round.

Below the threshold it answers every turn with all eligible slots, so that placement is what it would be without it.
Where a worker tells no capacity, a window of programs (`aimd`) takes the place of tokens.

Cost: `turn_ready` O(slots changed) while nothing is held; a round O(slots changed + programs moved x log), and O(slots)
while something is held. Never O(programs).
"""

from __future__ import annotations

from fermata.core.ids import SessionId
from fermata.core.spec import ThunderAgentSpec
from fermata.router.admission.aimd import Aimd
from fermata.router.admission.budget import Budget, TokenBudget
from fermata.router.admission.seam import Facts, HoldReason
from fermata.router.chain_links import bits
from fermata.router.lazy_heap import LazyHeap
from fermata.router.pause_order import PauseQueue, pause_order
from fermata.router.program import Program, ProgramTurn

_RETURNING, _NEW, _BETWEEN = range(3)
_CLASSES = 3
_MOST_A_ROUND = 256
"""Programs of a class resumed at once; the rest goes with the next round."""

Heap = LazyHeap[int, Program]


class Watermark:
    def __init__(
        self, spec: ThunderAgentSpec, facts: Facts, *, counts_programs: bool = False
    ) -> None:
        """Takes the table as it is, paused programs included. O(programs), once."""
        self.is_due = True
        self._spec = spec
        self._facts = facts
        self._table = facts.table
        self._occupancy = facts.table.occupancy
        self._order = pause_order(spec.pause_order)
        self._tokens = TokenBudget(self._occupancy, spec)
        self._aimd = Aimd(self._occupancy, spec.aimd)
        self._counts_programs = counts_programs
        self._held: dict[Program, None] = {}
        """Told to wait, and not let go yet."""
        self._heaps: dict[str, list[Heap]] = {}
        """Model -> those without a place that a round may give one, by class, smallest first."""
        self._filed: dict[Program, Heap] = {}
        self._queues: dict[int, PauseQueue] = {}
        self._queued: dict[Program, PauseQueue] = {}
        self._rooms: dict[int, float] = {}
        """Slot -> tokens below the pause threshold, as of the last refresh."""
        self._tightest = 0.0
        self._over: set[int] = set()
        self._last_round = float("-inf")
        for program in self._table:
            self._file(program)
        self._refresh_all()

    # What happens to programs.

    def moved(self, program: Program) -> None:
        if not program.is_reasoning:
            self.is_due = True
            if program.is_marked and program.slot is not None:
                if not self._budget(program.slot).has_relief(program.slot):
                    self._table.pause(program)  # and files it
                    return
                self._table.mark(program, marked=False)
        self._file(program)

    def program_ended(self, program: Program) -> None:
        self.is_due = True
        self._unfile(program)
        self._held.pop(program, None)

    def capacity_changed(self, slot: int) -> None:
        self.is_due = True
        if slot not in self._occupancy:
            self._queues.pop(slot, None)
            self._aimd.forget(slot)

    def chain_evicted(self, slot: int, session: SessionId) -> None:
        """The engine's own doing: what is charged is what it should hold."""

    def completed(self, turn: ProgramTurn, cached_tokens: int) -> None:
        if turn.expected_tokens and turn.slot in self._occupancy:
            self._aimd.completed(turn.slot, found=cached_tokens, expected=turn.expected_tokens)

    # What turns may do.

    def turn_ready(self, turn: ProgramTurn, eligible: int, *, is_again: bool) -> int | HoldReason:
        program = turn.program
        if turn.is_beside:
            return eligible
        if self._occupancy.has_changed:
            self._refresh()
        if program.charge is not None:
            return self._keep_place(turn, program.charge.room.slot, eligible)
        if is_again:
            return self._with_room(turn, eligible, is_resume=True) or eligible
        if program not in self._held:
            free = 0 if self._must_queue(program) else self._free_for(turn, eligible)
            if free:
                return free
            self._held[program] = None
            self._file(program)
        return "pressure" if program.is_paused else "admission"

    def force(self, turn: ProgramTurn, eligible: int) -> int:
        if turn.is_beside:
            return eligible
        program = turn.program
        if program.charge is not None and eligible >> program.charge.room.slot & 1:
            return 1 << program.charge.room.slot
        self._refresh()
        self._table.counters["forced"] += 1
        self._held.pop(program, None)
        self._file(program)
        slots = [bit.bit_length() - 1 for bit in bits(eligible)]
        return 1 << max(slots, key=lambda slot: (self._rooms.get(slot, 0.0), -slot))

    def _keep_place(self, turn: ProgramTurn, slot: int, eligible: int) -> int:
        """Its charge stands. Under pressure it stays where its KV is; else that is only where it would like to be."""
        own = 1 << slot
        if not eligible & own:
            return self._with_room(turn, eligible, is_resume=False) or eligible
        if self._held or self._over:
            return own
        return own | self._with_room(turn, eligible, is_resume=False)

    def _must_queue(self, program: Program) -> bool:
        """Behind those that wait already: nobody jumps the queue by being new, or small."""
        heaps = self._heaps.get(program.model)
        if heaps is None:
            return False
        if program.is_paused:
            return len(heaps[_RETURNING]) > 0
        behind_paused = self._spec.new_programs == "BehindPaused"
        return len(heaps[_NEW]) > 0 or (behind_paused and len(heaps[_RETURNING]) > 0)

    def _free_for(self, turn: ProgramTurn, eligible: int) -> int:
        return self._with_room(turn, eligible, is_resume=turn.program.is_paused)

    def _with_room(self, turn: ProgramTurn, eligible: int, *, is_resume: bool) -> int:
        """The eligible slots that can take the turn's prompt besides what they hold."""
        need = turn.tokens + self._spec.buffer_tokens
        if need <= self._tightest and not is_resume:
            return eligible
        slots = [bit.bit_length() - 1 for bit in bits(eligible)]
        rooms = {slot: self._room(slot, is_resume=is_resume) for slot in slots}
        found = sum([1 << slot for slot, room in rooms.items() if room >= need])
        if found != eligible:
            for slot, shared in self._occupancy.shared(turn.chain).items():
                if rooms.get(slot, float("-inf")) >= need - shared:
                    found |= 1 << slot
        return found

    def _room(self, slot: int, *, is_resume: bool) -> float:
        if not is_resume:
            return self._rooms[slot]
        return self._budget(slot).room(slot, is_resume=True)

    # What a round does.

    def round(self, now: float) -> list[Program]:
        self._last_round = now
        for slot in self._aimd.adapt():
            self._refresh_one(slot)
        self._refresh()
        admitted: list[Program] = []
        for model, heaps in self._heaps.items():
            if any(len(heap) for heap in heaps):
                admitted += self._resume(heaps, self._facts.slots_of(model))
        self._refresh()
        for slot in list(self._over):
            self._relieve(slot, now)
        self._refresh()
        self.is_due = False
        return admitted

    def next_round(self) -> float | None:
        waits = any(len(heap) for heaps in self._heaps.values() for heap in heaps[:_BETWEEN])
        if self.is_due or waits or self._over or self._occupancy.has_changed:
            return self._last_round + self._spec.tick_s
        return None

    def _resume(self, heaps: list[Heap], slots: int) -> list[Program]:
        rooms = {
            slot: self._budget(slot).room(slot, is_resume=True)
            for slot in (bit.bit_length() - 1 for bit in bits(slots))
        }
        placed: list[Program] = []
        for order, heap in enumerate(heaps):
            placed += self._resume_class(heap, rooms)
            is_behind = order == _NEW or self._spec.new_programs == "BehindPaused"
            if len(heap) and is_behind:
                break
        return placed

    def _resume_class(self, heap: Heap, rooms: dict[int, float]) -> list[Program]:
        taken = self._smallest_that_fit(heap, rooms)
        placed: list[Program] = []
        for program in sorted(taken, key=lambda each: -each.need_tokens):
            slot = self._roomiest(program, rooms)
            if slot is None:
                self._file(program)
                continue
            self._held.pop(program, None)
            self._table.resume(program, slot)
            rooms[slot] = self._budget(slot).room(slot, is_resume=True)
            placed.append(program)
        return placed

    def _smallest_that_fit(self, heap: Heap, rooms: dict[int, float]) -> list[Program]:
        """Together, as far as the sum of all room tells; taken off the heap."""
        left = sum(room for room in rooms.values() if room > 0)
        places = sum(max(0.0, self._budget(slot).places(slot)) for slot in rooms)
        taken: list[Program] = []
        while left > 0 and len(taken) + 1 <= min(places, _MOST_A_ROUND):
            program = heap.least()
            if program is None:
                break
            need = self._need(program)
            if need > left:
                shared = self._occupancy.shared(program.need_chain)
                need -= max((shared.get(slot, 0) for slot in rooms), default=0)
            if need > left:
                break
            left -= need
            self._unfile(program)
            taken.append(program)
        return taken

    def _roomiest(self, program: Program, rooms: dict[int, float]) -> int | None:
        need = self._need(program)
        fitting = {slot: room for slot, room in rooms.items() if room >= need}
        if not fitting:
            shared = self._occupancy.shared(program.need_chain)
            fitting = {s: room for s, room in rooms.items() if room >= need - shared.get(s, 0) > 0}
        if not fitting:
            return None
        cached = self._facts.cached(program.need_chain)
        return max(fitting, key=lambda slot: (fitting[slot] + cached.get(slot, 0), -slot))

    def _need(self, program: Program) -> int:
        return program.need_tokens + self._spec.buffer_tokens

    def _relieve(self, slot: int, now: float) -> None:
        budget, queue = self._budget(slot), self._queues.get(slot)
        while queue is not None and not budget.is_safe(slot):
            program = queue.first(now)
            if program is None:
                break
            self._table.pause(program)
        if not budget.is_safe(slot):
            self._mark(slot, budget, now)

    def _mark(self, slot: int, budget: Budget, now: float) -> None:
        """O(turns that run there). One program stays: its leaving would only bring it back."""
        running = [program for program in self._table.on_slot(slot) if not program.is_marked]
        running.sort(key=lambda program: self._order.key(program, 1.0, now))
        for program in running[:-1]:
            if budget.is_safe(slot):
                return
            self._table.mark(program, marked=True)

    # Books.

    def _budget(self, slot: int) -> Budget:
        if self._counts_programs or self._occupancy[slot].capacity is None:
            return self._aimd.budget
        return self._tokens

    def _refresh(self) -> None:
        """O(slots changed)."""
        changed = self._occupancy.take_changed()
        for slot in changed:
            self._refresh_one(slot)
        if changed:
            self._tightest = min(self._rooms.values(), default=0.0)

    def _refresh_one(self, slot: int) -> None:
        self._over.discard(slot)
        if slot not in self._occupancy:
            self._rooms.pop(slot, None)
            return
        budget = self._budget(slot)
        self._rooms[slot] = budget.room(slot, is_resume=False)
        if budget.is_over(slot):
            self._over.add(slot)

    def _refresh_all(self) -> None:
        self._occupancy.take_changed()
        for slot in self._occupancy.rooms:
            self._refresh_one(slot)
        self._tightest = min(self._rooms.values(), default=0.0)

    def _file(self, program: Program) -> None:
        """Where it belongs as it stands now."""
        self._unfile(program)
        if program.charge is not None:
            self._held.pop(program, None)
            if not program.is_reasoning:
                self._queue(program.charge.room.slot).put(program)
                self._queued[program] = self._queues[program.charge.room.slot]
            return
        if program in self._held and not program.has_waiting_turn:
            del self._held[program]
        order = self._class_of(program)
        if order is not None:
            heap = self._heaps.setdefault(
                program.model, [LazyHeap[int, Program]() for _ in range(_CLASSES)]
            )[order]
            heap.push(program.need_tokens, program)
            self._filed[program] = heap

    def _class_of(self, program: Program) -> int | None:
        if program in self._held:
            return _RETURNING if program.is_paused else _NEW
        return _BETWEEN if program.is_paused and not program.is_reasoning else None

    def _unfile(self, program: Program) -> None:
        heap = self._filed.pop(program, None)
        if heap is not None:
            heap.remove(program)
        queue = self._queued.pop(program, None)
        if queue is not None:
            queue.discard(program)

    def _queue(self, slot: int) -> PauseQueue:
        queue = self._queues.get(slot)
        if queue is None:
            queue = self._queues[slot] = PauseQueue(self._order, self._weight)
        return queue

    def _weight(self, program: Program) -> float:
        human = program.gap == "human"
        return self._spec.human_gap_weight if human else self._spec.tool_gap_weight

    def check_integrity(self) -> None:
        """O(programs)."""
        for program in self._table:
            idle = program.charge is not None and not program.is_reasoning
            assert (program in self._queued) == idle
            order = None if program.charge is not None else self._class_of(program)
            assert (program in self._filed) == (order is not None)
            if order is not None:
                assert self._filed[program] is self._heaps[program.model][order]
        for program in self._held:
            assert program.is_live
            assert program.charge is None
            assert program.has_waiting_turn
        assert sum(len(h) for heaps in self._heaps.values() for h in heaps) == len(self._filed)
        assert sum(len(queue) for queue in self._queues.values()) == len(self._queued)

"""From a Route to a Grant: which slots are eligible, what a policy makes of them, and who has to wait for what."""

from __future__ import annotations

from typing import Literal

from fermata.router.eligibility import Eligibility, Eligible, Wait
from fermata.router.granting import Choice, Granting
from fermata.router.holding import Holding
from fermata.router.leasing import Leasing
from fermata.router.model import NO_HASHES, Turn
from fermata.router.owner import Owner
from fermata.router.policy_class import PolicyClass
from fermata.router.queue import Line, Next, Place
from fermata.router.state import RouterState
from fermata.router.waiting import Reason, WaitingTurn
from fermata.wire.messages import Hints, Moved, ProgramEnded, Reject, Route
from fermata.wire.messages import Ring as WireRing

RejectCode = Literal[
    "overloaded", "no_worker", "invalid_request", "context_length_exceeded", "not_found"
]

_RETRY_AFTER_S = 5.0
_MOST_WAITED_S = 31_536_000.0
"""Whatever an owner says."""


def jump_s(hints: Hints) -> float:
    """Seconds it is taken to have come earlier. The one hint is the other's older name: the larger counts."""
    return max(0.0, float(hints.priority), hints.latency_sensitivity)


class Placement:
    def __init__(self, state: RouterState, leasing: Leasing) -> None:
        self._state = state
        self._leasing = leasing
        self._eligibility = Eligibility(state)
        self._granting = Granting(state)
        self._holding = Holding(state)

    def route(self, owner: Owner, route: Route, frame: memoryview, now: float) -> None:
        state = self._state
        if self._is_answered(owner, route, now):
            return
        model = state.config.models.get(route.model)
        hashes = frame.cast("Q") if len(frame) else NO_HASHES
        turn = Turn(owner.peer, route, model or "", hashes, self._since(owner, route, now))
        if self._belongs_elsewhere(route):
            self._moved(turn, now)
            return
        if route.final and route.input_tokens < 1:
            known = state.programs.release(route.session, drops_kv=True)
            state.effects.send(owner.peer, ProgramEnded(route.request, route.attempt, known))
            return
        state.counters["routes"] += 1
        if model is None:
            self._reject(turn, "not_found", f"no model {route.model!r} here", now)
        elif route.input_tokens < 1:
            self._reject(turn, "invalid_request", "no input", now)
        elif len(hashes) * state.config.block_size > route.input_tokens:
            self._reject(turn, "invalid_request", "more block hashes than input", now)
        else:
            self._begin(turn, now)
            self._place_or_wait(turn, now)

    def _begin(self, turn: Turn, now: float) -> None:
        """Its session's program is Reasoning from now on."""
        route = turn.route
        self._state.programs.begin(
            (turn.owner.id, route.request),
            session=route.session,
            chain=turn.hashes,
            tokens=route.input_tokens,
            now=now,
            parent=route.parent,
            routing_key=route.key,
            model=turn.model,
            inferred=route.inferred,
            final=route.final,
            priority=route.hints.priority,
        )

    def _gone(self, turn: Turn, now: float) -> None:
        """It will not be granted: its program stands as it stood before."""
        self._state.programs.end((turn.owner.id, turn.route.request), "cancelled", now)

    def _since(self, owner: Owner, route: Route, now: float) -> float:
        """When it began to wait, by what its owner and the router that held it say."""
        since = now - min(max(0.0, route.waited_s), _MOST_WAITED_S)
        handed = self._state.handed.get((owner.peer.id, route.request))
        return since if handed is None else min(since, handed)

    def wire_ring(self) -> WireRing:
        ring = self._state.ring
        return WireRing(ring.epoch, [(str(name), at) for name, at in ring.members.items()])

    def _belongs_elsewhere(self, route: Route) -> bool:
        """An owner with a later epoch than ours knows better than we do."""
        ring = self._state.ring
        return (
            route.epoch <= ring.epoch
            and len(ring.members) > 0
            and ring.router_for(route.key) != self._state.config.id
        )

    def _is_answered(self, owner: Owner, route: Route, now: float) -> bool:
        """Asked again, a router says again what it said. A later attempt takes the place of an earlier one."""
        state = self._state
        name = owner.peer.id
        done = state.done.get((name, route.request))
        if done is not None and route.attempt <= done:
            return True
        lease = state.leases.of_request(name, route.request)
        if lease is not None:
            if route.attempt < lease.attempt:
                return True
            if route.attempt == lease.attempt and lease.grant is not None:
                state.counters["repeated_routes"] += 1
                state.effects.send(owner.peer, lease.grant)
                return True
            self._leasing.revoke([lease], "unknown", now, how="superseded", owners=False)
        waiting = state.waiting.get(name, route.request)
        if waiting is not None:
            if route.attempt < waiting.turn.route.attempt:
                return True
            if route.attempt == waiting.turn.route.attempt:
                state.counters["repeated_routes"] += 1
                self._holding.tell(waiting, now)
                return True
            state.waiting.remove(waiting)
            self._gone(waiting.turn, now)
        return False

    def _place_or_wait(self, turn: Turn, now: float) -> None:
        policy_class = self._state.waiting.classes.of(
            turn.route.policy_class, lambda: self._granting.uncached_tokens(turn)
        )
        decision = self._decide(turn, policy_class)
        match decision:
            case Choice():
                wait = self._behind(decision)
                if wait is None:
                    self._granting.grant(turn, decision, now)
                else:
                    self._wait(turn, policy_class, wait, now)
            case Wait():
                self._wait_unless_refused(turn, policy_class, decision, now)
            case str():
                self._reject(turn, "context_length_exceeded", decision, now)

    def _decide(
        self, turn: Turn, policy_class: PolicyClass, *, paced: bool = False, forced: bool = False
    ) -> Choice | Wait | str:
        """A text says why no worker here can ever take it. `forced` ignores load."""
        eligible = self._eligibility.of(turn, forced=forced)
        if not isinstance(eligible, Eligible):
            return eligible
        slots = eligible.slots
        free = slots if forced else self._room(slots, policy_class, paced=paced)
        if not free:
            return Wait("policy" if paced else "queue", slots)
        bound = eligible.bound
        preferred = bound if bound is not None and free >> bound & 1 else None
        return Choice(free, preferred, slots)

    def _room(self, slots: int, policy_class: PolicyClass, *, paced: bool) -> int:
        level = policy_class.pace_level if paced else policy_class.level
        return self._state.loads.room(slots, level, policy_class.busy_share)

    def _behind(self, choice: Choice) -> Wait | None:
        """There is room, but others were there before: then it waits with them, as they do."""
        state = self._state
        queue = state.waiting.queue
        if queue.has_paced(choice.free):
            return Wait("policy", choice.slots)
        if queue.has_line(lambda line: self._may_go(line, choice.free)):
            state.must_judge = True
            return Wait("queue", choice.slots)
        return None

    def _may_go(self, line: Line, slots: int = -1) -> bool:
        """Does one of the slots have room for the turns of a line?"""
        return bool(self._room(line.slots, line.policy_class, paced=line.is_paced) & slots)

    def _wait_unless_refused(
        self, turn: Turn, policy_class: PolicyClass, wait: Wait, now: float
    ) -> None:
        """Refused is only who would wait for room, where no slot has any and the class's queue is full."""
        state = self._state
        use, level = state.waiting.queue.use(policy_class), policy_class.level
        why = ""
        if wait.slots:
            why = state.overload.refusal(
                turn.route, policy_class, use, workers=state.workers.ready_count
            )
        if why and (free := state.loads.room(wait.slots, level, 1.0)):
            # A share of the slots above the threshold was enough to wait; it is not enough to refuse.
            self._granting.grant(turn, Choice(free, None, wait.slots), now)
        elif not why or state.loads.room(self._eligibility.able(turn), level, 1.0):
            self._wait(turn, policy_class, wait, now)
        else:
            state.counters["overloaded"] += 1
            most = state.policy.overload.retry_after_max_s
            retry_after_s = state.overload.retry_after_s(policy_class, use, now, most=most)
            self._reject(turn, "overloaded", why, now, retry_after_s=retry_after_s)

    def _wait(self, turn: Turn, policy_class: PolicyClass, wait: Wait, now: float) -> None:
        state = self._state
        state.counters["holds"] += 1
        route = turn.route
        # Nobody overtakes those whom a switch freed by coming later.
        is_paced = state.waiting.queue.has_paced(wait.slots)
        reason: Reason = "policy" if is_paced and wait.slots else wait.reason
        place = Place(
            key=(turn.owner.id, route.request),
            policy_class=policy_class,
            since=turn.since,
            strict=route.hints.strict_priority,
            jump_s=jump_s(route.hints),
            input_tokens=route.input_tokens,
            uncached_tokens=self._granting.uncached_tokens(turn),
            slots=wait.slots,
            is_paced=is_paced,
        )
        waiting = WaitingTurn(turn, place, reason, self._holding.deadline(turn, reason))
        state.waiting.add(waiting)
        self._holding.begin(waiting, now)

    def judge(self, now: float) -> None:
        """Let go whom there is room for, in the queue's order: a turn at a time, so that each sees the load of those
        before it. O(turns freed), or O(waiting) when what decides has changed."""
        state = self._state
        changed = self._judge_anew(now) if state.must_judge_all else []
        state.must_judge = state.must_judge_all = False
        queue = state.waiting.queue
        while (chosen := queue.next(now, self._may_go)) is not None:
            self._let_go(chosen, now)
        for waiting, reason in changed:
            if state.waiting.get(*waiting.key) is waiting:
                self._holding.hold_anew(waiting, reason, now)

    def _judge_anew(self, now: float) -> list[tuple[WaitingTurn, Reason]]:
        """Who waits for what, now. Returned are those whose reason is another."""
        state = self._state
        changed: list[tuple[WaitingTurn, Reason]] = []
        for waiting in list(state.waiting):
            eligible = self._eligibility.of(waiting.turn)
            if isinstance(eligible, str):
                state.waiting.remove(waiting)
                self._reject(waiting.turn, "context_length_exceeded", eligible, now)
                continue
            reason: Reason = "policy" if waiting.place.is_paced else "queue"
            if isinstance(eligible, Wait):
                reason = eligible.reason
            state.waiting.queue.move(waiting.place, eligible.slots)
            if reason != waiting.reason:
                changed.append((waiting, reason))
        return changed

    def _let_go(self, chosen: Next, now: float) -> None:
        state = self._state
        place = chosen.place
        waiting = state.waiting.of_key(place.key)
        decision = self._decide(waiting.turn, place.policy_class, paced=place.is_paced)
        match decision:
            case Choice():
                state.waiting.queue.charge(chosen)
                self._granting.grant(waiting.turn, decision, now)
            case Wait():
                # Its session was bound elsewhere meanwhile, or its program has to wait now.
                assert decision.slots != place.slots, "its line has room"
                state.waiting.queue.move(place, decision.slots)
                if not decision.slots:
                    self._holding.hold_anew(waiting, decision.reason, now)
            case str():
                state.waiting.remove(waiting)
                self._reject(waiting.turn, "context_length_exceeded", decision, now)

    def admit(self, now: float) -> None:
        """A round of admission: the turns of programs that have a place now stand in the queue for it."""
        state = self._state
        assert state.admission is not None
        freed: list[WaitingTurn] = []
        for program in state.admission.round(now):
            for key in [turn.key for turn in program.turns.values() if not turn.is_running]:
                waiting = state.waiting.get(*key)
                eligible = None if waiting is None else self._eligibility.of(waiting.turn)
                # Whatever else it would have to wait for now, it is judged anew when that changes.
                if waiting is not None and isinstance(eligible, Eligible):
                    state.waiting.queue.move(waiting.place, eligible.slots)
                    freed.append(waiting)
        if freed:
            self.judge(now)
        for waiting in freed:
            if state.waiting.get(*waiting.key) is waiting:
                self._holding.hold_anew(
                    waiting, "policy" if waiting.place.is_paced else "queue", now
                )

    def _force(self, waiting: WaitingTurn, now: float) -> None:
        """Its time is up: it goes whatever the load, if there is anywhere to go."""
        state = self._state
        decision = self._decide(waiting.turn, waiting.place.policy_class, forced=True)
        match decision:
            case Choice():
                state.counters["forced"] += 1
                self._granting.grant(waiting.turn, decision, now)
            case Wait():
                state.waiting.queue.move(waiting.place, decision.slots)
                self._holding.hold_anew(waiting, decision.reason, now)
            case str():
                state.waiting.remove(waiting)
                self._reject(waiting.turn, "context_length_exceeded", decision, now)

    def send_on(self, now: float) -> None:
        """The ring moved: waiting turns whose key is another router's now are told. O(waiting)."""
        waiting = self._state.waiting
        for each in list(waiting):
            if self._belongs_elsewhere(each.turn.route):
                waiting.remove(each)
                self._moved(each.turn, now)

    def _moved(self, turn: Turn, now: float) -> None:
        self._gone(turn, now)
        route = turn.route
        self._state.counters["moved"] += 1
        self._holding.remember(turn, "moved", "", 0.0, now)
        self._state.effects.send(turn.owner, Moved(route.request, route.attempt, self.wire_ring()))

    def tick(self, now: float) -> None:
        state = self._state
        for key in state.waiting.deadlines.due(now):
            waiting = state.waiting.of_key(key)
            if waiting.reason == "no_worker":
                state.counters["no_worker"] += 1
                state.waiting.remove(waiting)
                waited = state.policy.overload.no_worker_wait_s
                self._reject(
                    waiting.turn,
                    "no_worker",
                    f"no worker for {waited:.0f} s",
                    now,
                    retry_after_s=_RETRY_AFTER_S,
                )
            else:
                self._force(waiting, now)

    def _reject(
        self,
        turn: Turn,
        code: RejectCode,
        message: str,
        now: float,
        *,
        retry_after_s: float = 0.0,
    ) -> None:
        self._gone(turn, now)
        route = turn.route
        self._state.counters["rejects"] += 1
        self._holding.remember(turn, "reject", f"{code}: {message}", 0.0, now)
        self._state.effects.send(
            turn.owner, Reject(route.request, route.attempt, code, message, retry_after_s)
        )

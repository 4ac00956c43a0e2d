"""From a Route to a Grant: which slots are eligible, what a policy makes of them, and who has to wait for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fermata.router.affinity import affinity_key
from fermata.router.decisions import Granted, Other
from fermata.router.eligibility import Eligibility, Eligible, Wait
from fermata.router.lease import Lease
from fermata.router.leasing import Leasing
from fermata.router.model import NO_HASHES, Turn
from fermata.router.owner import Owner
from fermata.router.policy import Question, Scored
from fermata.router.policy_class import PolicyClass
from fermata.router.prefix_index import Match
from fermata.router.queue import Line, Next, Place
from fermata.router.state import RouterState
from fermata.router.waiting import Reason, WaitingTurn
from fermata.wire.messages import Grant, Hints, Hold, Moved, ProgramEnded, Reject, Route
from fermata.wire.messages import Ring as WireRing

RejectCode = Literal[
    "overloaded", "no_worker", "invalid_request", "context_length_exceeded", "not_found"
]

_RETRY_AFTER_S = 5.0
_NOT_STREAMING_S = 240.0
_CLIENT_MARGIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a turn may go: masks of the slots that have room and of all that could take it, and its session's own."""

    free: int
    preferred: int | None
    slots: int


def jump_s(hints: Hints) -> float:
    """Seconds it is taken to have come earlier. The one hint is the other's older name: the larger counts."""
    return max(0.0, float(hints.priority), hints.latency_sensitivity)


class Picked(NamedTuple):
    slot: int
    match: Match
    shared: dict[int, int]
    choice: Choice
    scored: Scored


class Placement:
    def __init__(self, state: RouterState, leasing: Leasing) -> None:
        self._state = state
        self._leasing = leasing
        self._eligibility = Eligibility(state)

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
        since = now - max(0.0, route.waited_s)
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
                self._hold(waiting, now)
                return True
            state.waiting.remove(waiting)
            self._gone(waiting.turn, now)
        return False

    def _place_or_wait(self, turn: Turn, now: float) -> None:
        policy_class = self._state.waiting.classes.of(
            turn.route.policy_class, lambda: self._uncached_tokens(turn)
        )
        decision = self._decide(turn, policy_class)
        match decision:
            case Choice():
                wait = self._behind(decision)
                if wait is None:
                    self._grant(turn, self._pick(turn, decision), now)
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

    def _match(self, turn: Turn) -> tuple[Match, dict[int, int]]:
        """What is stored or promised of its prefix, and what active leases hold of it."""
        state = self._state
        match = state.index.match(turn.hashes)
        promised, active = state.leases.promises.match(turn.hashes)
        for depths in (state.approximate.match(turn.hashes), promised):
            if depths:
                device = match.get("device", {})
                match["device"] = device | {
                    slot: depth for slot, depth in depths.items() if depth > device.get(slot, 0)
                }
        return match, active

    def _uncached_tokens(self, turn: Turn) -> int:
        """As things are: what its prefill will cost where most of its prefix is."""
        match, _ = self._match(turn)
        depth = max((max(depths.values()) for depths in match.values() if depths), default=0)
        return max(1, turn.route.input_tokens - depth * self._state.config.block_size)

    def _pick(self, turn: Turn, choice: Choice) -> Picked:
        state = self._state
        match, active = self._match(turn)
        question = Question(
            input_tokens=turn.route.input_tokens,
            blocks=-(-turn.route.input_tokens // state.config.block_size),
            match=match,
            shared=active,
            preferred=choice.preferred,
        )
        candidates = state.loads.among(choice.free)
        slot = state.placement_policy.pick(question, candidates)
        return Picked(slot, match, active, choice, state.placement_policy.scored)

    def _grant(self, turn: Turn, picked: Picked, now: float) -> None:
        state = self._state
        slot, match = picked.slot, picked.match
        worker = state.workers.of_slot(slot)
        assert worker is not None, "only registered workers' slots are ready"
        matched = {tier: depths[slot] for tier, depths in match.items() if slot in depths}
        route = turn.route
        waiting = state.waiting.get(turn.owner.id, route.request)
        grant = Grant(
            request=route.request,
            attempt=route.attempt,
            lease=state.next_lease_id(),
            worker=worker.id,
            endpoint=worker.info.endpoint,
            rank=state.seats[slot].rank,
            matched={str(tier): depth for tier, depth in matched.items()},
            policy_revision=state.policy_revision,
            priority=route.hints.priority,
            features=worker.info.features,
            held_s=0.0 if waiting is None else max(0.0, now - turn.since),
            hold_reason="" if waiting is None else waiting.reason,
        )
        if waiting is not None:
            state.overload.drained(waiting.place.policy_class, now)
            state.waits.granted(waiting.reason, grant.held_s)
            state.waiting.remove(waiting)
        self._lease(turn, slot, grant, max(matched.values(), default=0), now)
        state.effects.send(turn.owner, grant)
        self._remember_grant(turn, grant, picked, now)

    def _remember_grant(self, turn: Turn, grant: Grant, picked: Picked, now: float) -> None:
        """References only: what it takes to explain it is worked out if somebody asks."""
        state, choice = self._state, picked.choice
        ready = self._slots_ready(turn) if state.admission is not None else 0
        state.decisions.granted(
            Granted(
                at=now,
                owner=turn.owner.id,
                route=turn.route,
                slot=picked.slot,
                waited_s=grant.held_s,
                eligible=choice.slots,
                free=choice.free,
                preferred=choice.preferred,
                admitted=bool(ready & ~choice.slots),
                match=picked.match,
                shared=picked.shared,
                scored=picked.scored.candidates,
                costs=picked.scored.costs,
                names=state.seats.names,
                policy=state.policy.scheduler.type,
                revision=grant.policy_revision,
            )
        )

    def _slots_ready(self, turn: Turn) -> int:
        workers = self._state.workers
        return workers.of_model(turn.model) & workers.ready

    def _remember(
        self,
        turn: Turn,
        what: Literal["hold", "reject", "moved"],
        reason: str,
        left_s: float,
        now: float,
    ) -> None:
        state = self._state
        policy, revision = state.policy.scheduler.type, state.policy_revision
        state.decisions.other(
            Other(now, turn.owner.id, turn.route, what, reason, left_s, policy, revision)
        )

    def _lease(self, turn: Turn, slot: int, grant: Grant, matched: int, now: float) -> None:
        state = self._state
        route = turn.route
        lease = Lease(
            id=grant.lease,
            owner=turn.owner,
            request=route.request,
            attempt=route.attempt,
            slot=slot,
            worker=grant.worker,
            input_tokens=route.input_tokens,
            pending_tokens=max(0, route.input_tokens - matched * state.config.block_size),
            node=state.leases.promises.hold(slot, turn.hashes),
            grant=grant,
            bound=state.affinity.granted(affinity_key(route.session, route.parent), route.key),
            expected_tokens=self._expected_tokens(route, slot),
        )
        state.leases.begin(lease, is_present=True, dispatch_by=now + state.dispatch_timeout_s)
        state.programs.granted((turn.owner.id, route.request), slot)
        state.loads.renew(slot)

    def _expected_tokens(self, route: Route, slot: int) -> int:
        """Of its output, by what its client says (`osl`), and never more than there can be."""
        osl = route.hints.osl - route.resumed
        if osl <= 0:
            return 0
        return min(osl, route.max_tokens, self._state.loads.window(slot) - route.input_tokens)

    def _wait_unless_refused(
        self, turn: Turn, policy_class: PolicyClass, wait: Wait, now: float
    ) -> None:
        """Refused is only who would wait for room, where none of the slots has any and the class's queue is full."""
        state = self._state
        use = state.waiting.queue.use(policy_class)
        why = ""
        if wait.slots:
            why = state.overload.refusal(
                turn.route, policy_class, use, workers=state.workers.ready_count
            )
        if not why:
            self._wait(turn, policy_class, wait, now)
        elif free := state.loads.room(wait.slots, policy_class.level, 1.0):
            self._grant(turn, self._pick(turn, Choice(free, None, wait.slots)), now)
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
            uncached_tokens=self._uncached_tokens(turn),
            slots=wait.slots,
            is_paced=is_paced,
        )
        waiting = WaitingTurn(turn, place, reason, self._deadline(turn, reason))
        state.waiting.add(waiting)
        self._begin_hold(waiting, now)

    def _deadline(self, turn: Turn, reason: Reason) -> float:
        """Whatever it waits for, it is one wait, which began when the turn did."""
        state = self._state
        no_worker_s = state.policy.overload.no_worker_wait_s
        match reason:
            case "booting":
                return state.boot_ends_at
            case "no_worker":
                # A boot always gives workers the time to say Hello, however long the turn waited elsewhere.
                least = state.boot_ends_at if state.is_booting else 0.0
                return max(turn.since + no_worker_s, least)
            case _:
                return turn.since + self._longest_hold_s(turn.route)

    def _longest_hold_s(self, route: Route) -> float:
        """Then it is placed whatever the load. A client that hears nothing meanwhile gives up earlier."""
        longest = self._state.policy.scheduler.thunder_agent.resume_timeout_s
        if route.streaming:
            return longest
        longest = min(longest, _NOT_STREAMING_S)
        if route.client_timeout_s > 0:
            longest = min(longest, max(0.0, route.client_timeout_s - _CLIENT_MARGIN_S))
        return longest

    def _hold(self, waiting: WaitingTurn, now: float) -> None:
        left_s = max(0.0, waiting.deadline - now)
        if waiting.reason == "booting":
            # What it may have to wait for after the boot is not known yet.
            left_s += self._state.policy.overload.no_worker_wait_s
        route = waiting.turn.route
        self._state.effects.send(
            waiting.turn.owner, Hold(route.request, route.attempt, waiting.reason, left_s)
        )

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
                self._hold_anew(waiting, reason, now)

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
                self._grant(waiting.turn, self._pick(waiting.turn, decision), now)
            case Wait():
                # Its session was bound elsewhere meanwhile, or its program has to wait now.
                assert decision.slots != place.slots, "its line has room"
                state.waiting.queue.move(place, decision.slots)
                if not decision.slots:
                    self._hold_anew(waiting, decision.reason, now)
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
                self._hold_anew(waiting, "policy" if waiting.place.is_paced else "queue", now)

    def _force(self, waiting: WaitingTurn, now: float) -> None:
        """Its time is up: it goes whatever the load, if there is anywhere to go."""
        state = self._state
        decision = self._decide(waiting.turn, waiting.place.policy_class, forced=True)
        match decision:
            case Choice():
                state.counters["forced"] += 1
                self._grant(waiting.turn, self._pick(waiting.turn, decision), now)
            case Wait():
                state.waiting.queue.move(waiting.place, decision.slots)
                self._hold_anew(waiting, decision.reason, now)
            case str():
                state.waiting.remove(waiting)
                self._reject(waiting.turn, "context_length_exceeded", decision, now)

    def _hold_anew(self, waiting: WaitingTurn, reason: Reason, now: float) -> None:
        self._state.waiting.postpone(waiting, reason, self._deadline(waiting.turn, reason))
        self._begin_hold(waiting, now)

    def _begin_hold(self, waiting: WaitingTurn, now: float) -> None:
        """Of its first wait, and again when what it waits for has changed."""
        self._state.waits.held(waiting.reason)
        self._remember(waiting.turn, "hold", waiting.reason, waiting.deadline - now, now)
        self._hold(waiting, now)

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
        self._remember(turn, "moved", "", 0.0, now)
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
        self._remember(turn, "reject", f"{code}: {message}", 0.0, now)
        self._state.effects.send(
            turn.owner, Reject(route.request, route.attempt, code, message, retry_after_s)
        )

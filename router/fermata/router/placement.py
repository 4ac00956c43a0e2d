"""From a Route to a Grant: which slots are eligible, what a policy makes of them, and who has to wait for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fermata.router.affinity import affinity_key
from fermata.router.chain_links import bits
from fermata.router.lease import Lease
from fermata.router.leasing import Leasing
from fermata.router.model import NO_HASHES, Turn
from fermata.router.owner import Owner
from fermata.router.policy import Question
from fermata.router.prefix_index import Match
from fermata.router.state import RouterState
from fermata.router.waiting import Lane, Reason, WaitingTurn
from fermata.wire.messages import Grant, Hold, Moved, Reject, Route
from fermata.wire.messages import Ring as WireRing

RejectCode = Literal[
    "overloaded", "no_worker", "invalid_request", "context_length_exceeded", "not_found"
]

_LOOK_AHEAD = 8
"""How many turns of a lane are tried past one that can not go."""
_RETRY_AFTER_S = 5.0
_NOT_STREAMING_S = 240.0
_CLIENT_MARGIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a turn may go. `free` is a mask of slots, `preferred` its session's own."""

    free: int
    preferred: int | None
    lane: Lane


@dataclass(frozen=True, slots=True)
class Wait:
    reason: Reason
    lane: Lane


class Placement:
    def __init__(self, state: RouterState, leasing: Leasing) -> None:
        self._state = state
        self._leasing = leasing

    def route(self, owner: Owner, route: Route, frame: memoryview, now: float) -> None:
        state = self._state
        if self._is_answered(owner, route, now):
            return
        model = state.config.models.get(route.model)
        hashes = frame.cast("Q") if len(frame) else NO_HASHES
        turn = Turn(owner.peer, route, model or "", hashes, now - max(0.0, route.waited_s))
        if self._belongs_elsewhere(route):
            self._moved(turn)
            return
        state.counters["routes"] += 1
        if model is None:
            self._reject(turn, "not_found", f"no model {route.model!r} here")
        elif route.input_tokens < 1:
            self._reject(turn, "invalid_request", "no input")
        elif len(hashes) * state.config.block_size > route.input_tokens:
            self._reject(turn, "invalid_request", "more block hashes than input")
        else:
            self._place_or_wait(turn, now)

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
        return False

    def _place_or_wait(self, turn: Turn, now: float) -> None:
        state = self._state
        decision = self._decide(turn)
        match decision:
            case Choice() if state.waiting.ahead(decision.lane) < _LOOK_AHEAD:
                self._grant(turn, self._pick(turn, decision), now)
            case Choice():
                self._wait(turn, Wait("queue", decision.lane), now)
            case Wait():
                self._wait(turn, decision, now)
            case str():
                self._reject(turn, "context_length_exceeded", decision)

    def _decide(self, turn: Turn, *, forced: bool = False) -> Choice | Wait | str:
        """A text says why no worker here can ever take it. `forced` ignores load."""
        state = self._state
        any_slot: Lane = (turn.model, -1)
        if state.is_booting:
            has_nobody = state.has_policy and not len(state.workers)
            return Wait("no_worker" if has_nobody else "booting", any_slot)
        of_model = state.workers.of_model(turn.model)
        eligible = self._fitting(of_model & state.workers.ready, turn)
        if not eligible:
            if of_model and not self._fitting(of_model, turn):
                return f"{turn.route.input_tokens} tokens do not fit any worker's window"
            return Wait("no_worker", any_slot)
        others = eligible & ~state.workers.slots_of(turn.route.avoid)
        if others:
            eligible = others
        bound = self._bound(turn, eligible)
        lane = any_slot
        if bound is not None and self._is_hard(turn):
            eligible = 1 << bound
            lane = (turn.model, bound)
        free = eligible if forced else eligible & ~(state.loads.busy | state.loads.full)
        if not free:
            return Wait("queue", lane)
        preferred = bound if bound is not None and free >> bound & 1 else None
        return Choice(free, preferred, lane)

    def _fitting(self, slots: int, turn: Turn) -> int:
        """Those whose window has room for the input and a token."""
        loads = self._state.loads
        tokens = turn.route.input_tokens
        if not slots or tokens < loads.narrowest:
            return slots
        return sum([bit for bit in bits(slots) if tokens < loads.window(bit.bit_length() - 1)])

    def _bound(self, turn: Turn, eligible: int) -> int | None:
        """The slot its session is bound to, if it can go there. A Hard binding that can not be kept is given up."""
        state = self._state
        if state.policy.session_affinity.mode == "None":
            return None
        key = affinity_key(turn.route.session, turn.route.parent)
        slot = state.affinity.slot_of(key)
        if slot is None or eligible >> slot & 1:
            return slot
        if self._is_hard(turn):
            state.affinity.unbind(key)
        return None

    def _is_hard(self, turn: Turn) -> bool:
        mode = self._state.policy.session_affinity.mode
        return mode == "Hard" and not turn.route.inferred

    def _pick(self, turn: Turn, choice: Choice) -> tuple[int, Match]:
        state = self._state
        match = state.index.match(turn.hashes)
        promised, active = state.leases.promises.match(turn.hashes)
        for depths in (state.approximate.match(turn.hashes), promised):
            if depths:
                device = match.get("device", {})
                match["device"] = device | {
                    slot: depth for slot, depth in depths.items() if depth > device.get(slot, 0)
                }
        question = Question(
            input_tokens=turn.route.input_tokens,
            blocks=-(-turn.route.input_tokens // state.config.block_size),
            match=match,
            shared=active,
            preferred=choice.preferred,
        )
        candidates = [state.loads[bit.bit_length() - 1] for bit in bits(choice.free)]
        return state.placement_policy.pick(question, candidates), match

    def _grant(self, turn: Turn, picked: tuple[int, Match], now: float) -> None:
        state = self._state
        slot, match = picked
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
            state.waiting.remove(waiting)
        self._lease(turn, slot, grant, max(matched.values(), default=0), now)
        state.effects.send(turn.owner, grant)

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
            bound=state.affinity.granted(affinity_key(route.session, route.parent)),
        )
        state.leases.begin(lease, is_present=True, dispatch_by=now + state.dispatch_timeout_s)
        state.loads.renew(slot)

    def _wait(self, turn: Turn, wait: Wait, now: float) -> None:
        state = self._state
        limit = state.policy.queue.limit * max(1, state.workers.ready_count)
        if len(state.waiting) >= limit:
            state.counters["overloaded"] += 1
            self._reject(
                turn, "overloaded", f"{limit} turns are waiting", retry_after_s=_RETRY_AFTER_S
            )
            return
        state.counters["holds"] += 1
        began = turn.since if wait.reason == "no_worker" else now
        waiting = WaitingTurn(
            turn, wait.lane, wait.reason, began, self._deadline(turn, wait.reason, began)
        )
        state.waiting.add(waiting)
        self._hold(waiting, now)

    def _deadline(self, turn: Turn, reason: Reason, began: float) -> float:
        state = self._state
        no_worker_s = state.policy.overload.no_worker_wait_s
        match reason:
            case "booting":
                return state.boot_ends_at
            case "no_worker":
                # A boot always gives workers the time to say Hello, however long the turn waited elsewhere.
                least = state.boot_ends_at if state.is_booting else 0.0
                return max(began + no_worker_s, least)
            case "queue":
                return began + self._longest_hold_s(turn.route)

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
        """Let go whom there is room for: O(turns freed), or O(waiting) when what decides has changed."""
        state = self._state
        most = None if state.must_judge_all else _LOOK_AHEAD
        state.must_judge = state.must_judge_all = False
        for lane in state.waiting.lanes():
            while self._judge_front(lane, most, now) and most is not None:
                pass

    def _judge_front(self, lane: Lane, most: int | None, now: float) -> bool:
        """True when a turn left and others may follow."""
        waiting = self._state.waiting
        before = waiting.ahead(lane)
        for each in waiting.front(lane, most):
            self._judge_one(each, now)
        return 0 < waiting.ahead(lane) < before

    def _judge_one(self, waiting: WaitingTurn, now: float, *, forced: bool = False) -> None:
        state = self._state
        decision = self._decide(waiting.turn, forced=forced)
        match decision:
            case Choice():
                self._grant(waiting.turn, self._pick(waiting.turn, decision), now)
            case Wait():
                state.waiting.move(waiting, decision.lane)
                if decision.reason != waiting.reason or forced:
                    deadline = self._deadline(waiting.turn, decision.reason, now)
                    state.waiting.postpone(waiting, decision.reason, now, deadline)
                    self._hold(waiting, now)
            case str():
                state.waiting.remove(waiting)
                self._reject(waiting.turn, "context_length_exceeded", decision)

    def send_on(self) -> None:
        """The ring moved: waiting turns whose key is another router's now are told. O(waiting)."""
        waiting = self._state.waiting
        for each in [w for lane in waiting.lanes() for w in waiting.front(lane, None)]:
            if self._belongs_elsewhere(each.turn.route):
                waiting.remove(each)
                self._moved(each.turn)

    def _moved(self, turn: Turn) -> None:
        route = turn.route
        self._state.counters["moved"] += 1
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
                    retry_after_s=_RETRY_AFTER_S,
                )
            else:
                self._judge_one(waiting, now, forced=True)

    def _reject(
        self, turn: Turn, code: RejectCode, message: str, *, retry_after_s: float = 0.0
    ) -> None:
        route = turn.route
        self._state.counters["rejects"] += 1
        self._state.effects.send(
            turn.owner, Reject(route.request, route.attempt, code, message, retry_after_s)
        )

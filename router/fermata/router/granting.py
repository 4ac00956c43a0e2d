"""A turn goes: the policy picks one of the slots with room, a lease begins, and its owner is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fermata.router.affinity import affinity_key
from fermata.router.decisions import Granted
from fermata.router.lease import Lease
from fermata.router.model import Turn
from fermata.router.policy import Question, Scored
from fermata.router.prefix_index import Match
from fermata.router.state import RouterState
from fermata.wire.messages import Grant, Route


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a turn may go: masks of the slots that have room and of all that could take it, and its session's own."""

    free: int
    preferred: int | None
    slots: int


class Picked(NamedTuple):
    slot: int
    match: Match
    shared: dict[int, int]
    choice: Choice
    scored: Scored


class Granting:
    def __init__(self, state: RouterState) -> None:
        self._state = state

    def grant(self, turn: Turn, choice: Choice, now: float) -> None:
        state = self._state
        picked = self._pick(turn, choice)
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
        # By position, in the order of Granted: by name it takes four times as long.
        state.decisions.granted(
            Granted(
                now,
                turn.owner.id,
                turn.route,
                picked.slot,
                grant.held_s,
                choice.slots,
                choice.free,
                choice.preferred,
                bool(ready & ~choice.slots),
                picked.match,
                picked.shared,
                picked.scored.candidates,
                picked.scored.costs,
                state.seats.names,
                state.policy.scheduler.type,
                grant.policy_revision,
            )
        )

    def _slots_ready(self, turn: Turn) -> int:
        workers = self._state.workers
        return workers.of_model(turn.model) & workers.ready

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

    def uncached_tokens(self, turn: Turn) -> int:
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

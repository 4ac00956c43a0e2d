"""How leases end, and who is told.

Every end goes through `end`, which is where affinity, load and waiting turns learn of it. The owner's word
(Progress) needs no answer; an end by the router itself is a Revoke to whoever still believes in the lease, one message
a destination.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

from fermata.core.ids import LeaseId, WorkerId, lease_incarnation, lease_router
from fermata.router.affinity import affinity_key
from fermata.router.lease import End, Lease
from fermata.router.owner import Owner
from fermata.router.state import RouterState
from fermata.router.worker import Worker
from fermata.wire.messages import (
    LeaseClaim,
    LeaseClaims,
    LeaseList,
    LeaseProgress,
    Progress,
    Revoke,
)
from fermata.wire.roles import Peer

RevokeReason = Literal[
    "worker_lost",
    "worker_stalled",
    "worker_draining",
    "owner_lost",
    "dispatch_timeout",
    "unknown",
]
_LEASE_IDS = 1 << 64
_DONE: frozenset[End] = frozenset({"finished", "cancelled"})
# Of these the slot is to blame, as far as the router can know; sessions should not return to it.
_FAILURES: frozenset[End] = frozenset(
    {
        "failed",
        "superseded",
        "dispatch_timeout",
        "worker_lost",
        "worker_stalled",
        "worker_draining",
    }
)


class Leasing:
    def __init__(self, state: RouterState) -> None:
        self._state = state

    def end(
        self,
        lease: Lease,
        how: End,
        now: float,
        *,
        promised_until: int | None = None,
        finish: LeaseProgress | None = None,
    ) -> None:
        """`finish` is the owner's word on a finished one."""
        state = self._state
        state.leases.end(lease, how, promised_until=promised_until)
        self._end_turn(lease, finish, now)
        if lease.bound is not None:
            if how in _FAILURES:
                state.affinity.failed(lease.bound, lease.slot)
                # Turns of the session that waited for this slot may go anywhere now.
                state.must_judge_all |= state.policy.session_affinity.mode == "Hard"
            state.affinity.ended(lease.bound, now)
        if how in _DONE:
            state.done.put((lease.owner.id, lease.request), lease.attempt)
        if lease.grant is None:
            state.old_ends.put(lease.id, None)
        if state.loads.renew(lease.slot):
            state.must_judge = True

    def _end_turn(self, lease: Lease, finish: LeaseProgress | None, now: float) -> None:
        """Of its program. One that did not finish leaves the program as it was; it may come again."""
        state = self._state
        key = (lease.owner.id, lease.request)
        turn = state.programs.turn(key)
        if turn is None:
            return
        if turn.program.session in state.leaving:
            state.over.append(turn.program.session)
        if finish is None:
            state.programs.end(key, "cancelled", now)
            return
        tokens = lease.input_tokens + lease.output_tokens
        if finish.usage is not None:
            tokens = max(tokens, finish.usage.prompt_tokens + finish.usage.completion_tokens)
        gap = turn.program.gap_after(finish.reason)
        state.programs.end(
            key, "finished", now, context_tokens=tokens, gap=finish.gap if finish.gap else gap
        )
        if state.admission is not None and finish.usage is not None:
            state.admission.completed(turn, finish.usage.cached_tokens)

    def revoke(
        self,
        leases: Sequence[Lease],
        reason: RevokeReason,
        now: float,
        *,
        how: End | None = None,
        owners: bool = True,
        workers: bool = True,
    ) -> None:
        """End leases that their owners did not end, and tell the sides named. `how` is for the books."""
        for lease in leases:
            self.end(lease, how or ("not_held" if reason == "unknown" else reason), now)
        if owners:
            by_owner: dict[Peer, list[LeaseId]] = {}
            for lease in leases:
                by_owner.setdefault(lease.owner, []).append(lease.id)
            for peer, ids in by_owner.items():
                self.send_revoke(peer, ids, reason)
        if workers:
            self._tell_workers(leases, reason)

    def _tell_workers(self, leases: Sequence[Lease], reason: RevokeReason) -> None:
        by_worker: dict[WorkerId, list[LeaseId]] = {}
        for lease in leases:
            by_worker.setdefault(lease.worker, []).append(lease.id)
        for name, ids in by_worker.items():
            worker = self._state.workers.by_id(name)
            if worker is not None:
                self.send_revoke(worker.peer, ids, reason)

    def send_revoke(self, to: Peer, leases: Iterable[LeaseId], reason: RevokeReason) -> None:
        self._state.effects.send(to, Revoke(reason), array("Q", leases).tobytes())

    def progress(self, owner: Owner, message: Progress, now: float) -> None:
        for entry in message.entries:
            if entry.lease == 0:
                self._withdraw(owner, entry, now)
                continue
            lease = self._state.leases.get(entry.lease)
            if lease is None or lease.owner != owner.peer:
                # Ended already: late words and repeats change nothing.
                self._state.counters["late_progress"] += 1
            else:
                self._advance(lease, entry, now)

    def _withdraw(self, owner: Owner, entry: LeaseProgress, now: float) -> None:
        """The client went away while its Route had no answer, as far as the owner knew."""
        state = self._state
        waiting = state.waiting.get(owner.peer.id, entry.request)
        if waiting is not None:
            state.waiting.remove(waiting)
            state.programs.end(waiting.key, "cancelled", now)
            state.done.put(waiting.key, waiting.turn.route.attempt)
            return
        lease = state.leases.of_request(owner.peer.id, entry.request)
        if lease is not None:
            self.end(lease, "cancelled", now)

    def _advance(self, lease: Lease, entry: LeaseProgress, now: float) -> None:
        state = self._state
        state.leases.progress(lease, entry.output_tokens)
        state.programs.progress((lease.owner.id, lease.request), lease.output_tokens)
        match entry.kind:
            case "accepted":
                self._accepted(lease)
            case "prefilled" | "tokens":
                # Whoever speaks of tokens has been accepted and prefilled, whatever was lost.
                self._accepted(lease)
                state.leases.prefilled(lease)
                if entry.kind == "prefilled":
                    self._learn(lease, now)
            case "finished":
                self._accepted(lease)
                self._learn(lease, now)
                promised = self._promised(lease, entry)
                self.end(lease, "finished", now, promised_until=promised, finish=entry)
                return
            case "cancelled" | "failed":
                self.end(lease, entry.kind, now)
                return
        if state.loads.renew(lease.slot):
            state.must_judge = True

    def _learn(self, lease: Lease, now: float) -> None:
        """Its slot has the prompt now; matters where no events say so."""
        self._state.approximate.learn(lease.slot, lease.node.chain[: lease.node.end], now)

    def _accepted(self, lease: Lease) -> None:
        if self._state.leases.accept(lease):
            self._bind(lease)

    def _bind(self, lease: Lease) -> None:
        state = self._state
        if lease.bound is not None and state.policy.session_affinity.mode != "None":
            state.affinity.accepted(lease.bound, lease.slot)

    def _promised(self, lease: Lease, entry: LeaseProgress) -> int | None:
        """The event sequence its promise waits for; None where that is applied, or will never be told."""
        worker = self._state.workers.of_slot(lease.slot)
        if worker is None or entry.event_sequence < 0 or lease.slot in self._state.approximate:
            return None
        feed = worker.feeds[worker.slots.index(lease.slot)]
        if feed.is_live and feed.applied >= entry.event_sequence:
            return None
        return entry.event_sequence

    def dispatch_timeouts(self, now: float) -> None:
        due = [self._state.leases.get(lease) for lease in self._state.leases.dispatches.due(now)]
        self.revoke([lease for lease in due if lease is not None], "dispatch_timeout", now)

    def owner_list(self, owner: Owner, message: LeaseList, held: memoryview, now: float) -> None:
        """The owner's list is final: what either side lacks ends."""
        state = self._state
        named = set(held)
        missing = state.leases.ledger(owner.peer).missing_from(named, seen=message.seen)
        gone = [lease for i in missing if (lease := state.leases.get(i)) is not None]
        self.revoke(gone, "unknown", now, owners=False)
        strange = [LeaseId(i) for i in named if not self._is_held(owner, LeaseId(i))]
        if strange:
            self.send_revoke(owner.peer, strange, "unknown")

    def _is_held(self, owner: Owner, lease: LeaseId) -> bool:
        found = self._state.leases.get(lease)
        return found is not None and found.owner == owner.peer

    def worker_list(self, worker: Worker, held: memoryview, now: float) -> None:
        """Names what the engine runs or still owes to owners.

        What no owner claimed is aborted, once owners have had the time to claim. What it lacked in its list
        before too it has lost (the last words to an owner can die with a connection): the owner asks anew.
        """
        state = self._state
        named = set(held)
        lacking = {i for i in state.leases.worker_ledger(worker.id).leases if i not in named}
        lost = [found for i in lacking & worker.lacking if (found := state.leases.get(i))]
        worker.lacking = lacking
        self.revoke(lost, "unknown", now, workers=False)
        patience_s = state.real(state.liveness.owner_timeout_s)
        strange = [LeaseId(i) for i in held if LeaseId(i) not in state.leases]
        mine = [i for i in strange if lease_router(i) == state.config.number]
        if mine and now - state.booted_at >= patience_s:
            self.send_revoke(worker.peer, mine, "unknown")

    def claims(self, owner: Owner, message: LeaseClaims, hashes: memoryview, now: float) -> None:
        """What an owner holds from an earlier boot of this router; of the present one it holds what it was granted."""
        state = self._state
        strange: list[LeaseId] = []
        at = 0
        for claim in message.claims:
            end = at + max(0, claim.blocks)
            if not 0 < claim.lease < _LEASE_IDS:
                state.counters["senseless_claims"] += 1
            elif not self._claim(owner, claim, hashes[at:end], now):
                strange.append(claim.lease)
            at = end
        if strange:
            self.send_revoke(owner.peer, strange, "unknown")

    def _claim(self, owner: Owner, claim: LeaseClaim, hashes: memoryview, now: float) -> bool:
        state = self._state
        if self._is_held(owner, claim.lease):
            return True
        is_of_this_boot = lease_incarnation(claim.lease) == state.incarnation
        if (
            claim.lease in state.leases
            or claim.lease in state.old_ends
            or is_of_this_boot
            or lease_router(claim.lease) != state.config.number
            or not 0 <= claim.rank < 4096
            or state.leases.of_request(owner.peer.id, claim.request) is not None
            or state.waiting.get(owner.peer.id, claim.request) is not None
        ):
            return False
        slot = self._slot_of(claim, now)
        if slot is None:
            return False
        lease = Lease(
            id=claim.lease,
            owner=owner.peer,
            request=claim.request,
            attempt=claim.attempt,
            slot=slot,
            worker=claim.worker,
            input_tokens=claim.input_tokens,
            pending_tokens=0 if claim.prefilled else max(0, claim.input_tokens),
            node=state.leases.promises.hold(slot, hashes),
            grant=None,
            bound=state.affinity.granted(affinity_key(claim.session, claim.parent), claim.key),
            accepted=claim.accepted,
            output_tokens=max(0, claim.output_tokens),
        )
        state.leases.begin(lease, is_present=False, dispatch_by=now + state.dispatch_timeout_s)
        if lease.accepted:
            self._bind(lease)
        self._claim_turn(claim, hashes, slot, owner, now)
        state.loads.renew(slot)
        return True

    def _claim_turn(
        self, claim: LeaseClaim, hashes: memoryview, slot: int, owner: Owner, now: float
    ) -> None:
        """Its program is known again, with the turn that runs."""
        state = self._state
        key = (owner.peer.id, claim.request)
        if state.programs.turn(key) is not None:
            return
        worker = state.workers.by_id(claim.worker)
        state.programs.begin(
            key,
            session=claim.session,
            chain=hashes,
            tokens=max(claim.input_tokens, len(hashes) * state.config.block_size),
            now=now,
            parent=claim.parent,
            routing_key=claim.key,
            model="" if worker is None else worker.info.model,
        )
        state.programs.granted(key, slot)
        state.programs.progress(key, max(0, claim.output_tokens))

    def _slot_of(self, claim: LeaseClaim, now: float) -> int | None:
        """Its worker may not have said Hello to this boot yet: then a slot is kept for it."""
        state = self._state
        worker = state.workers.by_id(claim.worker)
        if worker is not None:
            return worker.slots[claim.rank] if claim.rank < len(worker.slots) else None
        return state.expect(claim.worker, claim.rank, now)

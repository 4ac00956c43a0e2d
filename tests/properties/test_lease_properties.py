"""The lease table against a list: sums equal a recount, digests are those of the set, every lease ends once."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fermata.core.ids import LeaseId, RequestId, WorkerId, make_lease_id
from fermata.core.lease_digest import LeaseDigest
from fermata.router.lease import End, Lease, LeaseTable
from fermata.wire.messages import Role
from fermata.wire.roles import Peer

pytestmark = pytest.mark.timeout(300)

BLOCK = 4
SLOTS = range(3)
OWNERS = [Peer(Role.FRONTEND, name, 1) for name in "ab"]
ENDS: list[End] = ["finished", "cancelled", "failed", "owner_lost"]
# Chains that share prefixes: hashes are made of the path, so equal hashes mean equal prefixes.
CHAINS = [[1, 2, 3, 4, 5], [1, 2, 3, 40], [1, 20, 30], [1], [], [9, 8, 7, 6]]

WHAT = [
    *["begin"] * 6,
    *["accept", "prefilled", "output", "output"],
    *["end"] * 4,
    *["events applied"] * 4,
    "slot is lost",
    *["time passes"] * 3,
    *["heartbeat"] * 3,
]


@dataclass(eq=False)
class Model:
    id: LeaseId
    owner: Peer
    slot: int
    chain: list[int]
    tokens: int
    pending: int
    lease: Lease
    is_present: bool
    accepted: bool = False
    output: int = 0
    seen: bool = field(default=False)

    @property
    def private(self) -> int:
        return -(-(self.tokens + self.output) // BLOCK) - len(self.chain)


class LeaseMachine(RuleBasedStateMachine):
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(block_size=BLOCK, width_s=0.1)
        for slot in SLOTS:
            self.table.open_slot(slot)
        self.live: list[Model] = []
        self.lingering: list[tuple[int, int, list[int]]] = []
        self.serial = 0
        self.now = 0.0
        self.ended: set[LeaseId] = set()

    @rule(
        what=st.sampled_from(WHAT),
        owner=st.sampled_from(OWNERS),
        slot=st.sampled_from(SLOTS),
        chain=st.sampled_from(CHAINS),
        n=st.integers(0, 20),
        pick=st.integers(0, 20),
        how=st.sampled_from(["finished", "finished", *ENDS]),
        yes=st.booleans(),
    )
    def event(
        self,
        what: str,
        owner: Peer,
        slot: int,
        chain: list[int],
        n: int,
        pick: int,
        how: End,
        yes: bool,
    ) -> None:
        """One rule for all, so that every run mixes all of them."""
        match what:
            case "begin":
                kind = "claimed" if n % 3 == 0 else "granted"
                self.begin(owner, slot, chain, n % BLOCK, pick, kind)
            case "end":
                self.end(pick, how, n % 10 if yes else None)
            case "events applied":
                self.events_applied(slot, n % 10)
            case "slot is lost":
                self.slot_is_lost(slot)
            case "time passes":
                self.time_passes(n / 5)
            case "heartbeat":
                self.heartbeat(owner, n % 4, is_honest=yes)
            case _:
                self.progress(pick, what, n)
        self.match(chain)

    def begin(
        self, owner: Peer, slot: int, chain: list[int], tail: int, cached: int, kind: str
    ) -> None:
        self.serial += 1
        is_present = kind == "granted"
        tokens = len(chain) * BLOCK + tail
        name = make_lease_id(router=1, incarnation=9 if is_present else 4, serial=self.serial)
        lease = Lease(
            id=name,
            owner=owner,
            request=RequestId(f"r{self.serial}"),
            attempt=0,
            slot=slot,
            worker=WorkerId(f"w{slot}"),
            input_tokens=tokens,
            pending_tokens=max(0, tokens - cached),
            node=self.table.promises.hold(slot, array("Q", chain)),
            grant=None,
            accepted=not is_present,
        )
        self.table.begin(lease, is_present=is_present, dispatch_by=self.now + 5.0)
        model = Model(name, owner, slot, chain, tokens, max(0, tokens - cached), lease, is_present)
        model.accepted = not is_present
        self.live.append(model)
        self.seen["begun"] += 1

    def progress(self, pick: int, kind: str, n: int) -> None:
        if not self.live:
            return
        model = self.live[pick % len(self.live)]
        if kind == "accept":
            assert self.table.accept(model.lease) is not model.accepted
            model.accepted = True
        elif kind == "prefilled":
            self.table.prefilled(model.lease)
            model.pending = 0
        else:
            self.table.progress(model.lease, n)
            model.output = max(model.output, n)

    def end(self, pick: int, how: End, until: int | None) -> None:
        if not self.live:
            return
        model = self.live.pop(pick % len(self.live))
        if how != "finished":
            until = None
        self.table.end(model.lease, how, promised_until=until)
        assert model.id not in self.ended
        self.ended.add(model.id)
        self.seen[how] += 1
        if until is not None:
            self.lingering.append((model.slot, until, model.chain))
            self.seen["promise lingers"] += 1

    def events_applied(self, slot: int, applied: int) -> None:
        self.table.promises.settle(slot, applied)
        kept = [x for x in self.lingering if x[0] != slot or x[1] > applied]
        self.seen["promise settled"] += len(kept) < len(self.lingering)
        self.lingering = kept

    def slot_is_lost(self, slot: int) -> None:
        for lease in self.table.of_slot(slot):
            self.table.end(lease, "worker_lost")
            self.ended.add(lease.id)
            self.seen["worker_lost"] += 1
        self.live = [m for m in self.live if m.slot != slot]
        self.lingering = [x for x in self.lingering if x[0] != slot]
        self.table.close_slot(slot)
        self.table.open_slot(slot)

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = self.table.dispatches.due(self.now)
        self.seen["dispatch timed out"] += len(due)
        for model in [m for m in self.live if m.id in due]:
            assert not model.accepted
            self.table.end(model.lease, "dispatch_timeout")
            self.ended.add(model.id)
            self.live.remove(model)

    def heartbeat(self, owner: Peer, back: int, *, is_honest: bool) -> None:
        mine = [m for m in self.live if m.owner == owner]
        present = sorted(m.id for m in mine if m.is_present)
        newest = max(0, len(present) - back)
        # An owner never says it has seen less than before.
        seen = max([0, *present[:newest], *(m.id for m in mine if m.is_present and m.seen)])
        held = [m.id for m in mine if not m.is_present or m.id <= seen]
        for model in mine:
            model.seen |= model.id <= seen
        if not is_honest and held:
            held.pop()
            self.seen["digest differs"] += 1
        digest = LeaseDigest(held)
        ledger = self.table.ledger(owner)
        agrees = ledger.agrees(seen=seen, count=digest.count, xor=digest.xor)
        truth = {m.id for m in mine if not m.is_present or m.id <= seen}
        assert agrees == (set(held) == truth)
        missing = set(ledger.missing_from(held, seen=seen))
        assert missing == truth - set(held)

    def match(self, chain: list[int]) -> None:
        promised, active = self.table.promises.match(array("Q", chain))
        for slot in SLOTS:
            running = [m.chain for m in self.live if m.slot == slot]
            kept = [c for s, _, c in self.lingering if s == slot]
            assert active.get(slot, 0) == max((_shared(chain, c) for c in running), default=0)
            depth = max((_shared(chain, c) for c in running + kept), default=0)
            assert promised.get(slot, 0) == depth

    @invariant()
    def sums_equal_a_recount(self) -> None:
        self.table.check_integrity()
        assert len(self.table) == len(self.live)
        assert self.table.begun == len(self.live) + len(self.ended)
        assert self.table.promises.lingering == len(self.lingering)
        for slot in SLOTS:
            here = [m for m in self.live if m.slot == slot]
            use = self.table.use(slot)
            assert use.active == len(here)
            assert use.pending_tokens == sum(m.pending for m in here)
            blocks = {tuple(m.chain[: i + 1]) for m in here for i in range(len(m.chain))}
            assert self.table.decode_blocks(slot) == len(blocks) + sum(m.private for m in here)
            running = LeaseDigest(m.id for m in here if m.accepted)
            ledger = self.table.worker_ledger(WorkerId(f"w{slot}"))
            assert ledger.agrees(count=running.count, xor=running.xor)


def _shared(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_sums_and_digests_equal_a_recount_and_every_lease_ends_once() -> None:
    LeaseMachine.seen.clear()
    run_state_machine_as_test(
        LeaseMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for event in (
        *ENDS,
        "begun",
        "worker_lost",
        "promise lingers",
        "promise settled",
        "dispatch timed out",
        "digest differs",
    ):
        assert LeaseMachine.seen[event] > 10, f"never happened enough: {event} {LeaseMachine.seen}"

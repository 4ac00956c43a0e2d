"""Leases: one request, one lease, ended once.

The table knows every live lease by id, request, owner, worker and slot, and keeps the sums a placement asks for as
leases come and go: active requests, pending prefill tokens, and decode blocks, shared ones counted once and the output
that a client expects (`osl`) counted from the Grant on. Nothing is swept and nothing ends by age but a lease whose
engine never said Accepted (dispatch time-out); what else ends one is a word from its owner, or the loss of its owner or
slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fermata.core.ids import LeaseId, RequestId, WorkerId
from fermata.router.affinity import BoundTurn
from fermata.router.chain_trie import Node
from fermata.router.expiry import Expiry
from fermata.router.promise import Promises
from fermata.router.reconcile import OwnerLedger, WorkerLedger
from fermata.wire.messages import Grant
from fermata.wire.roles import Peer

End = Literal[
    "finished",
    "cancelled",
    "failed",
    "superseded",
    "dispatch_timeout",
    "worker_lost",
    "worker_stalled",
    "worker_draining",
    "owner_lost",
    "not_held",
]


@dataclass(slots=True, eq=False)
class Lease:
    id: LeaseId
    owner: Peer
    request: RequestId
    attempt: int
    slot: int
    worker: WorkerId
    input_tokens: int
    pending_tokens: int
    """Of its prefill; 0 once that is done."""
    node: Node
    """Its prompt's chain."""
    grant: Grant | None
    """As it was sent; None for one that was claimed from an earlier boot."""
    bound: BoundTurn | None = None
    output_tokens: int = 0
    accepted: bool = False
    expected_tokens: int = 0
    """Output its client expects, in total; 0 where it did not say."""
    private_blocks: int = 0
    """Blocks beyond the prompt's full ones: its tail and what it generated."""
    expected_blocks: int = 0
    """Blocks beyond those that the rest of its expected output will fill: fewer as tokens arrive."""


@dataclass(slots=True)
class SlotUse:
    """Sums over a slot's leases."""

    active: int = 0
    pending_tokens: int = 0
    private_blocks: int = 0
    expected_blocks: int = 0


class LeaseTable:
    def __init__(self, *, block_size: int, width_s: float) -> None:
        self._block_size = block_size
        self._leases: dict[LeaseId, Lease] = {}
        self._by_request: dict[tuple[str, RequestId], Lease] = {}
        self._by_owner: dict[Peer, OwnerLedger] = {}
        self._by_worker: dict[WorkerId, WorkerLedger] = {}
        self._by_slot: dict[int, dict[LeaseId, Lease]] = {}
        self._uses: dict[int, SlotUse] = {}
        self.promises = Promises()
        self.dispatches: Expiry[LeaseId] = Expiry(width_s=width_s)
        self.begun = 0
        self.ended: Counter[End] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._leases

    def get(self, lease: LeaseId) -> Lease | None:
        return self._leases.get(lease)

    def of_request(self, owner: str, request: RequestId) -> Lease | None:
        return self._by_request.get((owner, request))

    def of_slot(self, slot: int) -> list[Lease]:
        return list(self._by_slot.get(slot, {}).values())

    def of_owner(self, owner: Peer) -> list[Lease]:
        return [self._leases[i] for i in self.ledger(owner).leases]

    def ledger(self, owner: Peer) -> OwnerLedger:
        return self._by_owner.get(owner) or OwnerLedger()

    def worker_ledger(self, worker: WorkerId) -> WorkerLedger:
        return self._by_worker.get(worker) or WorkerLedger()

    def use(self, slot: int) -> SlotUse:
        """Of a slot that was opened."""
        return self._uses[slot]

    def decode_blocks(self, slot: int) -> int:
        use = self._uses[slot]
        return self.promises.distinct_blocks(slot) + use.private_blocks + use.expected_blocks

    def open_slot(self, slot: int) -> None:
        self._uses[slot] = SlotUse()
        self._by_slot[slot] = {}

    def close_slot(self, slot: int) -> None:
        """Its leases have ended."""
        assert not self._by_slot[slot]
        self.promises.drop(slot)
        del self._uses[slot], self._by_slot[slot]

    def begin(self, lease: Lease, *, is_present: bool, dispatch_by: float) -> None:
        """Take in a lease that holds its chain in `promises`. `is_present`: this boot granted it."""
        assert lease.id not in self._leases, lease.id
        assert (lease.owner.id, lease.request) not in self._by_request, lease.request
        self.begun += 1
        self._leases[lease.id] = lease
        self._by_request[lease.owner.id, lease.request] = lease
        self._by_owner.setdefault(lease.owner, OwnerLedger()).add(lease.id, is_present=is_present)
        self._by_slot[lease.slot][lease.id] = lease
        use = self._uses[lease.slot]
        use.active += 1
        use.pending_tokens += lease.pending_tokens
        self._count_private(lease)
        if lease.accepted:
            self._by_worker.setdefault(lease.worker, WorkerLedger()).add(lease.id)
        else:
            self.dispatches.set(lease.id, dispatch_by)

    def accept(self, lease: Lease) -> bool:
        """The engine has it. False: that was known."""
        if lease.accepted:
            return False
        lease.accepted = True
        self.dispatches.cancel(lease.id)
        self._by_worker.setdefault(lease.worker, WorkerLedger()).add(lease.id)
        return True

    def prefilled(self, lease: Lease) -> None:
        self._uses[lease.slot].pending_tokens -= lease.pending_tokens
        lease.pending_tokens = 0

    def progress(self, lease: Lease, output_tokens: int) -> None:
        """`output_tokens` in total; a late, smaller figure changes nothing."""
        if output_tokens > lease.output_tokens:
            lease.output_tokens = output_tokens
            self._count_private(lease)

    def end(self, lease: Lease, how: End, *, promised_until: int | None = None) -> None:
        """`promised_until`: the event sequence up to which its promise stands; None: it promises nothing any more."""
        del self._leases[lease.id]
        self.ended[how] += 1
        key = (lease.owner.id, lease.request)
        if self._by_request.get(key) is lease:
            del self._by_request[key]
        ledger = self._by_owner[lease.owner]
        ledger.remove(lease.id)
        if not ledger.leases:
            del self._by_owner[lease.owner]
        if lease.accepted:
            running = self._by_worker[lease.worker]
            running.remove(lease.id)
            if not running.leases:
                del self._by_worker[lease.worker]
        self.dispatches.cancel(lease.id)
        del self._by_slot[lease.slot][lease.id]
        use = self._uses[lease.slot]
        use.active -= 1
        use.pending_tokens -= lease.pending_tokens
        use.private_blocks -= lease.private_blocks
        use.expected_blocks -= lease.expected_blocks
        if promised_until is None:
            self.promises.withdraw(lease.slot, lease.node)
        else:
            self.promises.keep(lease.slot, lease.node, promised_until)

    def _count_private(self, lease: Lease) -> None:
        use = self._uses[lease.slot]
        private = self._blocks(lease, lease.output_tokens)
        all_of_it = self._blocks(lease, max(lease.output_tokens, lease.expected_tokens))
        use.private_blocks += private - lease.private_blocks
        use.expected_blocks += all_of_it - private - lease.expected_blocks
        lease.private_blocks, lease.expected_blocks = private, all_of_it - private

    def _blocks(self, lease: Lease, output_tokens: int) -> int:
        """Beyond the prompt's full ones, with so much output."""
        return max(0, -(-(lease.input_tokens + output_tokens) // self._block_size) - lease.node.end)

    def check_integrity(self) -> None:
        """O(leases): every sum equals a recount, every index the list."""
        assert self.begun == len(self._leases) + self.ended.total(), "every lease ends once"
        assert len(self._by_request) == len(self._leases)
        nodes: dict[int, list[Node]] = {}
        for slot, leases in self._by_slot.items():
            assert all(lease.slot == slot for lease in leases.values())
            use = self._uses[slot]
            assert use.active == len(leases)
            assert use.pending_tokens == _sum(lease.pending_tokens for lease in leases.values())
            assert use.private_blocks == _sum(lease.private_blocks for lease in leases.values())
            assert use.expected_blocks == _sum(lease.expected_blocks for lease in leases.values())
            nodes[slot] = [lease.node for lease in leases.values()]
        assert sum(map(len, self._by_slot.values())) == len(self._leases)
        self.promises.check_integrity(nodes)
        self._check_ledgers()

    def _check_ledgers(self) -> None:
        owned = {i: owner for owner, ledger in self._by_owner.items() for i in ledger.leases}
        assert owned == {lease.id: lease.owner for lease in self._leases.values()}
        running = {i: worker for worker, ledger in self._by_worker.items() for i in ledger.leases}
        assert running == {i: x.worker for i, x in self._leases.items() if x.accepted}
        ledgers: list[OwnerLedger | WorkerLedger] = [*self._by_owner.values()]
        for ledger in (*ledgers, *self._by_worker.values()):
            assert ledger.leases, "no empty ledgers"
            ledger.check_integrity()
        for lease in self._leases.values():
            assert lease.id not in self.dispatches or not lease.accepted


def _sum(values: Iterable[int]) -> int:
    return sum(values)

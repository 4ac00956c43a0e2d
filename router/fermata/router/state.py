"""Everything one router knows, in one place, for the parts of the core that act on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from random import Random

from fermata.core.ids import LeaseId, RouterId, SessionId, Slot, WorkerId, make_lease_id
from fermata.core.ring import Ring
from fermata.core.spec import LivenessSpec, RouterPolicySpec
from fermata.router.admission import Admission, Facts, admission_rule
from fermata.router.affinity import Affinity
from fermata.router.approximate import ApproximateIndex
from fermata.router.decisions import Decisions
from fermata.router.lease import LeaseTable
from fermata.router.load import Loads, Thresholds
from fermata.router.model import Effects, Seats
from fermata.router.occupancy import Weights
from fermata.router.overload import Overload
from fermata.router.owner import Owners
from fermata.router.policy import PlacementPolicy, placement_policy
from fermata.router.prefix_index import PrefixIndex
from fermata.router.program_table import ProgramTable
from fermata.router.queue import Key
from fermata.router.recent import Recent
from fermata.router.shares import Shares
from fermata.router.tier_index import Hashes
from fermata.router.wait_statistics import WaitStatistics
from fermata.router.waiting import Waiting
from fermata.router.worker import ExpectedWorker, Workers
from fermata.wire.messages import TimingProfile

BOOT_WAIT_S = 5.0
"""Real seconds a booting router waits at most for its policy and the snapshots of the workers it knows."""

_WIDTH_S = 0.1
_MOST_SERIALS = (1 << 32) - 1
_INCARNATIONS = 1 << 22
_MOST_RECENT = 65_536


@dataclass(frozen=True, slots=True)
class RouterConfig:
    id: RouterId
    number: int
    """Router part of its lease ids."""
    incarnation: int
    """Another one each boot; 22 bits."""
    endpoint: str
    block_size: int
    """Tokens a routing block."""
    models: Mapping[str, str]
    """Name or alias -> name."""
    speedup: float = 1.0
    """Liveness limits are real seconds; the core's time runs this much faster."""
    seed: int = 0


class RouterState:
    def __init__(
        self, config: RouterConfig, *, policy: RouterPolicySpec | None, now: float
    ) -> None:
        width_s = _WIDTH_S * config.speedup
        self.config = config
        self.incarnation = config.incarnation % _INCARNATIONS
        self.policy = policy or RouterPolicySpec()
        self.policy_revision = 0
        self.has_policy = policy is not None
        self.is_booting = True
        self.is_settled = False
        """Every worker had the time to say Hello: what none of them can do, none will."""
        self.booted_at = now
        self.ring = Ring(0, {config.id: config.endpoint})
        self.generator = Random(config.seed)
        self.placement_policy = self._make_placement()
        self.effects = Effects()
        self.seats = Seats()
        self.index = PrefixIndex(limit_pairs=self.policy.kv.index_blocks)
        self.approximate = ApproximateIndex(self.policy.kv, width_s=width_s)
        self.leases = LeaseTable(block_size=config.block_size, width_s=width_s)
        self.loads = Loads(router=config.number, block_size=config.block_size, leases=self.leases)
        self.affinity = Affinity()
        self.shares = Shares()
        self.workers = Workers(width_s=width_s)
        self.owners = Owners(width_s=width_s)
        self.waiting = Waiting(self.policy.queue, width_s=width_s)
        self.programs = ProgramTable(
            block_size=config.block_size,
            width_s=width_s,
            idle_timeout_s=self.policy.programs.idle_timeout_s,
        )
        self.admission: Admission | None = None
        """Of programs; None under policies that let every turn go."""
        self.overload = Overload(self.programs, waited_s=self.real(1.0))
        self.done: Recent[Key, int] = Recent(_MOST_RECENT)
        """Requests that need no lease any more, and their attempt: a late Route of theirs is not answered."""
        self.handed: Recent[Key, float] = Recent(_MOST_RECENT)
        """Since when turns wait that another router held: they may be asked about here next."""
        self.leaving: dict[SessionId, None] = {}
        """Programs whose keys are another router's and that have turns here."""
        self.over: list[SessionId] = []
        """Those of them of which a turn has just ended."""
        self.awaited: set[WorkerId] = set()
        """Workers that a router that had our keys knows and that we do not."""
        self._settles_at = 0.0
        self.old_ends: Recent[LeaseId, None] = Recent(_MOST_RECENT)
        """Ended leases of earlier boots: a late claim does not bring them back."""
        self.decisions = Decisions()
        self.waits = WaitStatistics()
        self.must_judge = False
        """Capacity came free: waiting turns may go."""
        self.must_judge_all = False
        """What decides has changed: so may their reasons to wait."""
        self.counters: Counter[str] = Counter()
        self.warnings: list[str] = []
        """For people, since the shell last took them."""
        self._warned: Recent[str, None] = Recent(_MOST_RECENT)
        self._serial = 0
        self._apply_thresholds()
        self._apply_admission()

    @property
    def liveness(self) -> LivenessSpec:
        return self.policy.leases.liveness

    def real(self, seconds: float) -> float:
        """Real seconds in the core's time."""
        return seconds * self.config.speedup

    @property
    def dispatch_timeout_s(self) -> float:
        return self.real(self.policy.leases.dispatch_timeout_s)

    @property
    def boot_ends_at(self) -> float:
        return max(self.booted_at + self.real(BOOT_WAIT_S), self._settles_at)

    @property
    def is_in_ring(self) -> bool:
        """False: no key is ours any more; what we granted still is, until it ends."""
        return self.config.id in self.ring.members

    def await_workers(self, names: set[WorkerId], now: float) -> None:
        """We are new in the ring: turns wait until these are in, as at a boot, and as long at most."""
        self.awaited |= names
        self._settles_at = now + self.real(BOOT_WAIT_S)
        self.is_booting = True
        self.is_settled = False
        self.must_judge_all = True

    @property
    def has_all_workers(self) -> bool:
        """As far as we have heard."""
        known = (self.workers.by_id(name) for name in self.awaited)
        return self.workers.all_admitted and all(w is not None and w.is_admitted for w in known)

    def apply(self, policy: RouterPolicySpec) -> None:
        """The whole policy. Leases, affinity and what waits survive; waiting turns are judged anew."""
        before, self.policy = self.policy, policy
        is_switch, self.has_policy = self.has_policy, True
        if policy.scheduler != before.scheduler:
            self.placement_policy = self._make_placement()
        if _what_turns_wait_for(policy) != _what_turns_wait_for(before):
            self.waiting.apply(policy.queue, paced=is_switch)
            self.overload.keep({each.name for each in self.waiting.classes})
            self._apply_thresholds()
        if policy.scheduler != before.scheduler:
            self._apply_admission()
        self.programs.set_idle_timeout(policy.programs.idle_timeout_s)
        self.index.limit_pairs = policy.kv.index_blocks
        self.must_judge_all = True

    def _apply_thresholds(self) -> None:
        self.loads.apply(Thresholds(self.policy.overload, self.waiting.classes.levels))

    def _apply_admission(self) -> None:
        """The table is kept under every policy; what rules over it is made anew from it. O(programs)."""
        spec = self.policy.scheduler.thunder_agent
        self.programs.occupancy.reweigh(
            Weights(spec.tool_gap_weight, spec.human_gap_weight, spec.buffer_tokens)
        )
        self.admission = None
        if self.policy.scheduler.type == "ThunderAgent":
            facts = Facts(self.programs, self._cached_tokens, self._slots_of, self._timing)
            self.admission = admission_rule(spec, facts)
        self.programs.watcher = self.admission

    def _cached_tokens(self, chain: Hashes) -> dict[int, int]:
        depths = self.index.match(chain).get("device", {}) | self.approximate.match(chain)
        return {slot: depth * self.config.block_size for slot, depth in depths.items()}

    def _slots_of(self, model: str) -> int:
        return self.workers.of_model(model) & self.workers.ready

    def _timing(self, slot: int) -> TimingProfile | None:
        worker = self.workers.of_slot(slot)
        return None if worker is None else worker.info.timing

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.put(text, None)
            self.warnings.append(text)

    def open_slot(self, slot: Slot) -> int:
        number = self.seats.take(slot)
        self.leases.open_slot(number)
        self.programs.open_slot(number)
        return number

    def close_slot(self, slot: int) -> None:
        """Everything of a slot whose leases have ended."""
        self.leases.close_slot(slot)
        self.programs.close_slot(slot)
        self.loads.close(slot)
        self.index.drop(slot)
        self.approximate.close(slot)
        self.shares.close(slot)
        self.affinity.lose_slot(slot)
        self.seats.leave(slot)

    def expect(self, worker: WorkerId, rank: int, now: float) -> int:
        """A slot of a worker that only its leases' owners have told of so far."""
        expected = self.workers.expected.get(worker)
        if expected is None:
            expected = self.workers.expected[worker] = ExpectedWorker(worker)
            self.workers.arrivals.set(worker, now + self.real(self.liveness.owner_timeout_s))
        if rank not in expected.slots:
            expected.slots[rank] = self.open_slot(Slot(worker, rank))
        return expected.slots[rank]

    def charged_tokens(self, slot: int) -> int:
        """What we fill of the slot: what runs there, and under a rule of admission what idle programs keep there."""
        running = self.leases.decode_blocks(slot) * self.config.block_size
        if self.admission is None:
            return running
        return max(running, ceil(self.programs.occupancy.use(slot)))

    def waiting_tokens(self) -> int:
        """What waits for room. O(waiting)."""
        return sum(waiting.place.input_tokens for waiting in self.waiting)

    def next_lease_id(self) -> LeaseId:
        if self._serial == _MOST_SERIALS:
            # After four billion leases: ids stay unique and, but for a wrap, growing.
            self.incarnation = (self.incarnation + 1) % _INCARNATIONS
            self._serial = 0
        self._serial += 1
        return make_lease_id(
            router=self.config.number, incarnation=self.incarnation, serial=self._serial
        )

    def _make_placement(self) -> PlacementPolicy:
        return placement_policy(
            self.policy.scheduler, block_size=self.config.block_size, generator=self.generator
        )


def _what_turns_wait_for(policy: RouterPolicySpec) -> tuple[object, ...]:
    """The parts of a policy that decide when a turn may go."""
    return (policy.scheduler, policy.queue, policy.overload, policy.session_affinity)

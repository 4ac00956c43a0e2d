"""Load of a slot as a placement sees it: own table exact, other routers' part as the worker last reported it.

A LoadReport breaks a rank's load down by router, so foreign load is the sum of the others' rows and nothing is
subtracted across time. What follows from load (busy, above a queue's threshold) is kept as bit masks over slots,
renewed for the one slot that changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fermata.core.spec import OverloadSpec
from fermata.router.chain_links import bits
from fermata.router.lease import LeaseTable
from fermata.router.policy_class import QueueThreshold
from fermata.wire.messages import RankLoad, WorkerInfo


@dataclass(slots=True)
class SlotLoad:
    """`decode_blocks` and `pending_tokens` are this router's and, as far as it is known, the others'."""

    slot: int
    capacity_blocks: int
    """KV on the device, in routing blocks; 0 where the worker publishes none."""
    batched_tokens: int
    context_length: int
    blocks_a_page: float
    active: int = 0
    pending_tokens: int = 0
    decode_blocks: int = 0
    expected_blocks: int = 0
    """Of those, output that own turns are expected to make and have not made."""
    foreign_active: int = 0
    foreign_blocks: int = 0
    used_blocks: float = 0.0
    """On the device, as reported; whoever's they are."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    overload: OverloadSpec
    levels: Sequence[QueueThreshold]
    """The queue's, by level; see `policy_class`."""

    def is_busy(self, load: SlotLoad) -> bool:
        """Expected output does not count: it may never come."""
        overload = self.overload
        if overload.decode_blocks is not None and load.capacity_blocks:
            held = load.decode_blocks - load.expected_blocks
            if max(load.used_blocks, float(held)) > overload.decode_blocks * load.capacity_blocks:
                return True
        most = overload.prefill_tokens
        if most is not None and load.pending_tokens > most * load.batched_tokens:
            return True
        most = overload.prefill_token_count
        return most is not None and load.pending_tokens > most


class Loads:
    def __init__(self, *, router: int, block_size: int, leases: LeaseTable) -> None:
        self._router = router
        self._block_size = block_size
        self._leases = leases
        self._thresholds = Thresholds(OverloadSpec(), [QueueThreshold()])
        self._loads: dict[int, SlotLoad] = {}
        self.busy = 0
        """Slots, as a mask, that the overload limits call busy."""
        self.above = [0]
        """By level, the slots above that threshold."""
        self._among = 0
        self._chosen: list[SlotLoad] = []
        self.widest_ever: dict[str, int] = {}
        """Model -> the longest window a slot of it ever had here: what is longer waits for nothing."""
        self.narrowest = 0
        """Tokens that fit in the window of every slot."""

    def __getitem__(self, slot: int) -> SlotLoad:
        return self._loads[slot]

    def among(self, slots: int) -> list[SlotLoad]:
        """Loads of a mask of slots. Which are free changes rarely, so the last answer mostly serves again."""
        if slots != self._among:
            self._among = slots
            self._chosen = [self._loads[bit.bit_length() - 1] for bit in bits(slots)]
        return self._chosen

    def all(self) -> Iterable[SlotLoad]:
        return self._loads.values()

    def open(self, slot: int, info: WorkerInfo) -> None:
        blocks_a_page = info.block_size / self._block_size
        self._among = 0
        self._chosen = []
        self._loads[slot] = SlotLoad(
            slot=slot,
            capacity_blocks=int(info.kv_blocks.get("device", 0) * blocks_a_page),
            batched_tokens=info.max_batched_tokens,
            context_length=info.context_length,
            blocks_a_page=blocks_a_page,
        )
        self._measure()
        widest = self.widest_ever.get(info.model, 0)
        self.widest_ever[info.model] = max(widest, self.window(slot))
        self.renew(slot)

    def window(self, slot: int) -> int:
        """Tokens, prompt and output, that a request on the slot can have."""
        load = self._loads[slot]
        capacity = load.capacity_blocks * self._block_size
        return min(load.context_length, capacity) if capacity else load.context_length

    def _measure(self) -> None:
        self.narrowest = min((self.window(slot) for slot in self._loads), default=0)

    def close(self, slot: int) -> None:
        self._loads.pop(slot, None)
        self._among = 0
        self._chosen = []
        self._measure()
        self.busy &= ~(1 << slot)
        self.above = [mask & ~(1 << slot) for mask in self.above]

    def report(self, slot: int, rank: RankLoad) -> bool:
        """True when the slot stopped being busy, or above a threshold."""
        load = self._loads[slot]
        others = [row for row in rank.routers if row.router != self._router]
        load.foreign_active = sum(row.active + row.waiting for row in others)
        load.foreign_blocks = sum(-(-row.charged_tokens // self._block_size) for row in others)
        load.used_blocks = rank.kv_used.get("device", 0) * load.blocks_a_page
        return self.renew(slot)

    def renew(self, slot: int) -> bool:
        """After any change of the slot's leases. O(levels). True when it stopped being busy, or above a threshold."""
        load = self._loads.get(slot)
        if load is None:
            return False
        use = self._leases.use(slot)
        load.active = use.active + load.foreign_active
        load.pending_tokens = use.pending_tokens
        load.expected_blocks = use.expected_blocks
        load.decode_blocks = self._leases.decode_blocks(slot) + load.foreign_blocks
        return self._judge(load)

    def room(self, slots: int, level: int, busy_share: float) -> int:
        """Those of the slots that may take another turn, for a class of that threshold."""
        above = slots & self.above[level]
        free = slots & ~above & ~self.busy
        if busy_share < 1.0 and above.bit_count() >= busy_share * slots.bit_count():
            return 0
        return free

    def apply(self, thresholds: Thresholds) -> None:
        """Another policy. O(slots)."""
        self._thresholds = thresholds
        self.above = [0] * len(thresholds.levels)
        for load in self._loads.values():
            self._judge(load)

    def _judge(self, load: SlotLoad) -> bool:
        bit = 1 << load.slot
        is_busy = self._thresholds.is_busy(load)
        has_room = bool(self.busy & bit) and not is_busy
        self.busy = self.busy | bit if is_busy else self.busy & ~bit
        for level, threshold in enumerate(self._thresholds.levels):
            was_above = self.above[level] & bit
            if threshold.is_above(load.pending_tokens, load.batched_tokens):
                self.above[level] |= bit
            elif was_above:
                self.above[level] &= ~bit
                has_room = True
        return has_room

    def check_integrity(self) -> None:
        busy = 0
        levels = self._thresholds.levels
        above = [0] * len(levels)
        for slot, load in self._loads.items():
            use = self._leases.use(slot)
            assert load.active == use.active + load.foreign_active
            assert load.pending_tokens == use.pending_tokens
            assert load.expected_blocks == use.expected_blocks
            assert load.decode_blocks == self._leases.decode_blocks(slot) + load.foreign_blocks
            busy |= self._thresholds.is_busy(load) << slot
            for level, threshold in enumerate(levels):
                above[level] |= threshold.is_above(load.pending_tokens, load.batched_tokens) << slot
        assert (busy, above) == (self.busy, self.above)

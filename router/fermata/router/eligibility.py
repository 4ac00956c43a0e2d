"""Which slots could take a turn at all, whatever their load: ready, wide enough, not avoided, and its session's own."""

from __future__ import annotations

from dataclasses import dataclass

from fermata.router.affinity import affinity_key
from fermata.router.chain_links import bits
from fermata.router.model import Turn
from fermata.router.state import RouterState
from fermata.router.waiting import Reason


@dataclass(frozen=True, slots=True)
class Eligible:
    """At least one. `bound` is its session's slot, eligible or not."""

    slots: int
    bound: int | None


@dataclass(frozen=True, slots=True)
class Wait:
    """For `slots`, a mask, to have room; with none of them for what the reason says."""

    reason: Reason
    slots: int = 0


class Eligibility:
    def __init__(self, state: RouterState) -> None:
        self._state = state

    def of(self, turn: Turn, *, forced: bool = False) -> Eligible | Wait | str:
        """A text says why no worker here can ever take it. `forced`: its program's admission has no say any more."""
        state = self._state
        if state.is_booting:
            has_nobody = state.has_policy and not len(state.workers)
            return Wait("no_worker" if has_nobody else "booting")
        eligible = self.able(turn)
        if not eligible:
            widest = state.loads.widest_ever.get(turn.model)
            if widest is not None and turn.route.input_tokens >= widest and state.is_settled:
                return f"{turn.route.input_tokens} tokens do not fit any worker's window"
            return Wait("no_worker")
        eligible = eligible & ~state.workers.slots_of(turn.route.avoid) or eligible
        bound = self._bound(turn, eligible)
        if bound is not None and self._is_hard(turn):
            eligible = 1 << bound
        return self._admitted(turn, eligible, bound, forced=forced)

    def able(self, turn: Turn) -> int:
        """Those that are ready and wide enough, wherever its session and its program belong."""
        workers = self._state.workers
        return self._fitting(workers.of_model(turn.model) & workers.ready, turn)

    def _admitted(
        self, turn: Turn, eligible: int, bound: int | None, *, forced: bool
    ) -> Eligible | Wait:
        """What the admission of its program leaves of them."""
        state = self._state
        own = state.programs.turn((turn.owner.id, turn.route.request))
        if state.admission is None or own is None:
            return Eligible(eligible, bound)
        if forced:
            return Eligible(state.admission.force(own, eligible), bound)
        slots = state.admission.turn_ready(own, eligible, is_again=turn.route.attempt > 0)
        return Wait(slots) if isinstance(slots, str) else Eligible(slots, bound)

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

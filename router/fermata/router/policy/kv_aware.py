"""The cheapest slot, where cost weighs the prefill that is to be done against the decoding that is going on.

    prefill_scale * max(0, (pending prefill + input) / block - credit) + decode blocks after + weight * active

Credit is the blocks matched, by the weight of the best tier each lies in; decode blocks after are the slot's distinct
blocks and those the turn adds. Ties are broken by chance, from a seeded generator. Above temperature 0 the slot is
drawn by softmax over costs normalised to [0, 1].

`balance` bounds load before anything else counts: no slot above (1 + balance) x the mean of the candidates, in
requests. So affinity and hot prefixes can not pile sessions on one rank; beyond the bound a prefix is replicated
rather than chased.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp
from random import Random

from fermata.core.spec import KvAwareSpec
from fermata.router.load import SlotLoad
from fermata.router.policy.placement_policy import NOTHING_SCORED, Question, Scored
from fermata.router.prefix_index import Tier


class KvAware:
    def __init__(self, spec: KvAwareSpec, *, block_size: int, generator: Random) -> None:
        self.scored = NOTHING_SCORED
        self._spec = spec
        self._block_size = block_size
        self._generator = generator
        weights = spec.tier_weights
        by_tier: list[tuple[Tier, float]] = [
            ("device", weights.device),
            ("host", weights.host),
            ("shared", weights.shared),
            ("disk", weights.disk),
        ]
        self._weights = sorted(by_tier, key=lambda item: -item[1])

    def pick(self, question: Question, candidates: Sequence[SlotLoad]) -> int:
        if self._spec.balance is not None and len(candidates) > 1:
            candidates = bounded(candidates, self._spec.balance)
        if question.preferred is not None and any(
            load.slot == question.preferred for load in candidates
        ):
            self.scored = NOTHING_SCORED
            return question.preferred
        costs = self.costs(question, candidates)
        self.scored = Scored(candidates, costs)
        if self._spec.temperature:
            return candidates[self._draw(costs)].slot
        least = min(costs)
        best = [load.slot for load, cost in zip(candidates, costs, strict=True) if cost == least]
        return best[0] if len(best) == 1 else self._generator.choice(best)

    def costs(self, question: Question, candidates: Sequence[SlotLoad]) -> list[float]:
        credit = self._credit(question)
        scale, weight, size = (
            self._spec.prefill_scale,
            self._spec.decode_request_weight,
            self._block_size,
        )
        shared = question.shared
        costs: list[float] = []
        for load in candidates:
            slot = load.slot
            tokens = load.pending_tokens + question.input_tokens
            prefill = tokens / size - credit.get(slot, 0.0)
            added = question.blocks - shared.get(slot, 0)
            costs.append(
                (scale * prefill if prefill > 0 else 0.0)
                + load.decode_blocks
                + added
                + weight * load.active
            )
        return costs

    def _credit(self, question: Question) -> dict[int, float]:
        """A block counts once, in the dearest tier that has all up to it."""
        credit: dict[int, float] = {}
        covered: dict[int, int] = {}
        for tier, weight in self._weights:
            for slot, depth in question.match.get(tier, {}).items():
                more = depth - covered.get(slot, 0)
                if more > 0:
                    credit[slot] = credit.get(slot, 0.0) + more * weight
                    covered[slot] = depth
        return credit

    def _draw(self, costs: list[float]) -> int:
        least, most = min(costs), max(costs)
        if most == least:
            return self._generator.randrange(len(costs))
        spread = (most - least) * self._spec.temperature
        weights = [exp(-(cost - least) / spread) for cost in costs]
        (index,) = self._generator.choices(range(len(costs)), weights)
        return index


def bounded(candidates: Sequence[SlotLoad], balance: float) -> list[SlotLoad]:
    """Those that stay within the bound if they take one more request; never empty."""
    total = sum([load.active for load in candidates]) + 1
    most = ceil((1 + balance) * total / len(candidates))
    return [load for load in candidates if load.active < most]

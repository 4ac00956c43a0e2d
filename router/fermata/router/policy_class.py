"""Policy classes as the queue uses them: every field resolved, and thresholds by number.

A slot is *above* a threshold or not, kept as one bit mask a distinct threshold (`load.Loads`); a class names its
threshold by its place in that list, its level. Level 0 is the queue's own, the last one the pace: where no threshold is
set, turns that a policy switch freed are let go by it, so that they do not fall on the engines all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from fermata.core.spec import PolicyClassSpec, QueueSpec

T = TypeVar("T")

_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class QueueThreshold:
    """Pending prefill beyond which turns rather wait than join a slot; by share of its batch, in tokens, or both."""

    batches: float | None = None
    tokens: int | None = None

    def is_above(self, pending_tokens: int, batched_tokens: int) -> bool:
        if self.batches is not None and pending_tokens > self.batches * batched_tokens:
            return True
        return self.tokens is not None and pending_tokens > self.tokens

    @property
    def is_set(self) -> bool:
        return self.batches is not None or self.tokens is not None


PACE = QueueThreshold(batches=1.0)
"""A batch in prefill and at most a turn behind it: an engine that is fed so does not starve."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a class, a worker."""

    turns: int
    input_tokens: int | None
    cached_tokens: int | None


@dataclass(slots=True)
class ClassUse:
    """What waits of a class."""

    turns: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PolicyClass:
    number: int
    name: str
    rank: Callable[[float, float, int], float]
    quantum: int
    level: int
    pace_level: int
    busy_share: float
    limits: Limits
    priority_line: int | None

    def limit_reached(self, use: ClassUse, workers: int) -> str:
        """Which one, in words; empty while there is room for another turn."""
        limits, workers = self.limits, max(1, workers)
        for used, limit, what in (
            (use.turns, limits.turns, "turns"),
            (use.input_tokens, limits.input_tokens, "input tokens"),
            (use.cached_tokens, limits.cached_tokens, "cached tokens"),
        ):
            if limit is not None and used >= limit * workers:
                return f"{used} {what} of class {self.name} are waiting, the limit is {limit * workers}"
        return ""


def first_come(since: float, jump_s: float, uncached_tokens: int) -> float:
    return since - jump_s


def last_come(since: float, jump_s: float, uncached_tokens: int) -> float:
    return -(since + jump_s)


def weighted_shortest(since: float, jump_s: float, uncached_tokens: int) -> float:
    return -(1.0 + jump_s) / max(1, uncached_tokens)


_RANKS: dict[str, Callable[[float, float, int], float]] = {
    "FCFS": first_come,
    "LCFS": last_come,
    "WSPT": weighted_shortest,
}
"""Least first."""


class PolicyClasses:
    """The classes of one policy, by what a turn's header names and by its uncached length."""

    def __init__(self, spec: QueueSpec) -> None:
        self._spec = spec
        own = QueueThreshold(spec.threshold, spec.threshold_tokens)
        self.levels = [own]
        specs = spec.classes or [PolicyClassSpec(name=_DEFAULT)]
        thresholds = [self._threshold(each) for each in specs]
        for threshold in thresholds:
            if threshold not in self.levels:
                self.levels.append(threshold)
        self.levels.append(PACE)
        self._classes = [
            self._resolve(number, each, threshold)
            for number, (each, threshold) in enumerate(zip(specs, thresholds, strict=True))
        ]
        self._families: dict[str, list[tuple[int, PolicyClass]]] = {}
        for each, resolved in zip(specs, self._classes, strict=True):
            family = self._families.setdefault(each.family or each.name, [])
            family.append((each.min_uncached_tokens, resolved))
            family.sort(key=lambda item: -item[0])
        first = specs[0].family or specs[0].name
        self._default = self._families[spec.default_class or first]

    def __iter__(self) -> Iterator[PolicyClass]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def of(self, name: str, uncached_tokens: Callable[[], int]) -> PolicyClass:
        """`uncached_tokens` is asked only where a family has a class by length."""
        family = self._families.get(name, self._default)
        if len(family) == 1:
            return family[0][1]
        tokens = uncached_tokens()
        return next(found for least, found in family if tokens >= least)

    def _threshold(self, each: PolicyClassSpec) -> QueueThreshold:
        """A class that sets either has its own; otherwise it is the queue's."""
        if each.threshold is None and each.threshold_tokens is None:
            return self.levels[0]
        return QueueThreshold(each.threshold, each.threshold_tokens)

    def _resolve(
        self, number: int, each: PolicyClassSpec, threshold: QueueThreshold
    ) -> PolicyClass:
        spec = self._spec
        level = self.levels.index(threshold)
        return PolicyClass(
            number=number,
            name=each.name,
            rank=_RANKS[each.order or spec.order],
            quantum=each.quantum,
            level=level,
            pace_level=level if threshold.is_set else len(self.levels) - 1,
            busy_share=_given(each.busy_share, spec.busy_share),
            limits=Limits(
                turns=_given(each.limit, spec.limit),
                input_tokens=_given(each.input_tokens_limit, spec.input_tokens_limit),
                cached_tokens=_given(each.cached_tokens_limit, spec.cached_tokens_limit),
            ),
            priority_line=_given(each.priority_line, spec.priority_line),
        )


def _given(own: T | None, inherited: T) -> T:
    return inherited if own is None else own

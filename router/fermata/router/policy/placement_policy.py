"""The seam between the router's core and what it may be configured to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fermata.router.load import SlotLoad
from fermata.router.prefix_index import Match, Tier


@dataclass(frozen=True, slots=True)
class Question:
    """What is known of the turn. Depths are in routing blocks, by slot."""

    input_tokens: int
    blocks: int
    """Its prompt's, the unfilled last one included."""
    match: Match = field(default_factory=dict[Tier, dict[int, int]])
    """Stored or promised; a promise counts as being on the device."""
    shared: dict[int, int] = field(default_factory=dict[int, int])
    """How far its prefix runs along an active lease of the slot: blocks it would not add."""
    preferred: int | None = None
    """Its session's slot; one of the candidates, unless None."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a pick weighed, one cost a candidate."""

    candidates: Sequence[SlotLoad] = ()
    costs: Sequence[float] = ()


NOTHING_SCORED = Scored()


class PlacementPolicy(Protocol):
    scored: Scored
    """By the last pick; nothing where it did not have to weigh."""

    def pick(self, question: Question, candidates: Sequence[SlotLoad]) -> int:
        """One of the candidates' slots; there is at least one."""
        ...

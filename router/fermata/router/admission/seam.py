"""The seam behind which admission rules are plug-ins.

A rule is told what happens to programs (`Watcher`), is asked about each turn that is ready, and lets held programs go
in `round`s: at its own pace, and soon after whatever set `is_due`. It moves programs through the table only. What it
may know beyond the table (who has which prefix, which slots serve a model, how long gaps last, the order in which an
engine would evict, a worker's timing) comes through `Facts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from fermata.router.program import Program, ProgramTurn
from fermata.router.program_table import ProgramTable, Watcher
from fermata.router.tier_index import Hashes
from fermata.wire.messages import TimingProfile

HoldReason = Literal["pressure", "admission"]
"""Of a paused program's turn, and of a new program's first."""


@dataclass(frozen=True, slots=True)
class Facts:
    table: ProgramTable
    """Its `gaps` and `evictions` too."""
    cached: Callable[[Hashes], dict[int, int]]
    """By slot, tokens of a chain that are on the device."""
    slots_of: Callable[[str], int]
    """The slots, as a mask, that can take turns of a model now."""
    timing: Callable[[int], TimingProfile | None]
    """A slot's, if its worker told."""


class Admission(Watcher, Protocol):
    is_due: bool
    """Something happened after which held programs may go, or others must."""

    def turn_ready(self, turn: ProgramTurn, eligible: int, *, is_again: bool) -> int | HoldReason:
        """Of the eligible slots those where it may go, at least one; or why it has to wait.

        Asked whenever the turn is judged, so the answer to a held one stays until a round lets it go. `is_again`: it
        ran already and lost its worker; such a turn never waits.
        """
        ...

    def force(self, turn: ProgramTurn, eligible: int) -> int:
        """It has waited for as long as it may: where it shall go, whatever that does to the slot."""
        ...

    def completed(self, turn: ProgramTurn, cached_tokens: int) -> None:
        """A turn finished, and so much of its prompt was found in cache."""
        ...

    def round(self, now: float) -> list[Program]:
        """Let go and pause; returns the programs whose waiting turns may go. O(what changed), not O(table)."""
        ...

    def next_round(self) -> float | None:
        """When the next round is due anyway."""
        ...

    def check_integrity(self) -> None: ...

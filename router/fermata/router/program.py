"""A program: one session as the scheduler sees it, and the turns that move it.

    new --grant--> Active/Reasoning --finish--> Active/Acting --turn--> Active/Reasoning ...
                        |  marked: at its finish   | pressure
                        +------> Paused <----------+          Paused --resume--> Active

Reasoning: a turn of it waits or runs. Acting: between turns. Active: its context is charged to a slot. Paused: it holds
none, and its next turn waits to be resumed. A new program holds none either; it exists because its first turn does.

A turn that comes while another one is there counts with it when one prompt extends the other (repeats, parallel
samples); with another prompt (a title generator) it is served *beside*, and moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fermata.core.ids import RequestId, RoutingKey, SessionId
from fermata.router.model import NO_HASHES
from fermata.router.occupancy import HUMAN, REASONING, TOOL, Charge, Room
from fermata.router.tier_index import Hashes

Gap = Literal["tool", "human"]
TurnKey = tuple[str, RequestId]
"""Owner and request."""


@dataclass(slots=True)
class Standing:
    """How a program stood between two turns: what a turn that comes to nothing leaves behind."""

    room: Room | None
    """None: paused."""
    chain: Hashes
    context_tokens: int
    acting_since: float
    gap: Gap


@dataclass(slots=True, eq=False)
class Program:
    session: SessionId
    parent: SessionId
    key: RoutingKey
    inferred: bool
    created_at: float
    model: str = ""
    chain: Hashes = NO_HASHES
    """Of its last turn; full blocks of the prompt."""
    context_tokens: int = 0
    steps: int = 0
    """Turns that finished; parallel ones count once."""
    acting_since: float = 0.0
    gap: Gap = "tool"
    """Class of the gap that its last turn ended in."""
    priority: int = 0
    charge: Charge | None = None
    """Its place on a slot; None: new or paused."""
    is_paused: bool = False
    is_marked: bool = False
    """To be paused when its turn ends, if its slot still needs that."""
    is_final: bool = False
    """Ends with its last turn."""
    drops_kv: bool = False
    """And then nobody comes back for what is cached."""
    is_live: bool = True
    is_hearsay: bool = False
    """Known by what others told, and by no turn of its own so far."""
    turns: dict[TurnKey, ProgramTurn] = field(default_factory=dict["TurnKey", "ProgramTurn"])
    """Those that count: it is Reasoning while there is one."""
    standing: Standing | None = None
    """Before the first of `turns`; None for a program that began with it."""
    has_finished: bool = False
    """One of the turns since `standing` did."""
    has_called_tools: bool = False
    """Some turn of it ended in a tool call that the server could see."""

    @property
    def slot(self) -> int | None:
        return None if self.charge is None else self.charge.room.slot

    @property
    def is_reasoning(self) -> bool:
        return bool(self.turns)

    @property
    def is_new(self) -> bool:
        return self.charge is None and not self.is_paused

    @property
    def has_waiting_turn(self) -> bool:
        return not all(turn.is_running for turn in self.turns.values())

    @property
    def group(self) -> int:
        """Of its charge."""
        if self.turns:
            return REASONING
        return HUMAN if self.gap == "human" else TOOL

    @property
    def need_tokens(self) -> int:
        """What it takes to resume it: its waiting turn's prompt, else its context."""
        return max((turn.tokens for turn in self.turns.values()), default=self.context_tokens)

    def gap_after(self, reason: str) -> Gap:
        """The class of gap a finish reason leads into.

        A plain stop of a program whose tool calls we see is a question to a person. Where we never saw one, its client
        may read them out of the text, so a stop tells nothing and nothing is discounted for it.
        """
        self.has_called_tools |= reason == "tool_calls"
        return "human" if reason == "stop" and self.has_called_tools else "tool"

    @property
    def need_chain(self) -> Hashes:
        for turn in self.turns.values():
            return turn.chain
        return self.chain


@dataclass(slots=True, eq=False)
class ProgramTurn:
    key: TurnKey
    program: Program
    chain: Hashes
    tokens: int
    is_beside: bool = False
    is_running: bool = False
    """Granted; else it waits."""
    slot: int = -1
    """Where it was granted."""
    expected_tokens: int = 0
    """Of its prompt, what its program left on the slot it was granted."""


def extends(one: Hashes, other: Hashes) -> bool:
    """One prompt is the other, or goes on from it, as far as full blocks tell. O(1): a hash names its whole prefix."""
    shorter = min(len(one), len(other))
    return shorter > 0 and one[shorter - 1] == other[shorter - 1]

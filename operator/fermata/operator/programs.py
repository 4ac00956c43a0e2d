"""Programs of all routers as a table for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fermata.operator.columns import aligned
from fermata.wire.messages import ProgramRow

HEADER = (
    "program",
    "phase",
    "state",
    "slot",
    "context",
    "steps",
    "turns",
    "idle",
    "waits",
    "reason",
)
_LEFT = 4
LONGEST_NAME = 40


def summary(rows: Sequence[ProgramRow], *, routers: int) -> str:
    paused = sum(row.state == "paused" for row in rows)
    waiting = sum(bool(row.reason) for row in rows)
    reasoning = sum(row.phase == "reasoning" for row in rows)
    where = "1 router" if routers == 1 else f"{routers} routers"
    return (
        f"{_count(len(rows), 'program')} on {where}: {reasoning} reasoning, {waiting} of them waiting;"
        f" {paused} paused"
    )


def table(rows: Iterable[ProgramRow], *, limit: int) -> str:
    """Those that wait come first, longest first; then those with a turn, then those that are between turns."""
    ordered = sorted(rows, key=_rank)
    lines = [HEADER, *(_cells(row) for row in ordered[:limit])]
    text = aligned(lines, left=_LEFT)
    left = len(ordered) - limit
    return text if left <= 0 else f"{text}\n... and {_count(left, 'program')} more (--limit)"


def _rank(row: ProgramRow) -> tuple[float, bool, float, str]:
    return (-row.waited_s, row.phase == "acting", row.idle_s, row.session)


def _cells(row: ProgramRow) -> tuple[str, ...]:
    return (
        shortened(row.session),
        row.phase,
        _state(row),
        f"{row.worker}/{row.rank}" if row.worker else "-",
        str(row.context_tokens),
        str(row.steps),
        str(row.turns),
        seconds(row.idle_s) if row.phase == "acting" else "-",
        seconds(row.waited_s) if row.reason else "-",
        row.reason or "-",
    )


def _state(row: ProgramRow) -> str:
    marks = [word for word, is_so in (("marked", row.is_marked), ("final", row.is_final)) if is_so]
    return f"{row.state} ({', '.join(marks)})" if marks else row.state


def shortened(name: str) -> str:
    """Ids come from clients: printable, and not wider than a column may be. The end tells more of them apart."""
    name = "".join(c if c.isprintable() else "?" for c in name)
    if len(name) <= LONGEST_NAME:
        return name
    half = (LONGEST_NAME - 3) // 2
    return f"{name[:half]}...{name[half + 3 - LONGEST_NAME :]}"


def seconds(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    if value < 6000:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

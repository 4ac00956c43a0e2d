"""What became of a turn, in words and columns, as routers remember it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fermata.operator.columns import aligned
from fermata.operator.programs import seconds, shortened
from fermata.wire.messages import Candidate, Decision

_REASONS = {
    "cost": "it was the cheapest",
    "affinity": "its session is bound there",
    "program": "its program was admitted there",
    "only": "no other could take it",
    "policy": "it was its turn",
}
_HOLDS = {
    "no_worker": "no worker can take it",
    "booting": "the router is booting",
    "queue": "all slots that could take it are busy",
    "pressure": "its program is paused, there is no room for it",
    "admission": "its program is new, there is no room for it yet",
    "policy": "the policy was changed, and turns are let go one by one",
}
_ID_PREFIXES = ("chatcmpl-", "cmpl-")


def request_of(text: str) -> str:
    """The request, from what a client sees of it: its answer's id, or the header x-request-id."""
    for prefix in _ID_PREFIXES:
        text = text.removeprefix(prefix)
    return text


def explanation(decisions: Sequence[Decision]) -> str:
    """In the order in which it happened: the oldest first."""
    blocks: list[str] = []
    last = ""
    for one in sorted(decisions, key=lambda decision: -decision.age_s):
        if one.request != last:
            last = one.request
            session = f" of {shortened(one.session)}" if one.session else ", of no session"
            blocks.append(
                f"request {one.request}{session}, {one.input_tokens} tokens, asked by {one.owner}"
            )
        blocks.append(_told(one))
    return "\n".join(blocks)


def _told(one: Decision) -> str:
    head = f"  {seconds(one.age_s)} ago, attempt {one.attempt}, {one.policy} (revision {one.policy_revision}): "
    match one.what:
        case "grant":
            waited = f" after {seconds(one.waited_s)}" if one.waited_s else ""
            why = _REASONS.get(one.reason, one.reason)
            return f"{head}granted to {one.worker}/{one.rank}{waited}, {why}\n{_table(one)}"
        case "hold":
            why = _HOLDS.get(one.reason, one.reason)
            return (
                f"{head}held ({one.reason}): {why}; for {seconds(max(0.0, one.waited_s))} at most"
            )
        case "reject":
            return f"{head}refused, {one.reason}"
        case "moved":
            return f"{head}sent on to the router its session belongs to"


def _table(one: Decision) -> str:
    header = ("", "slot", "room", "cost", "cached blocks", "shared")
    rows = [header, *(_cells(candidate, one) for candidate in one.candidates)]
    return "\n".join(f"    {line}" for line in aligned(rows, left=3).splitlines())


def _cells(candidate: Candidate, one: Decision) -> tuple[str, ...]:
    is_chosen = (candidate.worker, candidate.rank) == (one.worker, one.rank)
    cached = ", ".join(f"{count} {tier}" for tier, count in sorted(candidate.matched.items()))
    return (
        ">" if is_chosen else "",
        f"{candidate.worker}/{candidate.rank}",
        "yes" if candidate.has_room else "no",
        "-" if candidate.score is None else f"{candidate.score:.2f}",
        cached or "-",
        str(candidate.shared_blocks),
    )

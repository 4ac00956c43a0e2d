"""The router's numbers that have labels: waits by reason, and slots by worker and rank. Made when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fermata.router.state import RouterState
from fermata.router.wait_statistics import BOUNDS_S


@dataclass(frozen=True, slots=True)
class Sample:
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """`labels` in the order of each sample's; a histogram's samples end with the bucket's upper bound."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    samples: list[Sample]
    sums: dict[tuple[str, ...], float] | None = None
    """Of a histogram, by its other labels."""


def families(state: RouterState) -> Iterator[Family]:
    yield _holds(state)
    yield _waits(state)
    yield from _slots(state)


def _holds(state: RouterState) -> Family:
    samples = [Sample((reason,), count) for reason, count in sorted(state.waits.holds.items())]
    return Family(
        "turns_held", "Waits of turns, by what they wait for", "counter", ("reason",), samples
    )


def _waits(state: RouterState) -> Family:
    samples: list[Sample] = []
    for reason, counts in sorted(state.waits.counts.items()):
        total = 0
        for bound, count in zip([*map(repr, BOUNDS_S), "+Inf"], list(counts), strict=True):
            total += count
            samples.append(Sample((reason, bound), total))
    sums: dict[tuple[str, ...], float] = {
        (reason,): total for reason, total in list(state.waits.sums_s.items())
    }
    return Family(
        "wait_seconds",
        "How long turns had waited when they were granted, by what for",
        "histogram",
        ("reason",),
        samples,
        sums,
    )


def _slots(state: RouterState) -> Iterator[Family]:
    occupancy, names = state.programs.occupancy, state.seats.names
    rooms = [(room, names[slot]) for slot, room in list(occupancy.rooms.items()) if slot in names]
    labels = ("worker", "rank")

    def family(name: str, help_text: str, values: list[float]) -> Family:
        samples = [
            Sample((str(place.worker), str(place.rank)), value)
            for (_, place), value in zip(rooms, values, strict=True)
        ]
        return Family(name, help_text, "gauge", labels, samples)

    use = [occupancy.use(room.slot) for room, _ in rooms]
    yield family("slot_use_tokens", "KV charged to programs on the slot, shared blocks once", use)
    yield family(
        "slot_capacity_tokens",
        "KV that this router may fill there; 0 where the worker tells none",
        [float(room.capacity or 0) for room, _ in rooms],
    )
    yield family(
        "slot_occupancy",
        "The one over the other",
        [tokens / room.capacity if room.capacity else 0.0 for tokens, (room, _) in zip(use, rooms, strict=True)],
    )  # fmt: skip
    yield family(
        "slot_programs",
        "Active programs on the slot",
        [float(occupancy.programs(room.slot)) for room, _ in rooms],
    )

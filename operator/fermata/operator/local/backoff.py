"""How long to wait before a process that died is started again. Pure."""

from __future__ import annotations

FIRST_S = 0.2
FACTOR = 2.0
LONGEST_S = 30.0
RAN_WELL_S = 10.0


class Backoff:
    """Doubles from `FIRST_S` up to `LONGEST_S`; a run of `RAN_WELL_S` or more starts over.

    The first restart is nearly at once: a worker that was killed should be back before its router has noticed.
    """

    def __init__(self) -> None:
        self.failures = 0

    def after(self, ran_s: float) -> float:
        """The wait after a run of `ran_s` seconds."""
        if ran_s >= RAN_WELL_S:
            self.failures = 0
        # Doubling stops long before a float would overflow.
        wait = min(LONGEST_S, FIRST_S * FACTOR ** min(self.failures, 20))
        self.failures += 1
        return wait

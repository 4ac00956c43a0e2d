"""One rank's KV budget, leased to the routers that place turns here in shares that never add up to more than it.

A router admits programs only inside its share, and tells each second what it has charged and what waits for room; from
that the shares are struck anew. Whoever asks for no more than an even part gets what it asks for; the others divide the
rest by what they still lack; what nobody asks for is spread evenly, so that a first program finds room at once.

A share that was told can not be taken back by changing one's mind: a router acts on the last one it *heard*. So each is
numbered, a lower one frees its difference only once the router has answered with its number and has let go of what it
had charged above it, and a higher one is told only out of what is free. A router that falls silent has its share
returned when it must have given up this worker itself; what of its turns still runs here stays counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SILENCE_S = 5.0
"""Real seconds; above the `workerTimeout` after which a router that hears nothing drops the rank's programs."""
_STEP = 64
"""A share moves only by more than this part of the budget: each move is news to a router's admission."""


@dataclass(slots=True)
class _Account:
    """What one router was told and said."""

    heard_at: float
    charged: int = 0
    waiting: int = 0
    told: int = 0
    number: int = 0
    """Of the share told last."""
    answered: int = 0
    """Number of the share it acts on."""
    ceiling: int = 0
    """The largest share it may believe in."""
    running: int = 0
    """Tokens of its turns that the engine has."""

    @property
    def wanted(self) -> int:
        return max(self.charged, self.running) + self.waiting

    @property
    def reserved(self) -> int:
        return max(self.ceiling, self.charged, self.running)


@dataclass(frozen=True, slots=True)
class Share:
    tokens: int
    number: int


class Budget:
    """Times are real seconds. Every method is O(routers)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._accounts: dict[int, _Account] = {}
        self._numbers = 0

    def joined(self, router: int, now: float) -> None:
        """It booted, or is new: it acts on no share yet, and wants as much as its predecessor did."""
        known = self._accounts.get(router)
        self._numbers += 1
        account = self._accounts[router] = _Account(now, number=self._numbers)
        if known is not None:
            account.waiting, account.running = known.wanted, known.running

    def left(self, router: int) -> None:
        """It is in no ring any more and has no turn here."""
        self._accounts.pop(router, None)

    def heard(self, router: int, *, charged: int, waiting: int, number: int, now: float) -> None:
        account = self._accounts.get(router)
        if account is None:
            return
        account.heard_at = now
        account.charged, account.waiting = max(0, charged), max(0, waiting)
        account.answered = number

    def rebalance(self, running: Mapping[int, int], now: float) -> None:
        """`running`: tokens of the turns the engine has, by router. Once a tick."""
        for router, account in self._accounts.items():
            account.running = running.get(router, 0)
            if now - account.heard_at > SILENCE_S:
                account.charged = account.waiting = 0
                if account.told or account.ceiling:
                    self._tell(account, 0)
                    account.ceiling = 0
            elif account.answered == account.number:
                account.ceiling = account.told
        alive = {r: a for r, a in self._accounts.items() if now - a.heard_at <= SILENCE_S}
        strangers = sum(n for router, n in running.items() if router not in self._accounts)
        targets = divided(self.capacity, {r: a.wanted for r, a in alive.items()})
        self._shrink(alive, targets)
        self._grow(alive, targets, strangers)

    def share(self, router: int) -> Share:
        account = self._accounts.get(router)
        return Share(0, 0) if account is None else Share(account.told, account.number)

    def _shrink(self, alive: Mapping[int, _Account], targets: Mapping[int, int]) -> None:
        for router, account in alive.items():
            if self._differs(account.told, targets[router]) and targets[router] < account.told:
                self._tell(account, targets[router])

    def _grow(
        self, alive: Mapping[int, _Account], targets: Mapping[int, int], strangers: int
    ) -> None:
        free = self.capacity - strangers - sum(a.reserved for a in self._accounts.values())
        for router, account in sorted(alive.items(), key=lambda item: (item[1].told, item[0])):
            if targets[router] <= account.told:
                continue
            # What it has reserved above its share is its own already.
            share = min(targets[router], account.reserved + free)
            if share > account.told and self._differs(account.told, share):
                free -= max(0, share - account.reserved)
                self._tell(account, share)

    def _differs(self, told: int, share: int) -> bool:
        return abs(share - told) * _STEP > self.capacity or (not told and share > 0)

    def _tell(self, account: _Account, share: int) -> None:
        self._numbers += 1
        account.told, account.number = share, self._numbers
        account.ceiling = max(account.ceiling, share)

    def check_integrity(self) -> None:
        assert sum(a.ceiling for a in self._accounts.values()) <= self.capacity
        for account in self._accounts.values():
            assert 0 <= account.told <= account.ceiling
            assert account.answered <= account.number


def divided(capacity: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Shares by demand, of which the sum is at most the capacity."""
    if not wanted:
        return {}
    even = capacity // len(wanted)
    total = sum(wanted.values())
    if total <= capacity:
        spare = (capacity - total) // len(wanted)
        return {router: tokens + spare for router, tokens in wanted.items()}
    sure = {router: min(tokens, even) for router, tokens in wanted.items()}
    rest = capacity - sum(sure.values())
    lacking = total - sum(sure.values())
    return {
        router: sure[router] + rest * (tokens - sure[router]) // lacking
        for router, tokens in wanted.items()
    }

"""Well-typed messages that make no sense, by the thousand: none raises, and every sum stays a recount's.

Drawn by a plain generator rather than by Hypothesis, which draws too few of each kind in the time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random
from typing import Any

from fermata.core.ids import RouterId, make_lease_id
from fermata.core.spec import OverloadSpec, QueueSpec, RouterPolicySpec
from fermata.router.core import Router, RouterConfig
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

POLICY = RouterPolicySpec(overload=OverloadSpec(prefill_tokens=6.0), queue=QueueSpec(limit=3))
SENSE = 0.75
"""How often a field makes sense: nonsense alone is refused at the door and gets nowhere."""


class Nonsense:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pick = self.random.choice

    def odd(self) -> int:
        return self.pick([-1, -7, 0, 99, 1 << 31, -(1 << 62), (1 << 63) - 1])

    def number(self, low: int = 0, high: int = 5) -> int:
        sensible = self.random.random() < SENSE
        return self.random.randint(low, high) if sensible else self.odd()

    def word(self, *sensible: str) -> str:
        return self.pick(sensible) if self.random.random() < SENSE else self.pick(["", "?", "w9"])

    def seconds(self) -> float:
        return self.pick([0.0, 1.5, -3.0, 1e300, float("inf"), float("-inf"), float("nan")])

    def yes(self) -> bool:
        return self.random.random() < 0.5

    def some(self, make: Any, most: int = 2) -> list[Any]:
        return [make() for _ in range(self.random.randint(0, most))]

    def lease(self) -> int:
        boot = self.pick([1, 1, 9])
        known = make_lease_id(router=1, incarnation=boot, serial=self.random.randint(1, 9))
        return known if self.random.random() < SENSE else self.odd()

    def tier(self) -> Any:
        return self.pick(["device", "device", "host"])

    def event(self) -> wire.KvEvent:
        parent = self.pick([None, None, self.pick([-1, 1, 2, 3, 4])])
        return self.pick(
            [
                wire.KvStored(parent, self.number(1, 2), self.tier()),
                wire.KvRemoved(self.number(0, 1), self.tier()),
                wire.KvCleared(self.pick([None, self.tier()])),
            ]
        )

    def route(self) -> wire.Route:
        return wire.Route(
            request=self.word("q1", "q2", "q3", "q4"),  # type: ignore[arg-type]
            attempt=self.number(0, 2),
            key=self.word("k"),  # type: ignore[arg-type]
            epoch=self.number(0, 1),
            model=self.word("m"),
            input_tokens=self.number(20, 60),
            max_tokens=self.number(),
            session=self.word("s", "t"),  # type: ignore[arg-type]
            parent=self.word("p"),  # type: ignore[arg-type]
            avoid=self.some(lambda: self.word("w0", "w1")),
            waited_s=self.seconds(),
            client_timeout_s=self.seconds(),
            streaming=self.yes(),
        )

    def progress(self) -> wire.LeaseProgress:
        kinds: list[Any] = ["accepted", "prefilled", "tokens", "finished", "cancelled", "failed"]
        return wire.LeaseProgress(
            lease=self.lease() if self.random.random() < 0.9 else 0,  # type: ignore[arg-type]
            kind=self.pick(kinds),
            output_tokens=self.number(),
            event_sequence=self.number(),
            request=self.word("q1", "q2"),  # type: ignore[arg-type]
        )

    def claim(self) -> wire.LeaseClaim:
        return wire.LeaseClaim(
            lease=self.lease(),  # type: ignore[arg-type]
            request=self.word("q1", "q5"),  # type: ignore[arg-type]
            attempt=self.number(),
            worker=self.word("w0", "w1", "w5"),  # type: ignore[arg-type]
            rank=self.number(0, 1),
            input_tokens=self.number(),
            output_tokens=self.number(),
            blocks=self.number(0, 2),
            accepted=self.yes(),
            prefilled=self.yes(),
            key=self.word("k"),  # type: ignore[arg-type]
            session=self.word("s"),  # type: ignore[arg-type]
        )

    def info(self) -> wire.WorkerInfo:
        return wire.WorkerInfo(
            endpoint="x",
            model=self.word("m"),
            ranks=self.number(1, 2),
            block_size=self.pick([1, 2, 4, 4, 4, 0, -4]),
            routing_block_size=self.pick([4, 4, 4, 4, 0]),
            kv_blocks={self.tier(): self.number(50, 100)},
            max_sequences=self.number(),
            max_batched_tokens=self.number(1, 20),
            context_length=self.number(40, 200),
        )

    def rank_load(self) -> wire.RankLoad:
        row = lambda: wire.RouterLoad(self.number(), self.number(), self.number(), self.number())  # noqa: E731
        used = {self.tier(): self.number()}
        return wire.RankLoad(
            self.number(0, 1), self.number(), self.number(), used, self.number(), self.some(row)
        )

    def from_frontend(self) -> wire.Message:
        return self.pick(
            [
                self.route,
                self.route,
                self.route,
                lambda: wire.Progress(self.some(self.progress, 3)),
                lambda: wire.Progress(self.some(self.progress, 3)),
                lambda: wire.LeaseClaims(self.some(self.claim)),
                lambda: wire.LeaseList(self.lease()),
                *self.from_anyone("frontend"),
            ]
        )()

    def from_worker(self, name: str) -> wire.Message:
        return self.pick(
            [
                lambda: wire.Hello("worker", name, self.number(1, 1), self.info()),
                lambda: wire.KvEvents(self.number(0, 1), self.number(0, 2), self.some(self.event, 3)),
                lambda: wire.KvEvents(self.number(0, 1), self.number(0, 2), self.some(self.event, 3)),
                lambda: wire.SnapshotChunk(
                    self.number(0, 1), self.number(1, 3), self.number(0, 1), self.yes(),
                    self.number(-1, 2), [wire.KvStored(None, self.number(0, 2))],
                ),
                lambda: wire.LoadReport(self.some(self.rank_load)),
                lambda: wire.LeaseList(self.number()),
                lambda: wire.DrainStatus(self.pick(["serving", "draining", "drained"]), self.number()),
                *self.from_anyone("worker"),
            ]
        )()  # fmt: skip

    def from_anyone(self, role: Any) -> list[Any]:
        def beat() -> wire.Heartbeat:
            return wire.Heartbeat(
                self.number(), self.lease(), self.number(), self.odd(), self.some(self.number)
            )

        rarely = self.random.random() < 0.1
        return [beat, (lambda: wire.Bye(self.number())) if rarely else beat]

    def frame(self, message: wire.Message) -> memoryview:
        """Mostly as long as the message says. Block n follows block n - 1; lies about that are another test's."""
        blocks: list[int] = []
        if isinstance(message, wire.KvEvents):
            for event in message.events:
                count = 0 if isinstance(event, wire.KvCleared) else max(0, min(9, event.count))
                start = self.random.randint(1, 5)
                if isinstance(event, wire.KvStored):
                    start = (event.parent or 0) % 99 + 1
                blocks += range(start, start + count)
            if self.random.random() > SENSE:
                blocks.append(99)
        else:
            blocks += range(1, 1 + self.pick([0, 1, 2, 4]))
        return memoryview(array("Q", blocks)).cast("B")


class Stage:
    """A router, two workers and two owners that come back under new incarnations when they are gone."""

    def __init__(self) -> None:
        config = RouterConfig(
            id=RouterId("r"), number=1, incarnation=1, endpoint="x", block_size=4, models={"m": "m"}
        )
        self.router, self.now = Router(config, now=0.0, policy=POLICY), 0.0
        self.boots: Counter[str] = Counter()

    def say(self, peer: Peer, message: wire.Message, frame: memoryview) -> list[wire.Message]:
        sends = self.router.receive(peer, message, frame, self.now)
        self.router.check_integrity()
        return [send.message for send in sends if send.to == peer]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.router.next_deadline(self.now)
        if due is not None and due <= self.now:
            self.router.tick(self.now)
            self.router.check_integrity()

    def owner(self, name: str) -> Peer:
        peer = Peer(wire.Role.FRONTEND, name, self.boots[name])
        if self.router.state.owners.get(peer) is None:
            self.boots[name] += 1
            peer = Peer(wire.Role.FRONTEND, name, self.boots[name])
            self.say(peer, wire.Hello("frontend", name, peer.incarnation), memoryview(b""))
        return peer

    def worker(self, name: str) -> Peer:
        peer = Peer(wire.Role.WORKER, name, self.boots[name])
        if self.router.state.workers.get(peer) is None:
            self.boots[name] += 1
            peer = Peer(wire.Role.WORKER, name, self.boots[name])
            info = wire.WorkerInfo("x", "m", 2, 4, 4, {"device": 100}, 8, 8, 200)
            hello = wire.Hello("worker", name, peer.incarnation, info)
            for answer in self.say(peer, hello, memoryview(b"")):
                if isinstance(answer, wire.SnapshotRequest):
                    chunk = wire.SnapshotChunk(answer.rank, answer.request, 0, True, -1, [])
                    self.say(peer, chunk, memoryview(b""))
        return peer


def test_no_typed_message_whatever_it_says_raises_or_upsets_a_sum() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        draw, stage = Nonsense(seed), Stage()
        for _ in range(80):
            name = draw.pick(["f0", "f1", "w0", "w1"])
            if name[0] == "f":
                peer, message = stage.owner(name), draw.from_frontend()
            else:
                peer, message = stage.worker(name), draw.from_worker(name)
            stage.say(peer, message, draw.frame(message))
            stage.wait(draw.random.random() / 8)
        for key, value in stage.router.status(stage.now).numbers.items():
            seen[key] += int(value)
    for key in (
        *("leases_begun", "leases_finished", "leases_failed", "leases_not_held", "holds"),
        *(
            "rejects",
            "kv_applied",
            "kv_gaps",
            "index_pairs",
            "workers_lost",
            "owners_lost",
            "senseless_claims",
        ),
    ):
        assert seen[key], f"never happened enough: {key} {seen}"

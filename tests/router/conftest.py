"""A router with hands: peers that say what real ones would, and everything the router sent, by receiver."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from fermata.core.ids import OwnerId, RouterId, RoutingKey, SessionId
from fermata.core.lease_digest import LeaseDigest
from fermata.core.spec import RouterPolicySpec
from fermata.router.core import Router, RouterConfig, Send
from fermata.wire import messages as wire
from fermata.wire.roles import Peer, allowed

M = TypeVar("M")
BLOCK = 64
OPERATOR = Peer(wire.Role.OPERATOR, "operator", 1)


def hashes(*names: int) -> memoryview:
    return memoryview(array("Q", names)).cast("B").cast("Q")


class World:
    def __init__(
        self, *, policy: RouterPolicySpec | None, now: float = 1000.0, **config: Any
    ) -> None:
        self.now = now
        settings: dict[str, Any] = {
            "id": RouterId("router-0"),
            "number": 3,
            "incarnation": 77,
            "endpoint": "tcp://127.0.0.1:1",
            "block_size": BLOCK,
            "models": {"m": "m", "alias": "m"},
        }
        self.router = Router(RouterConfig(**(settings | config)), now=now, policy=policy)
        self.sent: list[Send] = []

    def say(self, peer: Peer, message: wire.Message, frame: Any = b"") -> list[wire.Message]:
        """Hand a message in; returns what the router said to that peer in answer."""
        assert type(message) in allowed(sender=peer.role, receiver=wire.Role.ROUTER)
        raw = memoryview(frame).cast("B")
        sends = self.router.receive(peer, message, raw, self.now)
        self._keep(sends)
        return [send.message for send in sends if send.to == peer]

    def wait(self, seconds: float) -> None:
        """Let time pass as a shell would: tick at each deadline."""
        end = self.now + seconds
        while (at := self.router.next_deadline(self.now)) is not None and at <= end:
            self.now = max(self.now, at)
            self._keep(self.router.tick(self.now))
        self.now = end

    def _keep(self, sends: Sequence[Send]) -> None:
        for send in sends:
            assert type(send.message) in allowed(sender=wire.Role.ROUTER, receiver=send.to.role)
        self.sent += sends
        self.router.check_integrity()

    def take(self, kind: type[M], to: Peer | None = None) -> list[M]:
        """What was sent of a kind (to a peer) since it was last taken."""
        found = [s for s in self.sent if type(s.message) is kind and to in (None, s.to)]
        self.sent = [s for s in self.sent if s not in found]
        return [s.message for s in found]  # type: ignore[misc]

    def revoked(self, to: Peer) -> dict[str, list[int]]:
        """Reason -> lease ids, since last taken."""
        found: dict[str, list[int]] = {}
        for s in [s for s in self.sent if type(s.message) is wire.Revoke and s.to == to]:
            self.sent.remove(s)
            found.setdefault(s.message.reason, []).extend(memoryview(s.frame).cast("Q"))
        return found

    @property
    def numbers(self) -> dict[str, float]:
        return self.router.status(self.now).numbers

    def worker(
        self, name: str = "w0", *, incarnation: int = 1, snapshot: bool = True, **info: Any
    ) -> Peer:
        """Register one; with `snapshot` its ranks are empty and in."""
        peer = Peer(wire.Role.WORKER, name, incarnation)
        settings: dict[str, Any] = {
            "endpoint": f"tcp://{name}",
            "model": "m",
            "ranks": 1,
            "block_size": 16,
            "routing_block_size": BLOCK,
            "kv_blocks": {"device": 4096},
            "max_sequences": 8,
            "max_batched_tokens": 8192,
            "context_length": 131_072,
            "features": ["kv_events"],
        }
        hello = wire.Hello("worker", name, incarnation, wire.WorkerInfo(**(settings | info)))
        answers = self.say(peer, hello)
        if snapshot:
            for ask in [a for a in answers if isinstance(a, wire.SnapshotRequest)]:
                self.snapshot(peer, ask)
        return peer

    def snapshot(
        self,
        peer: Peer,
        ask: wire.SnapshotRequest,
        runs: Sequence[Sequence[int]] = (),
        sequence: int = -1,
    ) -> None:
        """Answer with chains that start at the root."""
        stored = [wire.KvStored(None, len(run)) for run in runs]
        flat = [h for run in runs for h in run]
        self.say(
            peer,
            wire.SnapshotChunk(ask.rank, ask.request, 0, True, sequence, stored),
            hashes(*flat),
        )

    def stored(
        self, peer: Peer, first: int, *run: int, parent: int | None = None, rank: int = 0
    ) -> None:
        self.say(peer, wire.KvEvents(rank, first, [wire.KvStored(parent, len(run))]), hashes(*run))

    def beat(
        self, peer: Peer, *, seen: int = 0, leases: Sequence[int] = (), events: Sequence[int] = ()
    ) -> Any:
        digest = LeaseDigest(leases)  # type: ignore[arg-type]
        heartbeat = wire.Heartbeat(peer.incarnation, seen, digest.count, digest.xor, list(events))
        return self.say(peer, heartbeat)

    def load(self, peer: Peer, **rank: Any) -> None:
        settings: dict[str, Any] = {
            "rank": 0,
            "running": 0,
            "waiting": 0,
            "kv_used": {},
            "steps": 0,
        }
        self.say(peer, wire.LoadReport([wire.RankLoad(**(settings | rank))]))

    def frontend(self, name: str = "f0", *, incarnation: int = 1) -> Peer:
        peer = Peer(wire.Role.FRONTEND, name, incarnation)
        self.say(peer, wire.Hello("frontend", name, incarnation))
        self.say(peer, wire.LeaseClaims([]))
        return peer

    def route(
        self, peer: Peer, request: str = "r", *chain: int, **fields: Any
    ) -> wire.Message | None:
        """The answer; None when there is none. Input is the chain and half a block more, unless said otherwise."""
        settings: dict[str, Any] = {
            "request": request,
            "attempt": 0,
            "key": RoutingKey("k"),
            "epoch": 0,
            "model": "m",
            "input_tokens": len(chain) * BLOCK + 32,
            "max_tokens": 100,
        }
        answers = self.say(peer, wire.Route(**(settings | fields)), hashes(*chain))
        assert len(answers) <= 1
        return answers[0] if answers else None

    def grant(self, peer: Peer, request: str = "r", *chain: int, **fields: Any) -> wire.Grant:
        answer = self.route(peer, request, *chain, **fields)
        assert isinstance(answer, wire.Grant), answer
        return answer

    def progress(self, peer: Peer, lease: int, kind: Any, **fields: Any) -> None:
        self.say(peer, wire.Progress([wire.LeaseProgress(lease, kind, **fields)]))  # type: ignore[arg-type]

    def set_policy(
        self, policy: RouterPolicySpec, *, revision: int = 1, ring: wire.Ring | None = None
    ) -> wire.PolicyAck:
        import msgspec

        message = wire.SetPolicy(
            "u", 1, revision, msgspec.json.encode(policy), ring or wire.Ring(0, [])
        )
        (ack,) = self.say(OPERATOR, message)
        assert isinstance(ack, wire.PolicyAck)
        return ack


@pytest.fixture
def make_world() -> Callable[..., World]:
    """With a policy of defaults, unless told otherwise."""

    def make(**given: Any) -> World:
        return World(**({"policy": RouterPolicySpec()} | given))

    return make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


__all__ = ["OPERATOR", "OwnerId", "SessionId", "World"]

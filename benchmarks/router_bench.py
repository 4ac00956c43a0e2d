"""The router's own figures: prefix index, leases' chains, and whole calls of the pure core.

`measurements()` is what `make bench` prints; run alone, this file prints them too. Each figure is the best of several
rounds in CPU time, since other load on the machine only ever adds. Chains are random hashes, as real ones look.
"""

from __future__ import annotations

import time
import tracemalloc
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

from fermata.core.ids import RequestId, RouterId, RoutingKey, SessionId, WorkerId
from fermata.core.spec import RouterPolicySpec
from fermata.router.chain_trie import ChainTrie
from fermata.router.core import Router, RouterConfig
from fermata.router.prefix_index import PrefixIndex
from fermata.wire import messages as wire
from fermata.wire.roles import Peer

DEPTH = 8192
WORKERS = 64
RUN = 16
BLOCK = 64
_draw = Random(20).getrandbits


def chain(blocks: int) -> array[int]:
    return array("Q", [_draw(64) for _ in range(blocks)])


def best_us(call: Callable[[], Any], *, times: int, rounds: int = 15) -> float:
    """CPU microseconds a call."""
    found = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(times):
            call()
        found = min(found, time.process_time() - begin)
    return found / times * 1e6


def figure(name: str, value: float, unit: str, target: float | None, better: str) -> dict[str, Any]:
    return {
        "name": f"router {name}",
        "value": value,
        "unit": unit,
        "target": target,
        "better": better,
    }


def index_of_depths(whole: array[int], distinct: int) -> PrefixIndex:
    """`WORKERS` slots that hold prefixes of one chain, at `distinct` depths."""
    index = PrefixIndex(limit_pairs=10_000_000)
    for slot in range(WORKERS):
        index.stored(slot, "device", None, whole[: (slot % distinct + 1) * DEPTH // distinct])
    for _ in range(4096):
        index.stored(0, "device", None, chain(RUN))
    return index


def match_figures() -> list[dict[str, Any]]:
    whole = chain(DEPTH)
    asked = memoryview(whole)
    found: list[dict[str, Any]] = []
    for distinct, target in ((1, None), (8, 20.0), (64, 130.0)):
        index = index_of_depths(whole, distinct)
        depths = index.match(asked)["device"]
        assert len(depths) == WORKERS
        assert len(set(depths.values())) == distinct
        us = best_us(lambda index=index: index.match(asked), times=100)  # type: ignore[misc]
        found.append(
            figure(
                f"match 8k blocks, {WORKERS} slots, {distinct} depths", us, "us", target, "lower"
            )
        )
    return found


def store_figures(sessions: int = 256, blocks: int = 256) -> list[dict[str, Any]]:
    """Million blocks a second, 16 a call, over chains of 256 blocks; 65,536 blocks in all."""
    chains = [chain(blocks) for _ in range(sessions)]
    runs = [
        (whole[at - 1] if at else None, memoryview(whole)[at : at + RUN])
        for whole in chains
        for at in range(0, blocks, RUN)
    ]

    def store(index: PrefixIndex, slot: int) -> float:
        begin = time.process_time()
        for parent, run in runs:
            index.stored(slot, "device", parent, run)
        return len(runs) * RUN / (time.process_time() - begin) / 1e6

    def remove(index: PrefixIndex, slot: int) -> float:
        begin = time.process_time()
        for _, run in reversed(runs):
            index.removed(slot, "device", run[::-1])
        return len(runs) * RUN / (time.process_time() - begin) / 1e6

    rounds: list[tuple[float, float, float, float]] = []
    for _ in range(7):
        index = PrefixIndex(limit_pairs=10_000_000)
        rounds.append((store(index, 0), store(index, 0), store(index, 1), remove(index, 1)))
        assert index.pairs == sessions * blocks
    new, again, elsewhere, removed = (max(column) for column in zip(*rounds, strict=True))
    unit = "M blocks/s"
    return [
        figure("store new, 16 a call", new, unit, 1.2, "higher"),
        figure("store already known on the slot, 16 a call", again, unit, 3.0, "higher"),
        figure("store already known on another slot, 16 a call", elsewhere, unit, 3.0, "higher"),
        figure("remove tails first, 16 a call", removed, unit, None, "higher"),
    ]


def memory_figures() -> list[dict[str, Any]]:
    """Of a million blocks on one worker, in chains of a thousand."""
    blocks, length = 1_000_000, 1000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index = PrefixIndex(limit_pairs=10_000_000)
    for _ in range(blocks // length):
        index.stored(0, "device", None, chain(length))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.pairs == blocks
    return [figure("index memory", (after - before) / blocks, "B a block", 160.0, "lower")]


def drop_figures() -> list[dict[str, Any]]:
    """A worker of a million blocks dies: the call, and the dearest of those which clean up behind it."""
    index = PrefixIndex(limit_pairs=10_000_000)
    for _ in range(250):
        index.stored(0, "device", None, chain(1000))
    begin = time.process_time()
    index.drop(0)
    dropped = time.process_time() - begin
    steps: list[float] = []
    more = True
    while more:
        begin = time.process_time()
        more = index.sweep(4096)
        steps.append(time.process_time() - begin)
    return [
        figure("drop a slot of 250k blocks", dropped * 1e6, "us", None, "lower"),
        figure("dearest sweep step of 4,096 entries", max(steps) * 1e3, "ms", None, "lower"),
    ]


def trie_figures() -> list[dict[str, Any]]:
    """1,024 live leases that share a system prompt of 300 blocks, 100 to 8,000 blocks long."""
    shared = chain(300)
    random = Random(3)
    chains = [memoryview(shared + chain(random.randrange(100, 8000))) for _ in range(1024)]
    trie = ChainTrie()
    for i, whole in enumerate(chains):
        trie.hold(whole, i % WORKERS)
    asked = chains[17]

    def hold_and_release() -> None:
        trie.release(trie.hold(asked, 5), 5)

    return [
        figure(
            "promises: match", best_us(lambda: trie.match(asked), times=200), "us", None, "lower"
        ),
        figure(
            "promises: hold and release",
            best_us(hold_and_release, times=200),
            "us",
            None,
            "lower",
        ),
    ]


class Fleet:
    """A router of `workers`, one frontend, and what they say."""

    def __init__(self, workers: int, policy: RouterPolicySpec | None = None) -> None:
        config = RouterConfig(
            id=RouterId("router-0"),
            number=0,
            incarnation=1,
            endpoint="inproc://r",
            block_size=BLOCK,
            models={"m": "m"},
        )
        self.router = Router(config, now=0.0, policy=policy or RouterPolicySpec())
        self.frontend = Peer(wire.Role.FRONTEND, "f", 1)
        self.workers = [Peer(wire.Role.WORKER, f"w{i}", 1) for i in range(workers)]
        self.say(self.frontend, wire.Hello("frontend", "f", 1))
        for peer in self.workers:
            self._register(peer)
        self._serial = 0

    def say(self, peer: Peer, message: wire.Message, frame: Any = b"") -> list[wire.Message]:
        raw = memoryview(frame).cast("B")
        return [s.message for s in self.router.receive(peer, message, raw, 0.0) if s.to == peer]

    def _register(self, peer: Peer) -> None:
        info = wire.WorkerInfo(
            endpoint=f"tcp://{peer.id}",
            model="m",
            ranks=1,
            block_size=BLOCK,
            routing_block_size=BLOCK,
            kv_blocks={"device": 1_000_000},
            max_sequences=256,
            max_batched_tokens=8192,
            context_length=1_000_000,
        )
        for answer in self.say(peer, wire.Hello("worker", peer.id, 1, info)):
            if isinstance(answer, wire.SnapshotRequest):
                chunk = wire.SnapshotChunk(0, answer.request, 0, True, -1, [])
                self.say(peer, chunk)

    def turn(self, hashes: array[int], session: str) -> None:
        """Route, Grant, accepted, prefilled, finished."""
        self._serial += 1
        route = wire.Route(
            request=RequestId(f"r{self._serial}"),
            attempt=0,
            key=RoutingKey(session),
            epoch=0,
            model="m",
            input_tokens=len(hashes) * BLOCK + 5,
            max_tokens=100,
            session=SessionId(session),
        )
        (grant,) = self.say(self.frontend, route, hashes)
        assert isinstance(grant, wire.Grant)
        for kind in ("accepted", "prefilled", "finished"):
            progress = wire.LeaseProgress(grant.lease, kind)
            self.say(self.frontend, wire.Progress([progress]))


def core_figures() -> list[dict[str, Any]]:
    fleet = Fleet(WORKERS)
    whole = chain(DEPTH)
    for i, peer in enumerate(fleet.workers):
        depth = (i % 8 + 1) * DEPTH // 8
        stored = wire.KvEvents(0, 0, [wire.KvStored(None, depth)])
        fleet.say(peer, stored, whole[:depth])
    empty: array[int] = array("Q")
    return [
        figure(
            "whole turn (Route to finished), 8k blocks, 64 workers",
            best_us(lambda: fleet.turn(whole, "s"), times=20),
            "us",
            None,
            "lower",
        ),
        figure(
            "whole turn, anonymous, 8k blocks, 64 workers",
            best_us(lambda: fleet.turn(whole, ""), times=20),
            "us",
            None,
            "lower",
        ),
        figure(
            "whole turn, short prompt, 64 workers",
            best_us(lambda: fleet.turn(empty, ""), times=50),
            "us",
            None,
            "lower",
        ),
        *event_figures(fleet),
    ]


def event_figures(fleet: Fleet) -> list[dict[str, Any]]:
    """Events of 16 blocks, 32 a message, through the whole core."""
    peer = fleet.workers[0]
    messages: list[tuple[wire.KvEvents, array[int]]] = []
    sequence = 1
    for _ in range(64):
        frame = chain(32 * RUN)
        events: list[wire.KvEvent] = [
            wire.KvStored(frame[at - 1] if at else None, RUN) for at in range(0, 32 * RUN, RUN)
        ]
        messages.append((wire.KvEvents(0, sequence, events), frame))
        sequence += 32
    begin = time.process_time()
    for message, frame in messages:
        fleet.say(peer, message, frame)
    rate = 64 * 32 * RUN / (time.process_time() - begin) / 1e6
    feed = fleet.router.state.workers.by_id(WorkerId(peer.id))
    assert feed is not None
    assert feed.feeds[0].applied == sequence - 1
    return [figure("KV events through the core, 16 a event", rate, "M blocks/s", None, "higher")]


def measurements() -> list[dict[str, Any]]:
    return [
        *match_figures(),
        *store_figures(),
        *memory_figures(),
        *drop_figures(),
        *trie_figures(),
        *core_figures(),
    ]


if __name__ == "__main__":
    for row in measurements():
        target = "" if row["target"] is None else f"   target {row['target']:g}"
        print(f"{row['name']:<62} {row['value']:>10.2f} {row['unit']}{target}")

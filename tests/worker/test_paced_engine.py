from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence

import pytest

from fermata.core.clock import SystemClock
from fermata.core.hashing import token_frame
from fermata.core.ids import LeaseId, make_lease_id
from fermata.core.spec import SimulatedSpec, TimingSpec, WorkerGroupSpec
from fermata.wire.messages import KvAction, KvEvent, KvStored, Sampling
from fermata.worker.engine.base import Engine, EngineOutput, EngineRefused, EngineRequest
from fermata.worker.engine.paced import CATCH_UP_S, SimulatedRank
from fermata.worker.engine.speech import Speech


class Counting:
    """A responder that says 0, 1, 2..., `length` of them."""

    features = ("last_input",)

    def __init__(self, length: int = 10_000, delay_s: float = 0.0) -> None:
        self._length = length
        self._delay_s = delay_s

    def speak(self, request: EngineRequest, *, context_length: int) -> Speech:
        return Speech(array("I", range(self._length)), eos=1 << 20, delay_s=self._delay_s)


class Sink:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.tokens: dict[LeaseId, list[int]] = {}
        self.ended: dict[LeaseId, EngineOutput] = {}
        self.hashes: list[int] = []
        self.errors: list[Exception] = []
        self.broken = False

    def outputs(self, rank: int, outputs: Sequence[EngineOutput]) -> None:
        if self.broken:
            raise RuntimeError("broken")
        self.log.append("outputs")
        for output in outputs:
            self.tokens.setdefault(output.lease, []).extend(memoryview(output.tokens).cast("I"))
            if output.finish:
                assert output.lease not in self.ended
                self.ended[output.lease] = output

    def kv_events(self, rank: int, events: Sequence[KvEvent], hashes: array[int]) -> None:
        self.log.append("events")
        assert sum(e.count for e in events if isinstance(e, KvStored)) == len(hashes)
        self.hashes += hashes

    def failed(self, rank: int, error: Exception) -> None:
        self.errors.append(error)

    async def until_ended(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.ended) < count:
                await asyncio.sleep(0.001)


def rank(
    *,
    speedup: float = 1.0,
    responder: Counting | None = None,
    decode_ms: float = 5.0,
    **spec: float,
) -> SimulatedRank:
    timing = TimingSpec(
        prefill_quadratic=0.0,
        prefill_linear=0.0,
        prefill_constant=decode_ms,
        decode_quadratic=0.0,
        decode_linear=0.0,
        decode_constant=decode_ms,
    )
    return SimulatedRank(
        WorkerGroupSpec(name="sim", block_size=4, simulated=SimulatedSpec(timing=timing, **spec)),  # pyright: ignore[reportArgumentType]
        rank=0,
        routing_block_size=4,
        context_length=10_000,
        clock=SystemClock(speedup),
        responder=responder or Counting(),
    )


def request(serial: int, *, max_tokens: int, prompt: list[int] | None = None) -> EngineRequest:
    return EngineRequest(
        lease=make_lease_id(router=0, incarnation=1, serial=serial),
        tokens=token_frame(prompt or [1, 2, 3, 4, 5]),
        sampling=Sampling(max_tokens=max_tokens),
    )


async def test_it_is_an_engine_that_advertises_what_its_responder_wants() -> None:
    engine: Engine = rank()
    assert engine.info.features == ("kv_events", "priority", "lora", "last_input")
    assert not engine.apply_hint(KvAction("1", "kv.evict", "1.0", {}))


async def test_tokens_come_in_order_and_events_before_the_outputs_of_their_step() -> None:
    engine, sink = rank(speedup=100.0), Sink()
    await engine.start(sink)
    engine.submit(request(1, max_tokens=30))
    engine.submit(request(2, max_tokens=20, prompt=[9]))
    await sink.until_ended(2)
    assert list(sink.tokens.values()) == [list(range(30)), list(range(20))]
    assert sink.log[:2] == ["events", "outputs"]
    assert engine.load().kv_referenced == 0
    assert engine.load().steps == 30
    await engine.stop()


async def test_late_timers_do_not_add_up() -> None:
    took = 1e9
    for _ in range(4):  # a busy machine may stop us for longer than the engine catches up
        engine, sink = rank(decode_ms=3.3), Sink()
        await engine.start(sink)
        began = time.monotonic()
        engine.submit(request(1, max_tokens=100))
        await sink.until_ended(1)
        took = min(took, time.monotonic() - began)
        assert took > 0.329
        if took < 0.36:
            return
    # Timers are late by up to a millisecond each: together that would be 0.1 s.
    pytest.fail(f"100 steps of 3.3 ms took {took:.3f} s")


async def test_it_does_not_race_through_what_it_missed_while_it_was_stopped() -> None:
    engine, sink = rank(decode_ms=10.0), Sink()
    await engine.start(sink)
    engine.submit(request(1, max_tokens=500))
    lease = request(1, max_tokens=1).lease
    async with asyncio.timeout(10):
        while lease not in sink.tokens:
            await asyncio.sleep(0.001)
    before = len(sink.tokens[lease])
    time.sleep(CATCH_UP_S + 0.5)  # as a suspended process would
    woke = time.monotonic()
    await asyncio.sleep(0.02)
    awake = time.monotonic() - woke
    assert len(sink.tokens[lease]) - before <= 2 + awake / 0.01
    await engine.stop()


async def test_an_engine_that_can_not_keep_up_lets_the_loop_breathe() -> None:
    engine, sink = rank(speedup=10_000.0), Sink()
    await engine.start(sink)
    for serial in range(1, 65):
        engine.submit(request(serial, max_tokens=400, prompt=[serial]))
    turns: list[float] = []
    while len(sink.ended) < 64:
        began = time.thread_time()
        await asyncio.sleep(0)
        turns.append(time.thread_time() - began)
    assert len(turns) > 20
    assert max(turns) < 0.05
    await engine.stop()


async def test_an_abort_ends_the_request_before_it_returns() -> None:
    engine, sink = rank(), Sink()
    await engine.start(sink)
    engine.submit(request(1, max_tokens=500))
    await asyncio.sleep(0.02)
    lease = request(1, max_tokens=1).lease
    engine.abort(lease, error="asked")
    assert (sink.ended[lease].finish, sink.ended[lease].error) == ("abort", "asked")
    assert engine.load().kv_referenced == 0
    engine.abort(lease)
    await asyncio.sleep(0.02)
    assert len(sink.ended) == 1
    await engine.stop()


async def test_a_later_request_does_not_wait_for_a_delayed_one() -> None:
    engine, sink = rank(responder=Counting(delay_s=100.0)), Sink()
    await engine.start(sink)
    engine.submit(request(1, max_tokens=5))
    # A resumed attempt is not delayed.
    second = EngineRequest(
        lease=make_lease_id(router=0, incarnation=1, serial=2),
        tokens=token_frame([1, 0]),
        sampling=Sampling(max_tokens=3),
        resumed=1,
    )
    engine.submit(second)
    await sink.until_ended(1)
    assert list(sink.ended) == [second.lease]
    await engine.stop()


async def test_a_draining_engine_refuses_and_a_stopped_one_is_silent() -> None:
    engine, sink = rank(), Sink()
    await engine.start(sink)
    engine.submit(request(1, max_tokens=500))
    engine.drain()
    with pytest.raises(EngineRefused):
        engine.submit(request(2, max_tokens=5))
    await engine.stop()
    said = sink.log.copy()
    await asyncio.sleep(0.03)
    assert sink.log == said


async def test_starting_takes_as_long_as_the_model_would() -> None:
    engine = rank(speedup=10.0, startup_s=0.5)
    began = time.monotonic()
    await engine.start(Sink())
    assert 0.045 < time.monotonic() - began < 5


async def test_a_broken_engine_says_so() -> None:
    engine, sink = rank(), Sink()
    await engine.start(sink)
    sink.broken = True
    engine.submit(request(1, max_tokens=5))
    async with asyncio.timeout(10):
        while not sink.errors:
            await asyncio.sleep(0.001)
    assert [str(error) for error in sink.errors] == ["broken"]
    await engine.stop()

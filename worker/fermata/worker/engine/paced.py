"""The simulated engine against a clock: the Engine that a worker drives.

Steps are taken when the clock has reached them and results go to the sink at once. A timer is
always late by a little; the engine counts from step end to step end, so that does not add up. After a
long stop (the process was suspended) it goes on from now instead of racing through what it missed.
When steps are due faster than this machine takes them, it works in slices and lets the loop
breathe in between.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import perf_counter

from fermata.core.clock import Clock
from fermata.core.ids import LeaseId
from fermata.core.spec import WorkerGroupSpec
from fermata.wire.messages import KvAction
from fermata.worker.engine.base import EngineInfo, EngineLoad, EngineRequest, EngineSink
from fermata.worker.engine.responder import Responder
from fermata.worker.engine.simulated import SimulatedEngine

CATCH_UP_S = 0.25
"""Real seconds an engine may run behind before it lets the past go."""
SLICE_S = 0.001
"""Real seconds of stepping in one turn of the loop."""


class SimulatedRank:
    """One data-parallel rank of a Simulated worker group."""

    def __init__(
        self,
        group: WorkerGroupSpec,
        *,
        rank: int,
        routing_block_size: int,
        context_length: int,
        clock: Clock,
        responder: Responder,
    ) -> None:
        self._spec = group.simulated
        self._rank = rank
        self._clock = clock
        self._responder = responder
        self._engine = SimulatedEngine(
            group.simulated,
            block_size=group.block_size,
            routing_block_size=routing_block_size,
            context_length=context_length,
            catch_up_s=CATCH_UP_S * clock.speedup,
        )
        self._info = replace(
            self._engine.info, features=(*self._engine.info.features, *responder.features)
        )
        self._sink: EngineSink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self, sink: EngineSink) -> None:
        """Takes as long as the spec says that loading the model takes."""
        if self._spec.startup_s:
            await asyncio.sleep(self._clock.real_delay(self._spec.startup_s))
        self._sink = sink

    def submit(self, request: EngineRequest) -> None:
        """O(prompt and answer), once: hashes of the one, ids of the other."""
        speech = self._responder.speak(request, context_length=self._info.context_length)
        self._engine.submit(request, speech, self._clock.now())
        self._arm()

    def abort(self, lease: LeaseId, *, error: str = "") -> None:
        """Its last output goes to the sink before this returns."""
        output = self._engine.abort(lease, error=error)
        if output is not None and self._sink is not None:
            self._sink.outputs(self._rank, [output])

    def apply_hint(self, action: KvAction) -> bool:
        return False

    def load(self) -> EngineLoad:
        return self._engine.load()

    def drain(self) -> None:
        self._engine.drain()

    async def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """(Re)sets the timer to the next step. One that is due still waits for the turn's end, so that
        what arrives in one turn of the loop starts together."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.now()
        at = self._engine.next_step_at(now)
        if at is not None and not self._is_stopped:
            delay = self._clock.real_delay(at - now)
            self._timer = asyncio.get_running_loop().call_later(delay, self._run)

    def _run(self) -> None:
        self._timer = None
        try:
            self._step_until_now()
        except Exception as error:  # noqa: BLE001  # supervisor boundary: a broken engine must not die in silence
            assert self._sink is not None
            self._sink.failed(self._rank, error)
            return
        self._arm()

    def _step_until_now(self) -> None:
        sink = self._sink
        assert sink is not None, "a request before start"
        until = perf_counter() + SLICE_S
        while not self._is_stopped:
            now = self._clock.now()
            at = self._engine.next_step_at(now)
            if at is None or at > now:
                return
            result = self._engine.step(now)
            if result.events:
                sink.kv_events(self._rank, result.events, result.hashes)
            if result.outputs:
                sink.outputs(self._rank, result.outputs)
            if perf_counter() > until:
                return

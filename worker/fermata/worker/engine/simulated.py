"""A whole inference engine as a pure state machine in injected time.

A step is composed at its start (pages are taken, old content is evicted) and takes effect at its
end (content becomes visible, tokens come out). The next starts at that end, not when somebody came
to look, so a late caller catches up and the pace does not drift.

Cost of a step: O(sequences in it + pages they take and fill).
"""

from __future__ import annotations

from array import array
from math import inf
from typing import NamedTuple

from fermata.core.hashing import hash_seed
from fermata.core.ids import LeaseId, lease_router
from fermata.core.spec import SimulatedSpec
from fermata.wire.messages import KvEvent
from fermata.worker.engine.base import (
    EngineInfo,
    EngineLoad,
    EngineOutput,
    EngineRefused,
    EngineRequest,
    Tally,
)
from fermata.worker.engine.block_pool import BlockPool
from fermata.worker.engine.kv_journal import KvJournal
from fermata.worker.engine.scheduler import Scheduler
from fermata.worker.engine.sequence import Phase, Sequence
from fermata.worker.engine.speech import Speech
from fermata.worker.engine.timing import step_seconds
from fermata.worker.engine.token_chain import TokenChain

LIVE_PER_SEQUENCE = 64
"""Bound of the waiting queue, in requests for each sequence slot."""


class StepResult(NamedTuple):
    """`hashes` are those the events name, event by event. The events come before the outputs."""

    outputs: list[EngineOutput]
    events: list[KvEvent]
    hashes: array[int]


class SimulatedEngine:
    """`pool` and `scheduler` are open for reading, by reports and tests."""

    def __init__(
        self,
        spec: SimulatedSpec,
        *,
        block_size: int,
        routing_block_size: int,
        context_length: int,
        catch_up_s: float = inf,
    ) -> None:
        """`catch_up_s`: called later than this past a step's end, it goes on from the call instead."""
        assert routing_block_size % block_size == 0
        self._spec = spec
        self._page = block_size
        self._routing_block = routing_block_size
        self._context_length = min(context_length, spec.kv_blocks * block_size)
        self._catch_up_s = catch_up_s
        self.pool = BlockPool(spec.kv_blocks)
        self.scheduler = Scheduler(spec, page=block_size, pool=self.pool)
        self._journal = KvJournal()
        self._block_of: dict[int, int] = {}
        self._live: dict[LeaseId, Sequence] = {}
        self._batch: list[Sequence] | None = None
        self._batch_ends = 0.0
        self._arrivals = 0
        self._is_draining = False
        self.steps = 0
        self.output_tokens = 0
        self.prefilled_tokens = 0

    @property
    def info(self) -> EngineInfo:
        events = ("kv_events",) if self._spec.kv_events else ()
        return EngineInfo(
            block_size=self._page,
            kv_blocks={"device": self.pool.capacity},
            max_sequences=self._spec.max_sequences,
            max_batched_tokens=self._spec.max_batched_tokens,
            context_length=self._context_length,
            features=(*events, "priority", "lora"),
        )

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return len(self._live)

    def submit(self, request: EngineRequest, speech: Speech, now: float) -> None:
        """Raises EngineRefused; else the request ends with exactly one output that has a finish.

        O(prompt), once: its hashes.
        """
        limit = self._limit(request)
        chain = TokenChain(
            request.tokens,
            page_tokens=self._page,
            block_tokens=self._routing_block,
            seed=hash_seed(lora=request.lora, namespace=request.namespace),
        )
        self._arrivals += 1
        sequence = Sequence(request, speech, chain, limit=limit, arrival=self._arrivals)
        self._live[request.lease] = sequence
        if speech.delay_s and not request.resumed:
            self.scheduler.waiting.push_delayed(sequence, now + speech.delay_s)
        else:
            self.scheduler.waiting.push(sequence)

    def abort(self, lease: LeaseId, *, error: str = "") -> EngineOutput | None:
        """Ends the request at whatever stage and frees what it holds. Returns its last output, or
        None for an unknown one."""
        sequence = self._live.get(lease)
        if sequence is None:
            return None
        self._end(sequence)
        return EngineOutput(
            lease=lease, cached_tokens=sequence.cached_tokens, finish="abort", error=error
        )

    def drain(self) -> None:
        self._is_draining = True

    def clear_cache(self) -> bool:
        """Forgets all cached content; the event comes with the next step. False while any request
        holds pages."""
        if not self.pool.clear():
            return False
        self._block_of.clear()
        if self._spec.kv_events:
            self._journal.cleared()
        return True

    def next_step_at(self, now: float) -> float | None:
        """When `step` has something to do; None: not before another method was called."""
        if self._batch is not None:
            return self._batch_ends
        waiting = self.scheduler.waiting
        if waiting.peek() is not None or self.scheduler.running or not self._journal.is_empty:
            return now
        due = waiting.next_due()
        return None if due is None else max(now, due)

    def step(self, now: float) -> StepResult:
        """Ends the step under way when its time is up, and starts the next: one of each at most."""
        outputs: list[EngineOutput] = []
        start = now
        if self._batch is not None:
            if self._batch_ends > now:
                return StepResult(outputs, *self._journal.take())
            if now - self._batch_ends <= self._catch_up_s:
                start = self._batch_ends
            outputs = self._complete(self._batch)
        self.scheduler.waiting.admit_due(start)
        self._compose(start)
        return StepResult(outputs, *self._journal.take())

    def load(self) -> EngineLoad:
        """O(live requests). May be called from another thread: it walks a copy."""
        routers: dict[int, Tally] = {}
        for sequence in list(self._live.values()):
            tally = routers.setdefault(lease_router(sequence.lease), Tally())
            if sequence.phase is Phase.WAITING:
                tally.waiting += 1
            else:
                tally.active += 1
            tally.charged_tokens += sequence.chain.length
        return EngineLoad(
            running=self.scheduler.running,
            waiting=len(self._live) - self.scheduler.running,
            kv_referenced=self.pool.referenced,
            kv_cached=self.pool.cached,
            steps=self.steps,
            output_tokens=self.output_tokens,
            preemptions=self.scheduler.preemptions,
            routers=routers,
        )

    def _limit(self, request: EngineRequest) -> int:
        """Output tokens of the whole turn: what was asked for, cut to the context window."""
        if self._is_draining:
            raise EngineRefused("draining", "the engine takes nothing new")
        if len(self._live) >= self._spec.max_sequences * LIVE_PER_SEQUENCE:
            raise EngineRefused("full", f"{len(self._live)} requests run or wait already")
        if request.lease in self._live:
            raise EngineRefused("invalid", f"lease {request.lease} is running already")
        prompt = request.length - request.resumed
        if prompt < 1 or request.resumed < 0:
            raise EngineRefused("invalid", "the prompt is empty")
        room = self._context_length - prompt
        if room < 1:
            raise EngineRefused(
                "invalid", f"{prompt} prompt tokens fill the context of {self._context_length}"
            )
        limit = min(request.sampling.max_tokens, room)
        if limit <= request.resumed:
            raise EngineRefused(
                "invalid", f"{request.resumed} of at most {limit} output tokens are made already"
            )
        return limit

    def _compose(self, start: float) -> None:
        batch = self.scheduler.compose()
        self._record_evictions()
        self._batch = batch or None
        if not batch:
            return
        prefill = sum(s.scheduled for s in batch if s.phase is Phase.PREFILL)
        self.prefilled_tokens += prefill
        self._batch_ends = start + step_seconds(
            self._spec.timing,
            prefill_tokens=prefill,
            is_decoding=any(s.phase is Phase.DECODE for s in batch),
            kv_share=self.pool.referenced / self.pool.capacity,
        )

    def _complete(self, batch: list[Sequence]) -> list[EngineOutput]:
        self.steps += 1
        outputs: list[EngineOutput] = []
        for sequence in batch:
            if not sequence.scheduled:  # aborted meanwhile
                continue
            sequence.computed += sequence.scheduled
            sequence.scheduled = 0
            if sequence.computed >= sequence.publish_at and self._spec.prefix_caching:
                self._publish(sequence)
            if sequence.computed < sequence.chain.length:
                continue
            if sequence.phase is Phase.PREFILL:
                self.scheduler.promote(sequence)
            output = sequence.say()
            outputs.append(output)
            if output.finish:
                self._end(sequence)
        self.output_tokens += len(outputs)
        return outputs

    def _publish(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        chain = sequence.chain
        full = sequence.computed // self._page
        fresh = self.pool.publish(sequence.blocks, chain.pages, full)
        sequence.publish_at = (full + 1) * self._page
        if not self._spec.kv_events:
            return
        for page in fresh:
            block = chain.block_ending_at(page)
            if block is None:
                continue
            if chain.blocks is not chain.pages:
                self._block_of[chain.pages[page]] = chain.blocks[block]
            self._journal.stored(chain.blocks[block], chain.parent_of(block))

    def _record_evictions(self) -> None:
        evicted = self.pool.take_evicted()
        if not self._spec.kv_events:
            return
        has_parts = self._routing_block != self._page
        for content in evicted:
            # Of a block of several pages the last goes first, and says that the block went.
            block = self._block_of.pop(content, None) if has_parts else content
            if block is not None:
                self._journal.removed(block)

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        sequence.phase = Phase.ENDED
        del self._live[sequence.lease]

    def check_integrity(self) -> None:
        """Recounts everything. O(pages + live requests): for tests."""
        self.scheduler.check_integrity()
        scheduler = self.scheduler
        placed = [*scheduler.decoding, *scheduler.prefilling, *scheduler.waiting]
        assert sorted(s.lease for s in placed) == sorted(self._live)
        assert all(self._live[s.lease] is s for s in placed)
        in_step = sum(s.scheduled for s in self._batch or ())
        assert in_step == sum(s.scheduled for s in placed)
        if self._routing_block != self._page and self._spec.kv_events:
            assert all(self.pool.is_visible(page) for page in self._block_of)

"""Who computes what in the next step: continuous batching with a token budget.

Each step first gives every decoding sequence its one token, then prefills in chunks with what is
left, then admits from the waiting queue while budget, sequence slots and pages last. Priority, then
arrival, orders all three. When pages run out the last in that order is preempted: it gives
everything back and is recomputed later, mostly from its own cache. The head of the queue is never
overtaken, so a large request is not starved.

Cost: O(sequences in the step + pages taken). Nothing walks the pool, the queue or a history.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from fermata.core.spec import SimulatedSpec
from fermata.worker.engine.block_pool import BlockPool
from fermata.worker.engine.sequence import Phase, Sequence
from fermata.worker.engine.waiting import WaitingQueue

_by_order = attrgetter("order")


class Scheduler:
    """Every live sequence is in exactly one of `waiting`, `prefilling` and `decoding`."""

    def __init__(self, spec: SimulatedSpec, *, page: int, pool: BlockPool) -> None:
        self.waiting = WaitingQueue()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.preemptions = 0
        self.reused_tokens = 0
        self._page = page
        self._pool = pool
        self._budget = spec.max_batched_tokens
        self._slots = spec.max_sequences
        self._is_caching = spec.prefix_caching
        self._reserve = int(spec.watermark * spec.kv_blocks)

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def compose(self) -> list[Sequence]:
        """The sequences of the next step, each with its `scheduled` tokens and the pages for them."""
        batch: list[Sequence] = []
        preempted = self.preemptions
        budget = self._schedule(self.decoding, batch, self._budget)
        budget = self._schedule(self.prefilling, batch, budget)
        if self.preemptions == preempted:
            self._admit(batch, budget)
            return batch
        # Pages ran short: what was taken back must not go to a newcomer in the same step.
        return [sequence for sequence in batch if sequence.scheduled]

    def promote(self, sequence: Sequence) -> None:
        """Its prompt is computed: from now on it decodes."""
        self._remove(self.prefilling, sequence)
        sequence.phase = Phase.DECODE
        insort(self.decoding, sequence, key=_by_order)

    def remove(self, sequence: Sequence) -> None:
        """Out of the running lists and of the step under way, its pages given back."""
        if sequence.phase is Phase.PREFILL:
            self._remove(self.prefilling, sequence)
        elif sequence.phase is Phase.DECODE:
            self._remove(self.decoding, sequence)
        sequence.scheduled = 0
        if sequence.blocks is not None:
            self._pool.release(sequence.blocks)
            sequence.blocks = None

    def _schedule(self, sequences: list[Sequence], batch: list[Sequence], budget: int) -> int:
        """Gives each in order what it lacks, as far as budget and pages go. Returns what is left."""
        at = 0
        while at < len(sequences) and budget > 0:
            sequence = sequences[at]
            tokens = min(sequence.chain.length - sequence.computed, budget)
            if sequence.computed + tokens > sequence.room and not self._make_room(
                sequence, sequence.computed + tokens
            ):
                continue  # it preempted itself, so the list is shorter now
            sequence.scheduled = tokens
            batch.append(sequence)
            budget -= tokens
            at += 1
        return budget

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Extends its pages to hold `tokens`, preempting the last in order for as long as that
        takes; False when that was itself.

        What a preempted one had of the step's budget is not given out again: between steps at most
        one sequence is in the middle of its prefill, so nobody is left to take it.
        """
        assert sequence.blocks is not None
        pages = -(-tokens // self._page)
        while not self._pool.extend(sequence.blocks, pages):
            victim = max((q[-1] for q in (self.decoding, self.prefilling) if q), key=_by_order)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.room = pages * self._page
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.remove(sequence)
        sequence.phase = Phase.WAITING
        sequence.computed = sequence.room = 0
        self.waiting.push(sequence)

    def _admit(self, batch: list[Sequence], budget: int) -> None:
        while budget > 0 and self.running < self._slots:
            sequence = self.waiting.peek()
            if sequence is None or not self._start(sequence, budget):
                return
            self.waiting.pop()
            batch.append(sequence)
            budget -= sequence.scheduled

    def _start(self, sequence: Sequence, budget: int) -> bool:
        length, page = sequence.chain.length, self._page
        matched = 0
        if self._is_caching:
            # At least the last token is computed, or there would be nothing to sample from.
            matched = self._pool.match(sequence.chain.pages, (length - 1) // page)
        cached = matched * page
        tokens = min(length - cached, budget)
        pages = -(-(cached + tokens) // page)
        is_alone = not self.running
        blocks = self._pool.admit(
            sequence.chain.pages,
            matched=matched,
            pages=pages,
            whole=-(-length // page),
            # The reserve protects those that run; with none it would keep a large request out.
            reserve=0 if is_alone else self._reserve,
        )
        if blocks is None:
            assert not is_alone, "a request that fits the context fits an idle engine"
            return False
        sequence.start(blocks, cached=cached, scheduled=tokens, page=page)
        self.reused_tokens += cached
        insort(self.prefilling, sequence, key=_by_order)
        return True

    @staticmethod
    def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
        at = bisect_left(sequences, sequence.order, key=_by_order)
        assert sequences[at] is sequence
        del sequences[at]

    def check_integrity(self) -> None:
        running = [*self.decoding, *self.prefilling]
        self._pool.check_integrity([s.blocks for s in running if s.blocks is not None])
        assert len(running) <= self._slots
        for sequences, phase in ((self.decoding, Phase.DECODE), (self.prefilling, Phase.PREFILL)):
            assert [s.order for s in sequences] == sorted(s.order for s in sequences)
            assert all(s.phase is phase for s in sequences)
        assert all(s.phase is Phase.WAITING and s.blocks is None for s in self.waiting)
        assert sum(s.scheduled for s in running) <= self._budget
        unfinished = [s for s in self.prefilling if s.computed + s.scheduled < s.chain.length]
        assert len(unfinished) <= 1
        for sequence in running:
            self._check_running(sequence)

    def _check_running(self, sequence: Sequence) -> None:
        blocks = sequence.blocks
        assert blocks is not None
        assert len(blocks.pages) * self._page == sequence.room
        assert sequence.computed + sequence.scheduled <= min(sequence.room, sequence.chain.length)
        full = sequence.computed // self._page
        assert blocks.published == (full if self._is_caching else 0)
        pages = sequence.chain.pages[: blocks.published]
        assert all(self._pool.is_visible(content) for content in pages)

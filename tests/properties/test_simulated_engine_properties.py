"""The simulated engine under any mix of requests, steps and aborts, against naive statements of what must come out.

What a request says depends on the request alone; what a router is told equals what a walk over every page finds;
what is reused equals the longest prefix that is there. The pool is small, so preemption and eviction are the rule.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fermata.core.hashing import hash_seed, sequence_hashes, token_frame
from fermata.core.ids import LeaseId, make_lease_id
from fermata.core.spec import SimulatedSpec
from fermata.wire.messages import KvCleared, KvEvent, KvRemoved, KvStored, Sampling
from fermata.worker.engine.base import EngineOutput, EngineRefused, EngineRequest
from fermata.worker.engine.sequence import Phase, Sequence
from fermata.worker.engine.simulated import SimulatedEngine, StepResult
from fermata.worker.engine.speech import Speech

EOS = 99
BLOCK = 4
CONTEXT = 40
MOST = 40
"""Requests of one example: the naive walks are over all of them."""
STEM = [1, 2, 3, 1, 2, 3, 3, 2, 1, 1, 2, 2, 3, 3, 1, 2, 3, 1, 1, 1]

prompts = st.builds(
    lambda cut, rest: STEM[:cut] + rest,
    st.sampled_from([0, 3, 4, 8, 8, 12, 16, 20]),
    st.lists(st.integers(1, 3), max_size=3),
).filter(bool)
samplings = st.builds(
    Sampling,
    max_tokens=st.sampled_from([1, 2, 4, 9, 16, 16]),
    min_tokens=st.sampled_from([0, 0, 0, 5]),
    stop_token_ids=st.sampled_from([[], [], [7], [7, 8]]),
    ignore_eos=st.sampled_from([False, False, False, True]),
    logprobs=st.sampled_from([None, None, 1]),
)
texts = st.one_of(
    st.lists(st.integers(1, 8), max_size=4), st.lists(st.integers(1, 8), min_size=9, max_size=14)
)


def naive_answer(request: EngineRequest, text: list[int]) -> tuple[list[int], str, int | None]:
    """What the attempt must say, how it ends and at which token."""
    sampling, said = request.sampling, list[int]()
    prompt = request.length - request.resumed
    limit = min(sampling.max_tokens, CONTEXT - prompt)
    for index in range(request.resumed, limit):
        may_stop = index >= sampling.min_tokens
        if index >= len(text) and may_stop and not sampling.ignore_eos:
            return [*said, EOS], "stop", EOS
        said.append(text[index % len(text)] if text else EOS)
        if said[-1] in sampling.stop_token_ids and may_stop:
            return said, "stop", said[-1]
    return said, "length", None


@dataclass
class Asked:
    request: EngineRequest
    text: list[int]
    tokens: list[int]
    namespace: str
    said: list[int] = field(default_factory=list)
    output: EngineOutput | None = None
    cached: int = -1


class EngineMachine(RuleBasedStateMachine):
    seen: Counter[str] = Counter()

    @initialize(
        page=st.sampled_from([1, 2, 4, 4]),
        kv_tokens=st.sampled_from([40, 48, 60, 88]),
        budget=st.sampled_from([3, 8, 64]),
        sequences=st.sampled_from([1, 3, 5]),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        page: int,
        kv_tokens: int,
        budget: int,
        sequences: int,
        watermark: float,
        caching: bool,
    ) -> None:
        self.page = page
        self.engine = SimulatedEngine(
            SimulatedSpec(
                kv_blocks=kv_tokens // page,
                max_sequences=sequences,
                max_batched_tokens=budget,
                watermark=watermark,
                prefix_caching=caching,
            ),
            block_size=page,
            routing_block_size=BLOCK,
            context_length=CONTEXT,
        )
        self.caching = caching
        self.now = 0.0
        self.asked: dict[LeaseId, Asked] = {}
        self.parents: dict[int, int | None] = {}
        self.preemptions = self.evictions = 0

    @rule(
        tokens=prompts,
        text=texts,
        sampling=samplings,
        priority=st.integers(0, 2),
        delay=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
        namespace=st.sampled_from(["", "", "", "tenant"]),
        resumed=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def submit(
        self,
        tokens: list[int],
        text: list[int],
        sampling: Sampling,
        priority: int = 0,
        delay: float = 0.0,
        namespace: str = "",
        resumed: int = 0,
    ) -> None:
        if len(self.asked) == MOST:
            return
        lease = make_lease_id(router=resumed % 2, incarnation=1, serial=len(self.asked) + 1)
        speech = Speech(array("I", text), eos=EOS, delay_s=delay)
        tokens = tokens + [speech.token(index) for index in range(resumed)]
        request = EngineRequest(
            lease=lease,
            tokens=token_frame(tokens),
            sampling=sampling,
            resumed=resumed,
            priority=priority,
            namespace=namespace,
        )
        if sampling.max_tokens <= resumed:
            with pytest.raises(EngineRefused, match="are made already"):
                self.engine.submit(request, speech, self.now)
            return
        self.engine.submit(request, speech, self.now)
        self.asked[lease] = Asked(request, text, tokens, namespace)
        self.seen["delayed"] += delay > 0 and not resumed
        self.seen["resumed"] += resumed > 0

    @rule(turns=st.lists(st.tuples(prompts, texts, samplings), min_size=2, max_size=5))
    def submit_at_once(self, turns: list[tuple[list[int], list[int], Sampling]]) -> None:
        for tokens, text, sampling in turns:
            self.submit(tokens, text, sampling)

    @rule(steps=st.sampled_from([1, 1, 2, 3, 5, 20]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            at = self.engine.next_step_at(self.now)
            if at is None:
                return
            assert at >= self.now
            if at > self.now:
                early = self.engine.step((at + self.now) / 2)
                assert not early.outputs
                self._take(early)
            self.now = at
            self._take(self.engine.step(at))

    @rule(pick=st.integers(0, 5))
    def abort(self, pick: int) -> None:
        live = [sequence.lease for sequence in self._live()]
        if pick >= len(live):
            assert self.engine.abort(LeaseId(12345)) is None
            return
        phase = next(s.phase for s in self._live() if s.lease == live[pick])
        output = self.engine.abort(live[pick], error="asked")
        assert output is not None
        assert (output.finish, output.error, output.tokens) == ("abort", "asked", b"")
        self._end(output)
        assert self.engine.abort(live[pick]) is None
        self.seen[f"aborted in {phase.value}"] += 1

    @rule(dice=st.integers(0, 9))
    def clear(self, dice: int) -> None:
        if dice == 7:
            held = self.engine.pool.referenced
            assert self.engine.clear_cache() == (not held)
            self.step(1)

    def _live(self) -> list[Sequence]:
        scheduler = self.engine.scheduler
        return [*scheduler.decoding, *scheduler.prefilling, *scheduler.waiting]

    def _take(self, result: StepResult) -> None:
        self._apply(result.events, result.hashes)
        for output in result.outputs:
            asked = self.asked[output.lease]
            assert asked.output is None, "an output after the end"
            said = memoryview(output.tokens).cast("I").tolist()
            asked.said += said
            assert output.cached_tokens == asked.cached
            if asked.request.sampling.logprobs is not None:
                assert output.logprobs == [[(token, 0.0)] for token in said]
            if output.finish:
                self._end(output)
        for sequence in self.engine.scheduler.prefilling:
            self._note_admission(sequence)
        self._note_pressure()

    def _apply(self, events: Many[KvEvent], hashes: array[int]) -> None:
        at = 0
        for event in events:
            match event:
                case KvStored():
                    parent = event.parent
                    for content in hashes[at : at + event.count]:
                        assert content not in self.parents, "stored twice"
                        assert parent is None or parent in self.parents, "stored before its parent"
                        self.parents[content] = parent
                        parent = content
                    at += event.count
                case KvRemoved():
                    for content in hashes[at : at + event.count]:
                        del self.parents[content]
                    at += event.count
                case KvCleared():
                    self.parents.clear()
                    self.seen["cleared"] += 1
        assert at == len(hashes)

    def _note_admission(self, sequence: Sequence) -> None:
        asked = self.asked[sequence.lease]
        if asked.cached >= 0:
            return
        # Whatever was reused can not be evicted, and nothing else became visible since.
        pages = self._pages(asked.tokens, asked.namespace)
        naive, most = 0, (len(asked.tokens) - 1) // self.page
        while naive < most and self.engine.pool.is_visible(pages[naive]):
            naive += 1
        assert sequence.cached_tokens == naive * self.page
        if self.page == BLOCK and self.caching:
            assert all((content in self.parents) for content in pages[:naive])
            assert naive == most or pages[naive] not in self.parents
        asked.cached = sequence.cached_tokens
        self.seen["reused a prefix"] += naive > 0
        self.seen["whole prompt was cached"] += (
            naive == most > 0 and len(asked.tokens) % self.page == 0
        )
        self.seen["prefilled in chunks"] += sequence.scheduled < len(asked.tokens) - asked.cached

    def _note_pressure(self) -> None:
        self.seen["preempted"] += self.engine.scheduler.preemptions - self.preemptions
        self.seen["evicted"] += self.engine.pool.evictions - self.evictions
        self.seen["duplicated"] += self.engine.pool.duplicates > 0
        self.preemptions = self.engine.scheduler.preemptions
        self.evictions = self.engine.pool.evictions

    def _end(self, output: EngineOutput) -> None:
        asked = self.asked[output.lease]
        assert asked.output is None, "ended twice"
        asked.output = output
        said, finish, stop = naive_answer(asked.request, asked.text)
        if output.finish == "abort":
            assert asked.said == said[: len(asked.said)]
            return
        assert (asked.said, output.finish, output.stop_token) == (said, finish, stop)
        self.seen[f"ended by {finish}" + (" token" if stop not in (None, EOS) else "")] += 1

    def _pages(self, tokens: list[int], namespace: str) -> array[int]:
        return sequence_hashes(token_frame(tokens), self.page, seed=hash_seed(namespace=namespace))

    @invariant()
    def everything_equals_its_recount(self) -> None:
        self.engine.check_integrity()
        load = self.engine.load()
        live = [asked for asked in self.asked.values() if asked.output is None]
        assert load.running + load.waiting == len(live) == self.engine.live
        assert sum(t.active for t in load.routers.values()) == load.running
        assert sum(t.charged_tokens for t in load.routers.values()) == sum(
            len(asked.tokens) + len(asked.said) for asked in live
        )
        assert load.kv_referenced == len(
            {page for s in self._live() if s.blocks is not None for page in s.blocks.pages}
        )

    @invariant()
    def routers_are_told_exactly_the_blocks_whose_pages_are_all_there(self) -> None:
        present: dict[int, int | None] = {}
        for asked in self.asked.values():
            tokens = asked.tokens + asked.said
            pages = self._pages(tokens, asked.namespace)
            seed = hash_seed(namespace=asked.namespace)
            per_block = BLOCK // self.page
            parent = None
            for index, block in enumerate(sequence_hashes(token_frame(tokens), BLOCK, seed=seed)):
                mine = pages[index * per_block : (index + 1) * per_block]
                if all(self.engine.pool.is_visible(page) for page in mine):
                    present[block] = parent
                parent = block
        assert present == self.parents

    @invariant()
    def a_higher_priority_never_waits_behind_a_lower_one(self) -> None:
        scheduler = self.engine.scheduler
        head = scheduler.waiting.peek()
        if head is not None:
            assert all(
                head.order <= s.order for s in scheduler.waiting if s.phase is Phase.WAITING
            ) or any(s.speech.delay_s for s in scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.next_step_at(self.now) is not None:
            self.step(1)
        self.everything_equals_its_recount()
        assert all(asked.output is not None for asked in self.asked.values())
        assert self.engine.live == self.engine.pool.referenced == 0


def test_whatever_happens_every_request_says_its_own_answer_and_ends_once() -> None:
    EngineMachine.seen.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for event in (
        "delayed",
        "resumed",
        "cleared",
        "preempted",
        "evicted",
        "duplicated",
        "reused a prefix",
        "whole prompt was cached",
        "prefilled in chunks",
        "aborted in waiting",
        "aborted in prefill",
        "aborted in decode",
        "ended by stop",
        "ended by stop token",
        "ended by length",
    ):
        assert EngineMachine.seen[event] > 10, (event, EngineMachine.seen)

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest

from fermata.core.hashing import hash_seed, sequence_hashes, token_frame
from fermata.core.ids import LeaseId, make_lease_id
from fermata.core.spec import SimulatedSpec, TimingSpec
from fermata.wire.messages import KvCleared, KvEvent, KvRemoved, KvStored, Sampling
from fermata.worker.engine.base import EngineOutput, EngineRefused, EngineRequest
from fermata.worker.engine.simulated import LIVE_PER_SEQUENCE, SimulatedEngine
from fermata.worker.engine.speech import Speech

EOS = 9
FLAT = TimingSpec(
    prefill_quadratic=0.0,
    prefill_linear=0.0,
    prefill_constant=1000.0,
    decode_quadratic=0.0,
    decode_linear=0.0,
    decode_constant=1000.0,
)


def lease(serial: int, router: int = 0) -> LeaseId:
    return make_lease_id(router=router, incarnation=1, serial=serial)


@dataclass
class Bench:
    """An engine of one-second phases, driven to each of its own deadlines."""

    engine: SimulatedEngine
    now: float = 0.0
    outputs: list[EngineOutput] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    def submit(
        self,
        serial: int,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        text: list[int] | None = None,
        delay_s: float = 0.0,
        sampling: Sampling | None = None,
        **extra: Any,
    ) -> None:
        self.engine.submit(
            EngineRequest(
                lease=lease(serial),
                tokens=token_frame(prompt),
                sampling=sampling or Sampling(max_tokens=max_tokens),
                **extra,
            ),
            Speech(array("I", [5] * 50 if text is None else text), eos=EOS, delay_s=delay_s),
            self.now,
        )

    def step(self) -> list[EngineOutput]:
        at = self.engine.next_step_at(self.now)
        assert at is not None
        self.now = at
        result = self.engine.step(at)
        self.engine.check_integrity()
        self.outputs += result.outputs
        self.events += result.events
        self.hashes += result.hashes
        return result.outputs

    def run(self) -> None:
        while self.engine.next_step_at(self.now) is not None:
            self.step()

    def said(self, serial: int) -> list[int]:
        frames = b"".join(o.tokens for o in self.outputs if o.lease == lease(serial))
        return memoryview(frames).cast("I").tolist()

    def last(self, serial: int) -> EngineOutput:
        return [o for o in self.outputs if o.lease == lease(serial)][-1]

    def running(self) -> list[int]:
        scheduler = self.engine.scheduler
        return [s.lease & 0xFFFF for s in [*scheduler.decoding, *scheduler.prefilling]]


def bench(**spec: Any) -> Bench:
    block_size = spec.pop("block_size", 4)
    routing = spec.pop("routing_block_size", 4)
    extra = {k: spec.pop(k) for k in ("catch_up_s",) if k in spec}
    context = spec.pop("context_length", 100)
    defaults: dict[str, Any] = {"kv_blocks": 100, "timing": FLAT, "watermark": 0.0}
    return Bench(
        SimulatedEngine(
            SimulatedSpec(**(defaults | spec)),
            block_size=block_size,
            routing_block_size=routing,
            context_length=context,
            **extra,
        )
    )


def test_the_first_token_comes_out_of_the_step_that_ends_the_prefill() -> None:
    b = bench(max_batched_tokens=4)
    b.submit(1, list(range(10)), max_tokens=2)
    arrivals: list[tuple[float, int]] = []
    while b.engine.next_step_at(b.now) is not None:
        arrivals += [(b.now, len(b.step()))]
    # Three chunks of at most four tokens, then one decode step.
    assert b.now == 4.0
    assert [o.finish for o in b.outputs] == ["", "length"]
    assert b.engine.steps == 4


def test_decoding_goes_on_while_another_prompt_comes_in_chunks() -> None:
    b = bench(max_batched_tokens=5)
    b.submit(1, [1, 2, 3], max_tokens=10)
    b.step()
    b.submit(2, list(range(20, 32)), max_tokens=10)
    for _ in range(3):
        b.step()
    assert len(b.said(1)) == 3
    assert b.said(2) == []
    b.step()
    assert len(b.said(2)) == 1


def test_a_step_takes_the_time_of_its_prefill_and_of_its_decode() -> None:
    b = bench(
        kv_blocks=16384,
        block_size=64,
        routing_block_size=64,
        context_length=8192,
        timing=TimingSpec(),
    )
    b.submit(1, list(range(1000)), max_tokens=2)
    b.step()
    b.step()
    assert b.now == pytest.approx((4.21e-7 * 1000**2 + 0.01518 * 1000 + 16.5) / 1000)
    b.run()
    share = 16 / 16384
    decode = -25.74 * share**2 + 54.01 * share + 5.74
    assert b.now == pytest.approx((4.21e-7 * 1000**2 + 0.01518 * 1000 + 16.5 + decode) / 1000)


def test_higher_priority_runs_first_then_arrival() -> None:
    b = bench(max_sequences=1)
    b.submit(1, [1], priority=0, max_tokens=1)
    b.submit(2, [2], priority=0, max_tokens=1)
    b.submit(3, [3], priority=5, max_tokens=1)
    b.run()
    assert [o.lease for o in b.outputs] == [lease(3), lease(1), lease(2)]


def test_the_least_urgent_latest_request_is_preempted_and_still_says_its_whole_answer() -> None:
    b = bench(kv_blocks=6)
    for serial, priority in ((1, 0), (2, 1), (3, 0)):
        b.submit(
            serial,
            [serial * 10 + i for i in range(7)],
            priority=priority,
            max_tokens=8,
            text=list(range(30)),
        )
    b.step()
    b.step()
    assert b.running() == [2, 1, 3]
    b.step()
    b.step()
    assert b.engine.scheduler.preemptions == 1
    assert b.running() == [2, 1]
    b.run()
    for serial in (1, 2, 3):
        assert b.said(serial) == list(range(8))
        assert b.last(serial).finish == "length"


def test_the_recomputed_request_reuses_its_own_pages_but_reports_what_it_found_first() -> None:
    b = bench(kv_blocks=5)
    b.submit(1, list(range(10, 18)), max_tokens=6)
    b.submit(2, list(range(20, 28)), max_tokens=6)
    b.run()
    assert b.engine.scheduler.preemptions
    assert b.engine.scheduler.reused_tokens >= 4
    assert {o.cached_tokens for o in b.outputs} == {0}


def test_nothing_is_admitted_in_a_step_that_had_to_preempt() -> None:
    b = bench(kv_blocks=4)
    b.submit(1, list(range(10, 17)), max_tokens=8)
    b.submit(2, list(range(20, 27)), max_tokens=8)
    for _ in range(2):
        b.step()
    b.submit(3, [30], max_tokens=1, priority=1)
    b.step()
    assert b.engine.scheduler.preemptions == 1
    assert b.running() == [1]
    b.step()
    assert b.running() == [1, 3]


def test_a_prefill_may_preempt_a_less_urgent_one_out_of_the_step_under_way() -> None:
    b = bench(kv_blocks=4, max_batched_tokens=5)
    b.submit(1, list(range(10, 12)), max_tokens=8, text=list(range(30, 40)))
    b.step()
    b.submit(2, list(range(20, 32)), priority=1, max_tokens=1)
    for _ in range(3):
        b.step()
    # The decode took the last page just before the third chunk needed it.
    assert b.engine.scheduler.preemptions == 1
    assert b.running() == [2]
    assert len(b.said(1)) == 3
    b.run()
    assert b.said(1) == list(range(30, 38))
    assert b.last(2).finish == "length"


def test_a_prompt_that_is_cached_whole_still_computes_its_last_page() -> None:
    b = bench()
    b.submit(1, list(range(8)), max_tokens=1)
    b.run()
    b.submit(2, list(range(8)), max_tokens=1)
    b.run()
    assert b.last(2).cached_tokens == 4
    assert b.engine.prefilled_tokens == 8 + 4


def test_an_answer_is_cached_too_but_for_its_last_token_which_was_never_computed() -> None:
    b = bench()
    b.submit(1, [1, 2, 3], max_tokens=6, text=[11, 12, 13, 14, 15, 16])
    b.run()
    told = [1, 2, 3, 11, 12, 13, 14, 15, 16]
    b.submit(2, [*told, 4], max_tokens=1)
    b.run()
    assert b.last(2).cached_tokens == 8
    b.submit(3, [1, 2, 3, 11, 12, 13, 99, 15, 16], max_tokens=1)
    b.run()
    assert b.last(3).cached_tokens == 4


def test_namespaces_and_adapters_share_nothing() -> None:
    b = bench()
    prompt = list(range(9))
    for serial, extra in enumerate(
        ({}, {"namespace": "a"}, {"lora": "x"}, {"namespace": "a"}), start=1
    ):
        b.submit(serial, prompt, max_tokens=1, **extra)
        b.run()
    assert [b.last(s).cached_tokens for s in (1, 2, 3, 4)] == [0, 0, 0, 8]
    for extra in ({}, {"namespace": "a"}, {"lora": "x"}):
        expected = sequence_hashes(token_frame(prompt), 4, seed=hash_seed(**extra))
        assert set(expected) <= set(b.hashes)


def test_events_name_whole_routing_blocks_in_one_run_with_their_parent() -> None:
    b = bench(block_size=2, routing_block_size=4)
    prompt = list(range(11))
    b.submit(1, prompt, max_tokens=1)
    b.run()
    blocks = list(sequence_hashes(token_frame(prompt), 4))
    assert b.events == [KvStored(parent=None, count=2)]
    assert b.hashes == blocks
    b.submit(2, [*prompt, 50, 51], max_tokens=1)
    b.run()
    assert b.events[1:] == [KvStored(parent=blocks[1], count=1)]


def test_evicted_blocks_are_told_tails_first() -> None:
    b = bench(kv_blocks=4)
    b.submit(1, list(range(12)), max_tokens=1)
    b.run()
    first = list(sequence_hashes(token_frame(list(range(12))), 4))
    b.submit(2, list(range(50, 61)), max_tokens=1)
    b.run()
    assert b.events[1] == KvRemoved(count=2)
    assert b.hashes[3:5] == [first[2], first[1]]


def test_without_kv_events_it_caches_silently() -> None:
    b = bench(kv_events=False, kv_blocks=4, block_size=2)
    assert "kv_events" not in b.engine.info.features
    for serial in (1, 2):
        b.submit(serial, [1, 2, 3, 4, 5], max_tokens=1)
        b.run()
    b.submit(3, [7, 8, 9, 10, 11, 12], max_tokens=2)
    b.run()
    assert b.last(2).cached_tokens == 4
    assert b.engine.pool.evictions
    assert b.engine.clear_cache()
    assert (b.events, b.hashes) == ([], [])


def test_without_prefix_caching_nothing_is_found_and_nothing_told() -> None:
    b = bench(prefix_caching=False)
    for serial in (1, 2):
        b.submit(serial, list(range(9)), max_tokens=1)
        b.run()
    assert b.last(2).cached_tokens == 0
    assert b.events == []
    assert b.engine.load().kv_cached == 0


def test_clearing_the_cache_is_told_by_the_next_step_and_not_done_under_load() -> None:
    b = bench()
    b.submit(1, list(range(9)), max_tokens=2)
    b.step()
    assert not b.engine.clear_cache()
    b.run()
    assert b.engine.clear_cache()
    assert b.engine.next_step_at(b.now) == b.now
    b.run()
    assert b.events[-1] == KvCleared()
    b.submit(2, list(range(9)), max_tokens=1)
    b.run()
    assert b.last(2).cached_tokens == 0


def test_an_abort_frees_everything_at_every_stage() -> None:
    b = bench(max_batched_tokens=4, max_sequences=2)
    b.submit(1, [1, 2], max_tokens=9)
    b.step()
    b.step()
    b.submit(2, list(range(10, 30)), max_tokens=9)
    b.step()
    b.submit(3, [3], max_tokens=9)
    b.submit(4, [4], max_tokens=9, delay_s=100.0)
    for serial in (4, 3, 2, 1):
        output = b.engine.abort(lease(serial), error="why")
        assert output is not None
        assert (output.finish, output.error) == ("abort", "why")
        b.engine.check_integrity()
    assert b.engine.load().kv_referenced == 0
    b.run()
    assert b.engine.next_step_at(b.now) is None
    assert b.engine.abort(lease(1)) is None


def test_a_delayed_answer_comes_after_its_delay_and_holds_no_pages_meanwhile() -> None:
    b = bench()
    b.submit(1, [1, 2, 3], max_tokens=1, delay_s=7.5)
    load = b.engine.load()
    assert (load.waiting, load.running, load.kv_referenced) == (1, 0, 0)
    assert b.engine.next_step_at(0.0) == 7.5
    b.submit(2, [1, 2, 3], max_tokens=1)
    b.run()
    assert [o.lease for o in b.outputs] == [lease(2), lease(1)]
    assert b.now == 8.5


def test_a_resumed_attempt_is_not_delayed_again_and_continues_the_answer() -> None:
    b = bench()
    b.submit(1, [1, 2, 30, 31], resumed=2, max_tokens=5, text=[30, 31, 32, 33], delay_s=60.0)
    b.run()
    assert b.said(1) == [32, 33, EOS]
    assert b.now == 3.0
    assert (b.last(1).finish, b.last(1).stop_token) == ("stop", EOS)


def test_max_tokens_counts_from_the_first_attempt() -> None:
    b = bench()
    b.submit(1, [1, 30, 31, 32], resumed=3, max_tokens=4, text=list(range(30, 50)))
    b.run()
    assert b.said(1) == [33]
    assert b.last(1).finish == "length"


@pytest.mark.parametrize(
    ("sampling", "said", "finish", "stop"),
    [
        (Sampling(max_tokens=9), [1, 2, 3, EOS], "stop", EOS),
        (Sampling(max_tokens=2), [1, 2], "length", None),
        (Sampling(max_tokens=9, min_tokens=5), [1, 2, 3, 1, 2, EOS], "stop", EOS),
        (Sampling(max_tokens=5, ignore_eos=True), [1, 2, 3, 1, 2], "length", None),
        (Sampling(max_tokens=9, stop_token_ids=[2]), [1, 2], "stop", 2),
        (Sampling(max_tokens=9, stop_token_ids=[2], min_tokens=2), [1, 2, 3, EOS], "stop", EOS),
        (Sampling(max_tokens=2, stop_token_ids=[2]), [1, 2], "stop", 2),
    ],
)
def test_an_answer_ends_as_the_sampling_says(
    sampling: Sampling, said: list[int], finish: str, stop: int | None
) -> None:
    b = bench()
    b.submit(1, [1, 2], sampling=sampling, text=[1, 2, 3])
    b.run()
    assert b.said(1) == said
    assert (b.last(1).finish, b.last(1).stop_token) == (finish, stop)


def test_logprobs_say_that_nothing_else_could_have_come() -> None:
    b = bench()
    b.submit(1, [1], sampling=Sampling(max_tokens=2, logprobs=0), text=[4, 5])
    b.run()
    assert [o.logprobs for o in b.outputs] == [[[(4, 0.0)]], [[(5, 0.0)]]]


def test_an_answer_ends_with_the_context_window() -> None:
    b = bench(context_length=10)
    b.submit(1, list(range(8)), max_tokens=50)
    b.run()
    assert len(b.said(1)) == 2
    assert b.last(1).finish == "length"


def test_the_context_is_what_the_pages_can_hold() -> None:
    b = bench(kv_blocks=3)
    assert b.engine.info.context_length == 12
    b.submit(1, list(range(11)), max_tokens=5)
    b.run()
    assert len(b.said(1)) == 1


def test_the_watermark_keeps_newcomers_out_but_never_the_only_request() -> None:
    b = bench(kv_blocks=10, watermark=0.5)
    b.submit(1, list(range(32)), max_tokens=3)
    b.step()
    assert b.running() == [1]
    b.submit(2, list(range(50, 54)), max_tokens=1)
    b.step()
    assert b.running() == [1]
    b.run()
    assert b.last(2).finish == "length"


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    b = bench(kv_blocks=6)
    b.submit(1, list(range(12)), max_tokens=4)
    b.step()
    b.submit(2, list(range(20, 36)), max_tokens=1)
    b.submit(3, [50], max_tokens=1)
    b.run()
    assert [o.lease for o in b.outputs if o.finish] == [lease(1), lease(2), lease(3)]


def test_a_late_caller_catches_up_without_drift() -> None:
    b = bench()
    b.submit(1, [1], max_tokens=50)
    b.step()
    tokens = 0
    while (at := b.engine.next_step_at(20.25)) is not None and at <= 20.25:
        tokens += len(b.engine.step(20.25).outputs)
    assert tokens == 20
    assert b.engine.next_step_at(20.25) == 21.0


def test_a_caller_later_than_the_catch_up_goes_on_from_now() -> None:
    b = bench(catch_up_s=2.0)
    b.submit(1, [1], max_tokens=50)
    b.step()
    assert len(b.engine.step(20.25).outputs) == 1
    assert b.engine.next_step_at(20.25) == 21.25


def test_a_step_before_its_time_does_nothing() -> None:
    b = bench()
    b.submit(1, [1], max_tokens=2)
    b.step()
    assert b.engine.step(0.5).outputs == []
    assert b.engine.next_step_at(0.5) == 1.0


@pytest.mark.parametrize(
    ("prompt", "extra", "words"),
    [
        ([], {}, "prompt is empty"),
        ([1, 2], {"resumed": 2}, "prompt is empty"),
        ([1, 2], {"resumed": -1}, "prompt is empty"),
        (list(range(100)), {}, "fill the context"),
        ([1, 2, 3], {"resumed": 2, "max_tokens": 2}, "are made already"),
        ([1], {"max_tokens": 0}, "are made already"),
    ],
)
def test_what_can_not_run_is_refused_and_leaves_nothing(
    prompt: list[int], extra: dict[str, Any], words: str
) -> None:
    b = bench()
    with pytest.raises(EngineRefused, match=words) as refused:
        b.submit(1, prompt, **extra)
    assert refused.value.code == "invalid"
    assert b.engine.live == 0
    assert b.engine.next_step_at(0.0) is None


def test_a_lease_runs_once_at_a_time() -> None:
    b = bench()
    b.submit(1, [1])
    with pytest.raises(EngineRefused, match="running already"):
        b.submit(1, [1])


def test_the_waiting_queue_is_bounded() -> None:
    b = bench(max_sequences=1)
    for serial in range(1, LIVE_PER_SEQUENCE + 1):
        b.submit(serial, [1], max_tokens=1)
    with pytest.raises(EngineRefused) as refused:
        b.submit(9999, [1])
    assert refused.value.code == "full"
    b.run()
    assert len(b.outputs) == LIVE_PER_SEQUENCE


def test_a_draining_engine_takes_nothing_new_and_finishes_what_runs() -> None:
    b = bench()
    b.submit(1, [1], max_tokens=3)
    b.step()
    b.engine.drain()
    with pytest.raises(EngineRefused) as refused:
        b.submit(2, [1])
    assert refused.value.code == "draining"
    b.run()
    assert b.last(1).finish == "length"


def test_load_is_told_by_router() -> None:
    b = bench(max_sequences=1)
    for serial, router in ((1, 0), (2, 3), (3, 3)):
        b.engine.submit(
            EngineRequest(
                lease=lease(serial, router),
                tokens=token_frame([1, 2, 3]),
                sampling=Sampling(max_tokens=5),
            ),
            Speech(array("I", [1] * 9), eos=EOS),
            0.0,
        )
    b.step()
    b.step()
    load = b.engine.load()
    assert (load.running, load.waiting, load.steps, load.output_tokens) == (1, 2, 1, 1)
    assert {n: (t.active, t.waiting, t.charged_tokens) for n, t in load.routers.items()} == {
        0: (1, 0, 4),
        3: (0, 2, 6),
    }

from __future__ import annotations

from array import array
from itertools import count

import pytest

from fermata.core.spec import TimingSpec
from fermata.worker.engine.speech import Speech
from fermata.worker.engine.timing import step_seconds


def test_text_that_comes_lazily_is_made_only_as_far_as_it_is_said() -> None:
    made: list[int] = []

    def words() -> count[int]:
        for value in count(100):
            made.append(value)
            yield value

    speech = Speech(array("I", [1, 2]), eos=0, length=50, more=words())
    assert [speech.token(i) for i in (0, 1, 2)] == [1, 2, 100]
    assert made == [100]
    assert speech.token(7) == 105
    assert speech.token(2) == 100
    assert speech.token(50) == 1


def test_an_empty_text_that_may_not_stop_repeats_eos() -> None:
    assert Speech(array("I"), eos=3).token(5) == 3


@pytest.mark.parametrize(
    ("prefill", "decoding", "share", "milliseconds"),
    [
        (0, False, 0.5, 0.0),
        (100, False, 0.5, 4.21e-7 * 1e4 + 1.518 + 16.5),
        (0, True, 0.0, 5.74),
        (0, True, 1.0, -25.74 + 54.01 + 5.74),
        (0, True, 7.0, -25.74 + 54.01 + 5.74),
        (100, True, 0.0, 4.21e-7 * 1e4 + 1.518 + 16.5 + 5.74),
    ],
)
def test_the_default_timing_is_the_fitted_one(
    prefill: int, decoding: bool, share: float, milliseconds: float
) -> None:
    seconds = step_seconds(
        TimingSpec(), prefill_tokens=prefill, is_decoding=decoding, kv_share=share
    )
    assert seconds * 1000 == pytest.approx(milliseconds)


def test_decode_takes_at_least_a_millisecond_and_time_never_runs_back() -> None:
    low = TimingSpec(decode_constant=-50.0, prefill_constant=-900.0)
    assert step_seconds(low, prefill_tokens=0, is_decoding=True, kv_share=0.0) == 0.001
    assert step_seconds(low, prefill_tokens=1, is_decoding=False, kv_share=0.0) == 0.0

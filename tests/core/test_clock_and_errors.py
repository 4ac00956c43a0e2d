"""One clock for a deployment, and errors that carry what a caller needs."""

from __future__ import annotations

import time

import pytest

from fermata.core import errors
from fermata.core.clock import Clock, SystemClock, VirtualClock
from fermata.core.errors import ConfigError, ContextTooLong, FermataError, Overloaded, TurnError


def test_a_system_clock_runs_speedup_times_as_fast_as_the_wall() -> None:
    clock: Clock = SystemClock(speedup=50)
    assert clock.speedup == 50
    low = time.monotonic() * 50
    now = clock.now()
    assert low <= now <= time.monotonic() * 50
    assert clock.real_delay(100.0) == 2.0
    assert clock.real_delay(-1.0) == 0.0
    assert abs(clock.unix_ms() - time.time() * 1000) < 1000


@pytest.mark.parametrize("speedup", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_or_runs_back_is_refused(speedup: float) -> None:
    with pytest.raises(ValueError, match="speedup must be above 0"):
        SystemClock(speedup=speedup)


def test_virtual_time_moves_only_when_told_and_never_back() -> None:
    clock = VirtualClock(5.0, unix_start_ms=1000)
    assert (clock.now(), clock.unix_ms(), clock.speedup) == (5.0, 1000, 1.0)
    assert clock.advance(1.5) == clock.now() == 6.5
    assert clock.unix_ms() == 2500
    assert clock.advance_to(6.5) == 6.5
    assert clock.real_delay(3.0) == 3.0
    with pytest.raises(ValueError, match="time can not go back"):
        clock.advance_to(6.0)
    assert clock.now() == 6.5


def test_a_config_error_reads_place_what_and_fix() -> None:
    assert str(ConfigError("is wrong")) == "is wrong"
    error = ConfigError("is wrong", where="f.yaml:3", fix="put it right")
    assert str(error) == "f.yaml:3: is wrong (put it right)"
    assert (error.where, error.fix) == ("f.yaml:3", "put it right")


def subclasses(kind: type[FermataError]) -> list[type[FermataError]]:
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in subclasses(sub))]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = [
        line.split()[0]
        for line in errors.__doc__.splitlines()
        if line.lstrip().split(" ")[0].isalnum()
    ]
    ours = [kind for kind in subclasses(FermataError) if kind.__module__ == errors.__name__]
    assert {kind.__name__ for kind in ours} <= set(drawn)
    for kind in ours:
        if issubclass(kind, TurnError) and kind is not TurnError:
            line = next(
                line for line in errors.__doc__.splitlines() if line.split()[:1] == [kind.__name__]
            )
            assert f" {kind.status} " in line, f"{kind.__name__} has another status than its line"


def test_a_turn_error_carries_what_the_caller_s_dialect_needs() -> None:
    error = Overloaded("all busy", retry_after_s=3.0)
    assert (error.status, error.code, error.message, error.retry_after_s) == (
        529,
        "overloaded",
        "all busy",
        3.0,
    )
    too_long = ContextTooLong("200k", param="messages")
    assert (too_long.status, too_long.param) == (400, "messages")
    assert too_long.code == "context_length_exceeded"

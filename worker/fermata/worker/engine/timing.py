"""How long a step of the simulated engine takes."""

from __future__ import annotations

from fermata.core.spec import TimingSpec


def step_seconds(
    timing: TimingSpec, *, prefill_tokens: int, is_decoding: bool, kv_share: float
) -> float:
    """`kv_share`: pages held / pages. A step without prefill or without decode does not pay for it."""
    t, p = prefill_tokens, min(1.0, kv_share)
    prefill = (
        timing.prefill_quadratic * t * t + timing.prefill_linear * t + timing.prefill_constant
        if t
        else 0.0
    )
    decode = (
        max(
            1.0, timing.decode_quadratic * p * p + timing.decode_linear * p + timing.decode_constant
        )
        if is_decoding
        else 0.0
    )
    # Coefficients are the user's: a fitted curve may dip below zero somewhere, time may not.
    return max(0.0, prefill + decode) / 1000.0

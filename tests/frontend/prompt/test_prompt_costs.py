"""Counts and same-run ratios of the benchmark, with twice the slack: absolute times belong to `make bench`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(60)
def test_a_turns_cost_does_not_grow_with_its_history() -> None:
    file = Path(__file__).resolve().parents[3] / "benchmarks" / "prompt_bench.py"
    spec = importlib.util.spec_from_file_location("prompt_bench", file)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    found = {row["name"]: row["value"] for row in bench.measurements()}
    assert found["prompt: tokens and blocks touched at one of them only"] == 0
    assert found["prompt: tokenise + hash 500 new, 128k against 8k"] <= 2 * 1.3
    # What may grow with the history is a compare and a copy: 16 times as long, it must stay far from 16 times as dear.
    assert found["prompt: text to frames at 128k"] <= 8 * found["prompt: text to frames at 8k"]

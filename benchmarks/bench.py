"""`make bench`: collects the measurements of every part, prints them against their targets, writes build/bench.json.

Never fails, since a shared machine decides the numbers: CI asserts counts and ratios of one run in the tests instead.
A part's file here defines `measurements()`, which yields `name`, `value`, `unit`, `target` (a number or None) and
`better` ("lower" or "higher"), as a mapping or as attributes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "build" / "bench.json"
PARTS = ("router", "program", "worker", "prompt", "frontend")


@dataclass(frozen=True)
class Measurement:
    name: str
    value: float
    unit: str
    target: float | None
    better: str

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def read(raw: Any) -> Measurement:
    def take(name: str) -> Any:
        return raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)

    better = str(take("better"))
    if better not in {"lower", "higher"}:
        raise ValueError(f"better is {better!r}, not lower or higher: {raw}")
    target = take("target")
    return Measurement(
        name=str(take("name")),
        value=float(take("value")),
        unit=str(take("unit")),
        target=None if target is None else float(target),
        better=better,
    )


def collect(part: str) -> Iterator[Measurement]:
    """What a part measured before it broke, if it breaks."""
    path = HERE / f"{part}_bench.py"
    if not path.exists():
        print(f"no {path.name}", file=sys.stderr)
        return
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        for raw in module.measurements():
            yield read(raw)
    except Exception:  # a broken benchmark must not hide the others
        print(f"{path.name} failed:\n{traceback.format_exc()}", file=sys.stderr)


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(measured: list[Measurement]) -> str:
    rows = [("name", "value", "unit", "target", "better", "met?")]
    for m in measured:
        met = {None: "", True: "yes", False: "NO"}[m.met]
        target = "" if m.target is None else figure(m.target)
        rows.append((m.name, figure(m.value), m.unit, target, m.better, met))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in {1, 3} else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def main() -> int:
    started = time.perf_counter()
    measured: list[Measurement] = []
    for part in PARTS:
        measured.extend(collect(part))
    print(table(measured))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    results = [asdict(m) | {"met": m.met} for m in measured]
    OUT.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    print(
        f"\n{len(measured)} measurements in {time.perf_counter() - started:.0f} s, written to build/{OUT.name}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

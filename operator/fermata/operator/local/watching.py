"""`--watch`: the same look again and again, in place on a terminal and one after another elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TextIO

EVERY_S = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[2J"


async def watch(
    draw: Callable[[], Awaitable[str]], *, out: TextIO, every_s: float, times: int | None = None
) -> None:
    """Until cancelled, or the reader is gone; `times` is for tests."""
    count = 0
    while times is None or count < times:
        text = await draw()
        lead = _HOME_AND_CLEAR if out.isatty() else "\n" if count else ""
        count += 1
        with suppress(ValueError):  # closed
            print(f"{lead}{text}", file=out, flush=True)
        if times is None or count < times:
            await asyncio.sleep(every_s)

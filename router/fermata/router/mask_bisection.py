"""Where masks of holders change along a chain on which they only shrink: one bisection a change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


class NotClosed(Exception):
    """Masks grew along a chain that was thought closed."""


def bisect_masks(
    view: memoryview, present: Callable[[int], object], item: Callable[[int], int]
) -> list[tuple[int, int]]:
    """(depth, bits that end there) where masks only shrink along the chain; `item` is asked for present blocks."""
    depth = _union_depth(view, present)
    if not depth:
        return []
    # Reversed, masks rise, which is what bisect wants.
    rising = view[:depth][::-1]
    found: list[tuple[int, int]] = []
    mask = item(view[0])
    end = depth
    while True:
        start = bisect_left(rising, mask, 0, end, key=item)
        if not start:
            found.append((depth, mask))
            return found
        rest = item(rising[start - 1])
        if rest & ~mask:
            raise NotClosed
        found.append((depth - start, mask ^ rest))
        mask = rest
        end = start - 1


def _union_depth(view: memoryview, present: Callable[[int], object]) -> int:
    """How many blocks some slot has."""
    low, high = 0, len(view)
    if present(view[high - 1]):
        return high
    while low < high:
        middle = (low + high) >> 1
        if present(view[middle]):
            low = middle + 1
        else:
            high = middle
    return low

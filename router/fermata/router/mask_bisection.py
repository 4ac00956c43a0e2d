"""Where masks of holders change along a chain on which they only shrink: one bisection a change.

A holder whose blocks are not what was thought could mislead the bisection about others too. So each depth is checked
at its two ends: those that leave there have the block before and lack the block behind, which for a closed holder is
proof. Otherwise NotClosed says that only a walk will do.
"""

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
            if mask & ~item(rising[0]):
                raise NotClosed
            found.append((depth, mask))
            return found
        rest = item(rising[start - 1])
        lost = mask ^ rest
        if rest & ~mask or lost & ~item(rising[start]):
            raise NotClosed
        found.append((depth - start, lost))
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

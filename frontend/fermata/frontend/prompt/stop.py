"""Stop strings over a text stream: holds back only what could still become a stop.

The first stop to *complete* ends the text; of several that complete at the same character the longest. That rule,
unlike "the first of the list that is found", does not depend on how the text was cut into deltas.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One output stream. A push costs O(text x stops), in `str.find`'s constant, and looks at nothing sent before."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Empty strings are ignored. `include_stop`: the stop itself is sent too."""
        self.matched: str | None = None
        """The stop that ended the text."""
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """Text to send now. After a match: nothing more, ever."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        end, stop = self._first_match(whole)
        if stop:
            self.matched = stop
            self._held = ""
            return whole[: end if self._include_stop else end - len(stop)]
        keep = len(whole) - self._unsure(whole)
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str]:
        """Where the first stop to complete ends, and which one; an empty one where none does."""
        first, found = len(text) + 1, ""
        for stop in self._stops:
            start = text.find(stop, 0, first)
            end = start + len(stop)
            if start >= 0 and (end < first or len(stop) > len(found)):
                first, found = end, stop
        return first, found

    def _unsure(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                at = text.find(stop[0], at + 1)
        return longest

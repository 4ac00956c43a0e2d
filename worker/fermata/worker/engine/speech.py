"""What a simulated request will say: known from the start, so that neither batching nor preemption
nor migration can change it.

Output token i is a function of i alone, counted from the turn's first attempt: a resumed attempt
continues where the last one ended without any state travelling.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class Speech:
    """`length` tokens of text, then EOS. Text may come lazily: only what is said is ever made."""

    __slots__ = ("_more", "_text", "delay_s", "eos", "length")

    def __init__(
        self,
        text: array[int],
        *,
        eos: int,
        delay_s: float = 0.0,
        length: int | None = None,
        more: Iterator[int] | None = None,
    ) -> None:
        """`more` continues `text` up to `length`, which defaults to that of `text`."""
        self._text = text
        self._more = more
        self.eos = eos
        self.delay_s = delay_s
        """Deployment seconds before the first token."""
        self.length = len(text) if length is None else length
        assert more is not None or self.length <= len(text)

    def token(self, index: int) -> int:
        """Text token `index`. Past the end, which only a request that may not stop reaches, the text starts again."""
        if index >= self.length:
            if not self.length:
                return self.eos
            index %= self.length
        while index >= len(self._text):
            assert self._more is not None
            self._text.append(next(self._more))
        return self._text[index]

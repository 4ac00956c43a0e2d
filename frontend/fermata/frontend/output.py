"""From a turn's tokens to the pieces of answer its client sees: detokeniser, stop strings, parser.

Pure and incremental: the pieces do not depend on how the tokens came. All that is ready is taken at once, so a busy
frontend does less work a token, not more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from fermata.frontend.prompt import Detokenizer, StopStrings

TokenLogprobs = list[tuple[int, float]]
"""One token's: (token, logprob), the sampled one first."""


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


Delta = Content
"""What parsers of reasoning and tool calls will widen."""


class OutputParser(Protocol):
    """Raw model text to deltas. Same deltas, joined, for every chunking."""

    def push(self, text: str) -> Sequence[Delta]: ...

    def flush(self) -> Sequence[Delta]: ...


class PlainText:
    """No parser: the model's text, markup included, is the answer."""

    def push(self, text: str) -> Sequence[Delta]:
        return (Content(text),) if text else ()

    def flush(self) -> Sequence[Delta]:
        return ()


class Output:
    """One turn's. Push what is new until `has_stopped` or the turn ends, then flush once."""

    def __init__(
        self, *, detokenizer: Detokenizer, stops: StopStrings | None, parser: OutputParser
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._parser = parser

    @property
    def has_stopped(self) -> bool:
        """A stop string ended it: the engine need not go on."""
        return self._stops is not None and self._stops.matched is not None

    @property
    def stop(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    def push(self, tokens: array[int]) -> Sequence[Delta]:
        text = self._detokenizer.push(tokens)
        if self._stops is not None:
            text = self._stops.push(text)
        return self._parser.push(text)

    def flush(self) -> Sequence[Delta]:
        text = self._detokenizer.flush()
        if self._stops is not None:
            text = self._stops.push(text) + self._stops.flush()
        return [*self._parser.push(text), *self._parser.flush()]

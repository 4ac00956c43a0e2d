"""Stop strings over a text stream: holds back only what could still become a stop."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The first stop that completes ends the text, whatever the chunking; of several that complete at the same character
    the longest one counts.
    """

    matched: str | None
    """The stop that ended the text."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        raise NotImplementedError

    def push(self, text: str) -> str:
        """Text to send now. After a match: nothing more, ever."""
        raise NotImplementedError

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        raise NotImplementedError

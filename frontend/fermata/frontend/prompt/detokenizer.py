"""Output tokens to text as they come, in any chunking, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fermata.frontend.prompt.tokenizer import Tokenizer


class Vocabulary:
    """What detokenisers of one folder share: built once, read-only."""

    @classmethod
    def load(cls, file: Path, tokenizer: Tokenizer) -> Vocabulary:
        raise NotImplementedError

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        raise NotImplementedError


class Detokenizer:
    """One output stream. O(new tokens) a call."""

    def push(self, tokens: Sequence[int] | memoryview) -> str:
        """Text that is certain now; `tokens` may be an Output frame cast to `I`."""
        raise NotImplementedError

    def flush(self) -> str:
        """The rest, at the end of the output: U+FFFD where a character was cut off."""
        raise NotImplementedError

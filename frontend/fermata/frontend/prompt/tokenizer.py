"""Text to ids and back, by the fastest library that is proven right for this model folder."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """Ids without post-processor, truncation or padding: the template brings the special tokens itself."""

    @property
    def vocab_size(self) -> int:
        """One above the highest id, added tokens included."""
        ...

    def encode(self, text: str) -> array[int]:
        """Ids as `array('I')`."""
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> tuple[bytes, list[int]]:
        """Each piece on its own: the u32 frame of all, and where in it each piece starts, in tokens. Thread-safe, no state."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Unknown ids are dropped."""
        ...

    def token_to_id(self, token: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class TokenizerChoice:
    """Which library serves, and why: log it once at start."""

    library: str
    """`fastokens` or `tokenizers`."""
    reason: str
    probes: int
    probe_s: float


def load_tokenizer(file: Path) -> tuple[Tokenizer, TokenizerChoice]:
    """`fastokens` where the probe of 500 strings equals `tokenizers`, else `tokenizers`."""
    raise NotImplementedError

"""Tokenises text and says how many tokens stand before each of its safe boundaries.

Where no safe token's id can come from other text, as in all models whose added tokens lie outside of the model's own
vocabulary, the text is tokenised in one go and the boundaries are found again in the ids: a third less a turn than
piece by piece, which is the way for the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from fermata.core.hashing import TOKEN_BYTES, token_frame
from fermata.frontend.prompt.boundary import SafeBoundaries
from fermata.frontend.prompt.tokenizer import Tokenizer


class BoundaryEncoder:
    """Stateless after construction, so `encode` may run in any thread."""

    def __init__(self, tokenizer: Tokenizer, boundaries: SafeBoundaries) -> None:
        self._tokenizer = tokenizer
        self._boundaries = boundaries
        self._frames = {content: token_frame([i]) for content, i in boundaries.ids.items()}
        self._are_ids_unmistakable = not tokenizer.spelled_by_model(boundaries.tokens)

    def encode(self, text: str, start: int, cuts: Sequence[int]) -> tuple[bytes, array[int]]:
        """The frame of `text[start:]`, and how many tokens of it stand before `start`, each of `cuts` and the end.

        `cuts` are all safe boundaries after `start`, in order.
        """
        if self._are_ids_unmistakable:
            frame = self._tokenizer.encode_frame(text[start:])
            return frame, self._find(frame, text, start, cuts)
        edges = [start, *cuts, len(text)]
        return self._tokenizer.encode_pieces([text[a:b] for a, b in pairwise(edges)])

    def _find(self, frame: bytes, text: str, start: int, cuts: Sequence[int]) -> array[int]:
        """The next boundary is the next place where its token's id stands, as it stands nowhere else."""
        starts = array("Q", [0])
        # The token that begins the text is the one before the first cut.
        at = 0 if self._boundaries.at(text, start) else -TOKEN_BYTES
        for cut in cuts:
            spelled = self._frames[self._boundaries.token_at(text, cut)]
            at = frame.index(spelled, at + TOKEN_BYTES)
            while at % TOKEN_BYTES:
                at = frame.index(spelled, at + 1)
            starts.append(at // TOKEN_BYTES)
        starts.append(len(frame) // TOKEN_BYTES)
        return starts

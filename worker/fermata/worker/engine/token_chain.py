"""The hashes of one sequence as it grows: of its pages, by which the engine caches, and of its routing blocks, by
which routers know it.

The prompt is hashed once, at submission, and then forgotten; each generated token costs an append, each page
it fills one hash. A routing block is a whole number of pages; with one page a block the two chains are one.
"""

from __future__ import annotations

from array import array

from typing_extensions import Buffer

from fermata.core.hashing import TOKEN_BYTES, sequence_hashes


class TokenChain:
    __slots__ = (
        "_block_tokens",
        "_page_tokens",
        "_per_block",
        "_seed",
        "blocks",
        "length",
        "pages",
        "tail",
    )

    def __init__(self, tokens: Buffer, *, page_tokens: int, block_tokens: int, seed: int) -> None:
        assert block_tokens % page_tokens == 0
        view = memoryview(tokens).cast("B")
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._per_block = block_tokens // page_tokens
        self._seed = seed
        self.length = len(view) // TOKEN_BYTES
        self.pages = sequence_hashes(view, page_tokens, seed=seed)
        self.blocks = self.pages
        if self._per_block > 1:
            self.blocks = sequence_hashes(view, block_tokens, seed=seed)
        full = self.length - self.length % block_tokens
        self.tail = array("I", bytes(view[full * TOKEN_BYTES :]))

    def append(self, token: int) -> None:
        self.tail.append(token)
        self.length += 1
        if self.length % self._page_tokens == 0:
            self._close_page()

    def _close_page(self) -> None:
        page = self.tail[-self._page_tokens :]
        self.pages.append(self._next(page, self.pages, self._page_tokens))
        if len(self.tail) < self._block_tokens:
            return
        if self._per_block > 1:
            self.blocks.append(self._next(self.tail, self.blocks, self._block_tokens))
        self.tail = array("I")

    def _next(self, tokens: array[int], chain: array[int], size: int) -> int:
        parent = chain[-1] if chain else None
        return sequence_hashes(tokens, size, seed=self._seed, parent=parent)[0]

    def block_ending_at(self, page: int) -> int | None:
        """Index of the routing block whose last page is `page`."""
        index, rest = divmod(page + 1, self._per_block)
        return None if rest else index - 1

    def parent_of(self, block: int) -> int | None:
        return self.blocks[block - 1] if block else None

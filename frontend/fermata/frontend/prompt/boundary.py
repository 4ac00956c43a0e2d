"""Where a text may be cut so that both halves, tokenised apart, give the ids of the whole.

A tokenizer first takes the added tokens out of the raw text and then normalises, splits and merges each piece between
them alone. So the start of an added token is a safe place to cut, provided that
it is matched in the raw text (`normalized=false`),
it takes no white space from its left (`lstrip=false`) and looks at no neighbour (`single_word=false`),
wherever its text stands it *is* matched: no other added token contains it or can cover its beginning,
and it begins with a mark, so that a `single_word` token to its left ends a word either way.

The right half begins with the token itself, never after it: what follows then is not at offset 0, where some
tokenizers put a space in front.

A text's last safe boundary at or before the point where it leaves a known text is where its tokenisation goes on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from fermata.core.model_folder import AddedToken

# Neither white space nor what any regex library counts as part of a word.
_MARKS = frozenset({"Ps", "Pe", "Pi", "Pf", "Pd", "Po", "Sm", "Sc", "Sk"})

_Trie: TypeAlias = dict[str, "_Trie"]


class SafeBoundaries:
    """The safe added tokens of one tokenizer; immutable."""

    def __init__(self, added_tokens: Sequence[AddedToken]) -> None:
        hiding = _Hiding([token.content for token in added_tokens if token.content])
        self.ids = {t.content: t.id for t in added_tokens if _is_safe(t, hiding)}
        self._pattern = re.compile(_any_of(self.ids)) if self.ids else None

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(self.ids)

    def starts(self, text: str, start: int) -> list[int]:
        """Boundaries at or after `start`, in order. O(length of the rest)."""
        if self._pattern is None:
            return []
        return [match.start() for match in self._pattern.finditer(text, start)]

    def next(self, text: str, start: int) -> int | None:
        """The first boundary at or after `start`."""
        found = self._pattern.search(text, start) if self._pattern else None
        return found.start() if found else None

    def token_at(self, text: str, boundary: int) -> str:
        """The safe token that begins there."""
        found = self._pattern.match(text, boundary) if self._pattern else None
        assert found is not None, boundary
        return found.group()

    def at(self, text: str, position: int) -> bool:
        return self._pattern is not None and self._pattern.match(text, position) is not None


def _is_safe(token: AddedToken, hiding: _Hiding) -> bool:
    content = token.content
    if not content or token.normalized or token.lstrip or token.single_word:
        return False
    return unicodedata.category(content[0]) in _MARKS and not hiding.may_hide(content)


class _Hiding:
    """Tells which added tokens others can keep from being matched: linear in all their lengths, as some tokenizers
    have six thousand.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self._all = "\x00".join(contents)
        self._ends = {content[i:] for content in contents for i in range(1, len(content))}

    def may_hide(self, content: str) -> bool:
        """Whether another token contains this one, or begins before it and ends inside it (as its own copy may).
        Matching is leftmost-longest, so a shorter token that begins with it can not.
        """
        if self._all.count(content) > 1:
            return True
        return any(content[:size] in self._ends for size in range(1, len(content)))


def _any_of(tokens: Iterable[str]) -> str:
    """A pattern of all tokens with common beginnings factored out.

    Some tokenizers have a thousand tokens that begin alike; tried one by one at every `<` of a text full of markup,
    they would cost more than tokenising it.
    """
    trie: _Trie = {}
    for token in tokens:
        node = trie
        for character in token:
            node = node.setdefault(character, {})
    return _factored(trie)


def _factored(node: _Trie) -> str:
    # No safe token begins another one, so a node either ends a token or goes on.
    branches = [re.escape(character) + _factored(child) for character, child in node.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""

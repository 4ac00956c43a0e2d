"""Text to ids and back, by the fastest library that is proven right for this model folder.

`tokenizers` is the reference: its ids are what the model was trained on. `fastokens` gives the same ids at 1/20 to
1/200 of the CPU (124k tokens of source text: 1.2 ms against 256 ms, warm; 300k of random words: 17 against 300). It is
a second implementation though, so it serves only where a probe at start finds no difference (see `probe`). Whatever
it refuses later goes to the reference.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import fastokens  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import tokenizers

from fermata.core.errors import ConfigError, InvalidTurn
from fermata.frontend.prompt.probe import probe_strings


class Tokenizer(Protocol):
    """Ids without post-processor, truncation or padding: the template brings the special tokens itself.

    Text that is no Unicode (a lone surrogate) is InvalidTurn.
    """

    @property
    def vocab_size(self) -> int:
        """One above the highest id, added tokens included."""
        ...

    @property
    def leading_ids(self) -> array[int]:
        """What the post-processor puts in front of a plain text (BOS); often nothing."""
        ...

    def encode(self, text: str) -> array[int]:
        """Ids as `array('I')`."""
        ...

    def encode_frame(self, text: str) -> bytes:
        """The same as a raw u32 frame. Keeps no state, so any thread may call it; likewise `encode_pieces`."""
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> tuple[bytes, array[int]]:
        """Each piece on its own: the u32 frame of all of them, and where each one starts in it, counted in tokens,
        with the total at the end.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Unknown ids are dropped; what can be no id at all is InvalidTurn."""
        ...

    def token_to_id(self, token: str) -> int | None: ...

    def spelled_by_model(self, tokens: Sequence[str]) -> set[str]:
        """Which of these the model's own vocabulary holds too, so that other text might give their ids."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerChoice:
    """Which library serves, and why: for one log line at start."""

    library: str
    """`fastokens` or `tokenizers`."""
    reason: str
    probes: int
    """Strings compared."""
    probe_s: float


class _FlatEncoder(Protocol):
    """What we use of `fastokens`, which ships no types: ids and offsets come as raw u32 and u64."""

    def encode_batch_flat(self, inputs: list[str]) -> tuple[bytes, bytes]: ...

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...


class ReferenceTokenizer:
    """`tokenizers`, with everything switched off that is not text to ids."""

    def __init__(self, file: Path) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"is no tokenizer: {error}", where=str(file), fix="replace the file by a whole one"
            ) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._leading_ids = self._find_leading_ids()

    def _find_leading_ids(self) -> array[int]:
        bare = self._inner.encode("a", add_special_tokens=False).ids
        dressed = self._inner.encode("a", add_special_tokens=True).ids
        extra = len(dressed) - len(bare)
        starts = (i for i in range(extra + 1) if dressed[i : i + len(bare)] == bare)
        return array("I", dressed[: next(starts, 0)])

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def leading_ids(self) -> array[int]:
        return self._leading_ids

    def encode(self, text: str) -> array[int]:
        if not _is_unicode(text):
            raise _no_unicode()
        return array("I", self._inner.encode(text, add_special_tokens=False).ids)

    def encode_frame(self, text: str) -> bytes:
        return self.encode(text).tobytes()

    def encode_pieces(self, pieces: Sequence[str]) -> tuple[bytes, array[int]]:
        ids = array("I")
        starts = array("Q", [0])
        for piece in pieces:
            ids += self.encode(piece)
            starts.append(len(ids))
        return ids.tobytes(), starts

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        try:
            return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidTurn("a token id is below 0 or beyond 32 bits", param="tokens") from error

    def token_to_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def spelled_by_model(self, tokens: Sequence[str]) -> set[str]:
        own = self._inner.get_vocab(with_added_tokens=False)
        return {token for token in tokens if token in own}

    def vocabulary(self) -> dict[str, int]:
        """Every token of the model and every added one."""
        return self._inner.get_vocab(with_added_tokens=True)


class FastTokenizer:
    """`fastokens` for text to ids; the reference for the rest, and for what `fastokens` refuses."""

    def __init__(self, file: Path, reference: ReferenceTokenizer) -> None:
        """ValueError where `fastokens` can not take the file."""
        self._inner: _FlatEncoder = fastokens.Tokenizer.from_file(str(file))
        self._inner.no_truncation()
        self._inner.no_padding()
        self._reference = reference

    @property
    def vocab_size(self) -> int:
        return self._reference.vocab_size

    @property
    def leading_ids(self) -> array[int]:
        return self._reference.leading_ids

    def encode(self, text: str) -> array[int]:
        return array("I", self.encode_frame(text))

    def encode_frame(self, text: str) -> bytes:
        return self.encode_pieces([text])[0]

    def encode_pieces(self, pieces: Sequence[str]) -> tuple[bytes, array[int]]:
        try:
            frame, starts = self._inner.encode_batch_flat(list(pieces))
        except UnicodeEncodeError as error:
            raise _no_unicode() from error
        except ValueError:
            # A limit of its regex engine, say: one slow turn instead of a refused one.
            return self._reference.encode_pieces(pieces)
        return frame, array("Q", starts)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._reference.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self._reference.token_to_id(token)

    def spelled_by_model(self, tokens: Sequence[str]) -> set[str]:
        return self._reference.spelled_by_model(tokens)


def load_tokenizer(
    file: Path,
    *,
    added_tokens: Sequence[str],
    fast_tokenizer: Callable[[Path, ReferenceTokenizer], Tokenizer] = FastTokenizer,
) -> tuple[Tokenizer, ReferenceTokenizer, TokenizerChoice]:
    """`fastokens` where all probes equal `tokenizers`, else `tokenizers`; and the reference itself in any case.

    `added_tokens` are texts: each one is in at least one probe.
    """
    reference = ReferenceTokenizer(file)
    started = time.perf_counter()
    try:
        fast = fast_tokenizer(file, reference)
    except ValueError as error:
        reason = f"fastokens can not take this folder: {error}"
        return reference, reference, TokenizerChoice("tokenizers", reason, 0, 0.0)
    probes = probe_strings(added_tokens)
    difference = first_difference(fast, reference, probes)
    probe_s = time.perf_counter() - started
    if difference is not None:
        reason = f"fastokens gives other ids for {difference[:80]!r}"
        return reference, reference, TokenizerChoice("tokenizers", reason, len(probes), probe_s)
    choice = TokenizerChoice("fastokens", "all probes equal tokenizers", len(probes), probe_s)
    return fast, reference, choice


def first_difference(one: Tokenizer, other: Tokenizer, texts: Sequence[str]) -> str | None:
    """The first text whose ids differ; None when all are equal."""
    frame, starts = one.encode_pieces(texts)
    ids = memoryview(frame).cast("I")
    for i, text in enumerate(texts):
        if ids[starts[i] : starts[i + 1]].tolist() != other.encode(text).tolist():
            return text
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_unicode() -> InvalidTurn:
    return InvalidTurn("the prompt holds half a surrogate pair, which is no character")

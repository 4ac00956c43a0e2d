"""Output tokens to text as they come: in any chunking the text of the whole decoded at once, never half a character.

Byte-level decoders, which nearly all current models have, join bytes: a table of bytes by id and an incremental UTF-8
decoder do the same at a twentieth of a microsecond a token, whatever came before. The table is checked against the
library at start.

Other decoders look at neighbours (a space after the first word, bytes spelled as `<0xE2>` one a token). For
those a short window of tokens is decoded again with each push, and what is certain is sent.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fermata.core.model_folder import AddedToken
from fermata.frontend.prompt.tokenizer import ReferenceTokenizer

REPLACEMENT = "\ufffd"
# What an id stands for, one byte an id.
_NO_TEXT, _TEXT, _SPELLED_BYTE = range(3)
_CONTEXT_TOKENS = 4
_LONG_WINDOW = 64
_TABLE_PROBES = 200


class Detokenizer(Protocol):
    """One output stream. A push costs what is new in it."""

    def push(self, tokens: Sequence[int] | memoryview[int]) -> str:
        """Text that is certain now; an Output frame may be given as it is, cast to `I`."""
        ...

    def flush(self) -> str:
        """The rest, at the end of the output: U+FFFD where a character was cut off."""
        ...


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


class Vocabulary:
    """What the detokenizers of one model folder share; built once, read-only."""

    def __init__(
        self,
        *,
        reference: ReferenceTokenizer,
        special_ids: frozenset[int],
        kinds: bytes,
        joins_bytes: bool,
        table: list[bytes] | None,
        spelled_bytes: Mapping[int, bytes],
    ) -> None:
        self._reference = reference
        self._kinds = kinds
        self._shown_kinds = bytes(
            _NO_TEXT if i in special_ids else kind for i, kind in enumerate(kinds)
        )
        self._joins_bytes = joins_bytes
        self._spelled_bytes = spelled_bytes
        self._table = table
        self._shown_table = table and [
            b"" if i in special_ids else spelled for i, spelled in enumerate(table)
        ]

    @classmethod
    def load(
        cls, file: Path, reference: ReferenceTokenizer, *, added_tokens: Sequence[AddedToken]
    ) -> Vocabulary:
        settings = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).decoder
        decoders = frozenset(_decoder_types(settings))
        vocabulary = reference.vocabulary()
        table: list[bytes] | None = None
        if "ByteLevel" in decoders:
            table = _byte_table(vocabulary, reference.vocab_size)
            if not _equals(table, reference):
                table = None
        kinds = bytearray(reference.vocab_size)
        spelled_bytes: dict[int, bytes] = {}
        for token, i in vocabulary.items():
            is_byte = "ByteFallback" in decoders and _is_spelled_byte(token)
            kinds[i] = _SPELLED_BYTE if is_byte else _TEXT
            if is_byte:
                spelled_bytes[i] = bytes.fromhex(token[3:5])
        return cls(
            reference=reference,
            special_ids=frozenset(token.id for token in added_tokens if token.special),
            kinds=bytes(kinds),
            joins_bytes="ByteLevel" in decoders,
            table=table,
            spelled_bytes=spelled_bytes,
        )

    @property
    def has_byte_table(self) -> bool:
        return self._table is not None

    def bytes_of(self, token: int) -> bytes:
        """What it adds to a text, special or not: a part of a character where that takes several. Nothing for what is
        no token: an engine may name one that is not."""
        if not 0 <= token < len(self._kinds):
            return b""
        if self._table is not None:
            return self._table[token]
        if self._kinds[token] == _SPELLED_BYTE:
            return self._spelled_bytes[token]
        return self._reference.decode([token], skip_special_tokens=False).encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        table = self._shown_table if skip_special_tokens else self._table
        if table is not None:
            return _ByteDetokenizer(table)
        return _WindowDetokenizer(
            self._reference,
            kinds=self._shown_kinds if skip_special_tokens else self._kinds,
            joins_bytes=self._joins_bytes,
        )


class _ByteDetokenizer:
    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int] | memoryview[int]) -> str:
        table = self._table
        try:
            return self._decoder.decode(b"".join(map(table.__getitem__, tokens)))
        except IndexError:
            # The vocabulary ends before the model's last row; what has no text has none.
            known = [token for token in tokens if token < len(table)]
            return self._decoder.decode(b"".join(map(table.__getitem__, known)))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowDetokenizer:
    """Holds a window of tokens whose text is sent up to `_sent` characters.

    Relies on the text of a longer window beginning with the text of a shorter one, but for two things that are held
    back: a run of spelled bytes, which is known to be text or not only when it is complete, and a last character
    that still lacks bytes.
    """

    def __init__(self, reference: ReferenceTokenizer, *, kinds: bytes, joins_bytes: bool) -> None:
        self._reference = reference
        self._kinds = kinds
        self._joins_bytes = joins_bytes
        self._window: list[int] = []
        self._run: list[int] = []
        """Spelled bytes at the end, not yet in the window."""
        self._sent = 0

    def push(self, tokens: Sequence[int] | memoryview[int]) -> str:
        kinds = self._kinds
        # What has no text must not part two bytes of one character.
        fresh = self._run + [token for token in tokens if token < len(kinds) and kinds[token]]
        whole = len(fresh)
        while whole and kinds[fresh[whole - 1]] == _SPELLED_BYTE:
            whole -= 1
        self._run = fresh[whole:]
        if not whole:
            return ""
        self._window += fresh[:whole]
        text = self._decode(self._window)
        is_cut_off = self._joins_bytes and text.endswith(REPLACEMENT)
        end = len(text) - is_cut_off
        certain = text[self._sent : end]
        self._sent = max(self._sent, end)
        if not is_cut_off:
            self._slide()
        elif len(self._window) > _LONG_WINDOW:
            self._slide_over(text)
        return certain

    def flush(self) -> str:
        rest = self._decode(self._window + self._run)[self._sent :]
        self._window, self._run, self._sent = [], [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._reference.decode(ids, skip_special_tokens=False)

    def _slide(self) -> None:
        """Keeps as much context as decoders look at: some tokens, with some text in them."""
        size = _CONTEXT_TOKENS
        kept = self._decode(self._window[-size:])
        while not kept and size < len(self._window):
            size *= 2
            kept = self._decode(self._window[-size:])
        self._window = self._window[-size:]
        self._sent = len(kept)

    def _slide_over(self, text: str) -> None:
        """A model that says nothing but U+FFFD must not make the window grow for ever."""
        kept = self._decode(self._window[-_CONTEXT_TOKENS:])
        if self._decode(self._window[:-_CONTEXT_TOKENS]) + kept == text:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._sent -= len(text) - len(kept)


def _decoder_types(settings: dict[str, Any] | None) -> list[str]:
    if settings is None:
        return []
    inner: list[dict[str, Any]] = settings.get("decoders", [])
    return [str(settings.get("type")), *(name for one in inner for name in _decoder_types(one))]


def _is_spelled_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_table(vocabulary: dict[str, int], size: int) -> list[bytes]:
    """Bytes by id. Byte-level vocabularies spell each byte as one printable character; other tokens mean themselves."""
    bytes_of = _byte_characters()
    table = [b""] * size
    for token, number in vocabulary.items():
        try:
            table[number] = bytes([bytes_of[character] for character in token])
        except KeyError:
            table[number] = token.encode()
    return table


def _byte_characters() -> dict[str, int]:
    """The alphabet of GPT-2: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    characters = {chr(byte): byte for byte in itself}
    return characters | {chr(256 + i): byte for i, byte in enumerate(others)}


def _equals(table: list[bytes], reference: ReferenceTokenizer) -> bool:
    """Whether joining the table's bytes gives what the library decodes, on random ids."""
    rng = random.Random(20240229)
    for _ in range(_TABLE_PROBES):
        ids = [rng.randrange(len(table)) for _ in range(rng.randint(1, 24))]
        joined = b"".join(table[i] for i in ids).decode("utf-8", "replace")
        if joined != reference.decode(ids, skip_special_tokens=False):
            return False
    return True

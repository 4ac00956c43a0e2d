from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre

from fermata.core.model_folder import ModelFolder
from fermata.frontend.prompt.detokenizer import Vocabulary
from fermata.frontend.prompt.tokenizer import ReferenceTokenizer

REPLACEMENT = "\ufffd"


def load(file: Path, tokenizer: Tokenizer) -> tuple[Vocabulary, ReferenceTokenizer]:
    tokenizer.save(str(file))
    folder = ModelFolder.load(file.parent)
    reference = ReferenceTokenizer(file)
    return Vocabulary.load(file, reference, added_tokens=folder.added_tokens), reference


def bytes_tokenizer() -> Tokenizer:
    """Every byte is a token of its own, so that ids can spell any broken UTF-8."""
    alphabet = sorted(pre.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<\uff5cnot bytes\uff5c>", normalized=False)])
    return tokenizer


def spelled_tokenizer() -> Tokenizer:
    """Unknown characters as bytes spelled `<0x..>`, spaces as U+2581, the first one stripped."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581a",
        "b",
        "\ufffd",
        "\u2581\u2581",
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    return tokenizer


def stripped_bytes_tokenizer() -> Tokenizer:
    """Byte-level with something behind it: no table can serve, and characters still come in parts."""
    tokenizer = bytes_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
    return tokenizer


def plain_tokenizer() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))


KINDS = {
    "bytes": bytes_tokenizer,
    "spelled": spelled_tokenizer,
    "stripped bytes": stripped_bytes_tokenizer,
    "no decoder": plain_tokenizer,
}


@pytest.fixture(scope="module", params=list(KINDS))
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Vocabulary, ReferenceTokenizer]:
    file = tmp_path_factory.mktemp("model") / "tokenizer.json"
    return request.param, *load(file, KINDS[request.param]())


def test_only_a_byte_level_decoder_has_a_table(
    loaded: tuple[str, Vocabulary, ReferenceTokenizer],
) -> None:
    kind, vocabulary, _ = loaded
    assert vocabulary.has_byte_table == (kind == "bytes")


def test_any_ids_in_any_chunking_give_the_text_of_the_whole(
    loaded: tuple[str, Vocabulary, ReferenceTokenizer],
) -> None:
    kind, vocabulary, reference = loaded
    size = reference.vocab_size
    # Bytes of two-, three- and four-byte characters, whole and broken, and whatever else there is.
    ids = st.one_of(st.integers(0, size + 1), st.integers(max(0, size - 6), size + 1))
    seen_broken = seen_whole = 0

    @settings(max_examples=250, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.lists(ids, max_size=5), max_size=12), st.booleans())
    def check(chunks: list[list[int]], skip: bool) -> None:
        nonlocal seen_broken, seen_whole
        stream = vocabulary.detokenizer(skip_special_tokens=skip)
        whole = reference.decode([i for chunk in chunks for i in chunk], skip_special_tokens=skip)
        said = ""
        for chunk in chunks:
            said += stream.push(memoryview(array("I", chunk)))
            assert whole.startswith(said)
        assert said + stream.flush() == whole
        seen_broken += REPLACEMENT in whole
        seen_whole += bool(whole) and REPLACEMENT not in whole

    check()
    assert seen_whole > 10
    assert seen_broken > 10 or kind == "no decoder"


@pytest.mark.parametrize("kind", ["bytes", "spelled", "stripped bytes"])
def test_half_a_character_waits_for_its_other_half(kind: str, tmp_path: Path) -> None:
    vocabulary, reference = load(tmp_path / "tokenizer.json", KINDS[kind]())
    spell = "<0x{:02X}>".format if kind == "spelled" else byte_character
    ids = [reference.token_to_id(spell(byte)) for byte in "\U0001f642".encode()]
    word = reference.token_to_id("b")
    assert word is not None
    stream = vocabulary.detokenizer()
    assert stream.push([word]) == "b"
    for part in ids:
        assert part is not None
        before = stream.push([part])
        if part != ids[-1]:
            assert before == ""
    # A run of spelled bytes is known to be text only when something else follows.
    assert before + stream.push([word]) == "\U0001f642b"
    first = ids[0]
    assert first is not None
    assert stream.push([first]) == ""
    assert stream.flush() == REPLACEMENT


@pytest.mark.parametrize("kind", ["bytes", "spelled"])
def test_a_tokens_bytes_are_its_part_of_a_text(kind: str, tmp_path: Path) -> None:
    vocabulary, reference = load(tmp_path / "tokenizer.json", KINDS[kind]())
    spell = "<0x{:02X}>".format if kind == "spelled" else byte_character
    ids = [reference.token_to_id(spell(byte)) for byte in "\U0001f642".encode()]
    assert b"".join(vocabulary.bytes_of(i) for i in ids if i is not None) == "\U0001f642".encode()
    word = reference.token_to_id("b")
    assert word is not None
    assert vocabulary.bytes_of(word) == b"b"
    assert vocabulary.bytes_of(-1) == vocabulary.bytes_of(reference.vocab_size) == b""
    assert vocabulary.bytes_of(1 << 40) == b""


def byte_character(byte: int) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def test_a_stream_of_replacement_characters_keeps_the_window_short(tmp_path: Path) -> None:
    vocabulary, reference = load(tmp_path / "tokenizer.json", stripped_bytes_tokenizer())
    broken = reference.token_to_id(byte_character(0xFF))
    assert broken is not None
    calls: list[int] = []

    class Watched(ReferenceTokenizer):
        def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:  # type: ignore[override]
            calls.append(len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    watched = Vocabulary.load(
        tmp_path / "tokenizer.json", Watched(tmp_path / "tokenizer.json"), added_tokens=[]
    )
    stream = watched.detokenizer()
    calls.clear()
    said = "".join(stream.push([broken]) for _ in range(500)) + stream.flush()
    assert said == REPLACEMENT * 500
    assert max(calls) < 80
    assert not vocabulary.has_byte_table


def test_ids_outside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    vocabulary, reference = load(tmp_path / "tokenizer.json", bytes_tokenizer())
    stream = vocabulary.detokenizer()
    a = reference.token_to_id("a")
    assert a is not None
    assert stream.push([a, 100_000, a]) == "aa"


def test_a_flushed_window_starts_anew(tmp_path: Path) -> None:
    vocabulary, reference = load(tmp_path / "tokenizer.json", spelled_tokenizer())
    a = reference.token_to_id("\u2581a")
    assert a is not None
    stream = vocabulary.detokenizer()
    assert stream.push([a]) + stream.push([a]) + stream.flush() == "a a"
    assert stream.push([a]) == "a"

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, processors
from tokenizers import pre_tokenizers as pre

from fermata.core.errors import ConfigError, InvalidTurn
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.frontend.prompt.probe import PROBES, probe_strings
from fermata.frontend.prompt.tokenizer import (
    FastTokenizer,
    ReferenceTokenizer,
    first_difference,
    load_tokenizer,
)

FOLDER = ModelFolder.load(default_model_folder())
CONTENTS = [token.content for token in FOLDER.added_tokens]


@pytest.fixture(scope="module")
def reference() -> ReferenceTokenizer:
    return ReferenceTokenizer(FOLDER.tokenizer_file)


@pytest.fixture(scope="module")
def fast(reference: ReferenceTokenizer) -> FastTokenizer:
    return FastTokenizer(FOLDER.tokenizer_file, reference)


def test_fastokens_serves_the_folder_that_ships_because_all_probes_are_equal() -> None:
    tokenizer, _, choice = load_tokenizer(FOLDER.tokenizer_file, added_tokens=CONTENTS)
    assert isinstance(tokenizer, FastTokenizer)
    assert choice.library == "fastokens"
    assert choice.probes == PROBES
    assert choice.probe_s > 0


def test_a_folder_that_fastokens_refuses_is_served_by_the_reference(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(file))
    tokenizer, reference, choice = load_tokenizer(file, added_tokens=[])
    assert tokenizer is reference
    assert choice.library == "tokenizers"
    assert "can not take" in choice.reason
    assert choice.probes == 0


def test_a_library_that_gives_other_ids_is_found_by_the_probe(fast: FastTokenizer) -> None:
    class Lossy(FastTokenizer):
        """Right but for one rare character."""

        def encode_pieces(self, pieces: Sequence[str]) -> tuple[bytes, array[int]]:
            return super().encode_pieces([piece.replace("\u0130", "I") for piece in pieces])

    reference = ReferenceTokenizer(FOLDER.tokenizer_file)
    lossy = Lossy(FOLDER.tokenizer_file, reference)
    found = first_difference(lossy, reference, probe_strings(CONTENTS))
    assert found is not None
    assert "\u0130" in found
    tokenizer, _, choice = load_tokenizer(
        FOLDER.tokenizer_file, added_tokens=CONTENTS, fast_tokenizer=Lossy
    )
    assert isinstance(tokenizer, ReferenceTokenizer)
    assert choice.library == "tokenizers"
    assert "other ids" in choice.reason
    assert first_difference(fast, reference, probe_strings(CONTENTS)) is None


def test_probes_are_the_same_each_time_and_hold_every_added_token() -> None:
    probes = probe_strings(CONTENTS)
    assert len(probes) == PROBES
    assert probes == probe_strings(CONTENTS)
    for content in CONTENTS:
        assert sum(content in probe for probe in probes) > 3
    assert max(map(len, probes)) > 10_000
    many = [f"<extra_{i}>" for i in range(1300)]
    joined = "\n".join(probe_strings(many))
    assert all(content in joined for content in many)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer") as error:
        ReferenceTokenizer(file)
    assert error.value.where == str(file)


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_both_give_the_same_ids_alone_and_in_pieces(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: FastTokenizer | ReferenceTokenizer = request.getfixturevalue(name)
    oracle = tokenizers.Tokenizer.from_file(str(FOLDER.tokenizer_file))
    text = "<|im_start|>user\nHow is it? 🙂<|im_end|>\n"
    ids = oracle.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == ids
    assert tokenizer.encode(text).typecode == "I"
    frame, starts = tokenizer.encode_pieces(["", text, "x", text])
    one = oracle.encode("x", add_special_tokens=False).ids
    assert array("I", frame).tolist() == ids + one + ids
    assert starts.tolist() == [0, 0, len(ids), len(ids) + len(one), 2 * len(ids) + len(one)]
    assert tokenizer.decode(ids) == "user\nHow is it? 🙂\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id("<think>") == oracle.token_to_id("<think>")
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.vocab_size == oracle.get_vocab_size(with_added_tokens=True)
    assert tokenizer.leading_ids == array("I")


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_what_can_be_no_id_is_the_clients_mistake(fast: FastTokenizer, wrong: int) -> None:
    assert fast.decode([fast.vocab_size + 5]) == ""
    with pytest.raises(InvalidTurn, match="token id"):
        fast.decode([1, wrong])


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_half_a_surrogate_pair_is_the_clients_mistake(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: FastTokenizer | ReferenceTokenizer = request.getfixturevalue(name)
    with pytest.raises(InvalidTurn, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_what_fastokens_refuses_goes_to_the_reference(fast: FastTokenizer) -> None:
    class Refusing:
        def encode_batch_flat(self, inputs: list[str]) -> tuple[bytes, bytes]:
            raise ValueError("match limit")

        def no_truncation(self) -> None: ...

        def no_padding(self) -> None: ...

    class Limited(FastTokenizer):
        def __init__(self, file: Path, reference: ReferenceTokenizer) -> None:
            super().__init__(file, reference)
            self._inner = Refusing()

    limited = Limited(FOLDER.tokenizer_file, ReferenceTokenizer(FOLDER.tokenizer_file))
    assert limited.encode("some text") == fast.encode("some text")


def dressed_tokenizer(file: Path, template: str) -> Path:
    """A byte-level tokenizer with a post-processor, truncation and padding, all of which must stay out of prompts."""
    alphabet = {token: i for i, token in enumerate(sorted(pre.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(file))
    assert json.loads(file.read_text())["truncation"]
    return file


@pytest.mark.parametrize(
    ("template", "leading"), [("<s> $A </s>", [256]), ("$A </s>", []), ("<s> <s> $A", [256, 256])]
)
def test_leading_ids_are_the_post_processors_and_nothing_else_of_it_is_used(
    tmp_path: Path, template: str, leading: list[int]
) -> None:
    file = dressed_tokenizer(tmp_path / "tokenizer.json", template)
    tokenizer, reference, choice = load_tokenizer(file, added_tokens=["<s>", "</s>"])
    assert choice.library == "fastokens"
    for one in (tokenizer, reference):
        assert one.leading_ids.tolist() == leading
        assert len(one.encode("abcdefgh")) == 8
        assert len(one.encode("ab")) == 2
        assert one.vocab_size == 258

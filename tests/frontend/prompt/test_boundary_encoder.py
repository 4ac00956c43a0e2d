from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models
from tokenizers import pre_tokenizers as pre

from fermata.core.model_folder import ModelFolder
from fermata.frontend.prompt.boundary import SafeBoundaries
from fermata.frontend.prompt.boundary_encoder import BoundaryEncoder
from fermata.frontend.prompt.tokenizer import load_tokenizer


def make(tmp_path: Path, *, spelled: bool) -> tuple[BoundaryEncoder, SafeBoundaries, Tokenizer]:
    """`!` is token 0 and `"` token 1, so that the bytes of `!"` hold those of token 256, `<s>`, off their grid.

    `spelled`: the model's own vocabulary has the added token too, so an id alone does not prove a boundary.
    """
    vocabulary = {token: i for i, token in enumerate(sorted(pre.ByteLevel.alphabet()))}
    if spelled:
        vocabulary["<s>"] = 256
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(
        [AddedToken("<s>", normalized=False), AddedToken("<e>", normalized=False)]
    )
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    folder = ModelFolder.load(tmp_path)
    loaded, _, _ = load_tokenizer(file, added_tokens=["<s>", "<e>"])
    boundaries = SafeBoundaries(folder.added_tokens)
    assert boundaries.ids["<s>"] == 256
    assert loaded.spelled_by_model(boundaries.tokens) == ({"<s>"} if spelled else set())
    return BoundaryEncoder(loaded, boundaries), boundaries, tokenizer


@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize(
    ("text", "start"),
    [
        ('!"!"<s>!"<e><e>x<s><s>', 0),
        ("<s>a<s>bc<e>", 0),
        ("abc<s>a<s>bc<e>d", 3),
        ("abc", 0),
        ("", 0),
        ("<s>", 0),
        ("a<s>", 0),
    ],
)
def test_the_tokens_before_each_boundary_are_counted_right(
    tmp_path: Path, spelled: bool, text: str, start: int
) -> None:
    encoder, boundaries, oracle = make(tmp_path, spelled=spelled)
    cuts = boundaries.starts(text, start + 1)
    frame, starts = encoder.encode(text, start, cuts)

    def count(end: int) -> int:
        return len(oracle.encode(text[start:end], add_special_tokens=False).ids)

    assert starts.tolist() == [0, *(count(cut) for cut in cuts), count(len(text))]
    assert array("I", frame).tolist() == oracle.encode(text[start:], add_special_tokens=False).ids

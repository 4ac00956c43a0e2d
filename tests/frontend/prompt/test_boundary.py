from __future__ import annotations

import time

import pytest

from fermata.core.model_folder import AddedToken
from fermata.frontend.prompt.boundary import SafeBoundaries


def raw(content: str, **flags: bool) -> AddedToken:
    return AddedToken(0, content, **{"normalized": False, **flags})


@pytest.mark.parametrize(
    ("token", "is_safe"),
    [
        (raw("<|x|>"), True),
        (raw("<|x|>", rstrip=True), True),
        (raw("<|x|>", special=True), True),
        (raw("<|x|>", normalized=True), False),
        (raw("<|x|>", lstrip=True), False),
        (raw("<|x|>", single_word=True), False),
        (raw(" <x>"), False),
        (raw("word"), False),
        (raw("_x"), False),
        (raw("\u2581x"), False),
        (raw("<<"), False),
        (raw(""), False),
        (raw("\uff5cUser\uff5c"), False),
        (raw("<\uff5cUser\uff5c>"), True),
    ],
)
def test_a_token_is_safe_by_its_flags_and_its_first_character(
    token: AddedToken, is_safe: bool
) -> None:
    assert bool(SafeBoundaries([token]).tokens) == is_safe


@pytest.mark.parametrize(
    ("others", "safe"),
    [
        (["<a>", "<b>"], {"<a>", "<b>"}),
        (["<a>", "<a><b>"], set[str]()),
        (["<a>", "x<a"], set[str]()),
        (["<a>", "<"], {"<a>"}),
        (["<|a|>", "<|a"], {"<|a|>"}),
    ],
)
def test_a_token_that_another_can_hide_is_not_safe(others: list[str], safe: set[str]) -> None:
    found = set(SafeBoundaries([raw(content) for content in others]).tokens)
    assert found & {"<a>", "<b>", "<|a|>"} == safe


def test_boundaries_are_the_starts_of_safe_tokens() -> None:
    boundaries = SafeBoundaries([raw("<a>"), raw("<|b|>"), raw("[c]"), raw("<d>", lstrip=True)])
    text = "<a>x<|b|> <d><a><a[c]"
    assert boundaries.starts(text, 0) == [0, 4, 13, 18]
    assert boundaries.starts(text, 1) == [4, 13, 18]
    assert boundaries.next(text, 5) == 13
    assert boundaries.next(text, 19) is None
    assert boundaries.at(text, 13)
    assert not boundaries.at(text, 16)
    assert not boundaries.at(text, 10)


def test_without_safe_tokens_there_is_no_boundary() -> None:
    boundaries = SafeBoundaries([raw("<d>", lstrip=True)])
    assert boundaries.tokens == ()
    assert boundaries.starts("<d><d>", 0) == []
    assert boundaries.next("<d>", 0) is None
    assert not boundaries.at("<d>", 0)


def test_thousands_of_tokens_cost_no_more_to_look_for_than_a_few() -> None:
    few = SafeBoundaries([raw("<|im_start|>"), raw("<|im_end|>")])
    many = SafeBoundaries([raw("<|im_start|>"), *(raw(f"<unused{i}>") for i in range(3000))])
    assert len(many.tokens) == 3001
    text = "<div><unused><p>" * 20_000

    def cost(boundaries: SafeBoundaries) -> float:
        started = time.process_time()
        assert boundaries.starts(text, 0) == []
        return time.process_time() - started

    assert min(cost(many) for _ in range(3)) < 10 * min(cost(few) for _ in range(3))

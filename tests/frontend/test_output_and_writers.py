from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fermata.core.errors import Overloaded, TurnFailed
from fermata.frontend.http.chat import ChatWriter
from fermata.frontend.http.completions import CompletionWriter
from fermata.frontend.http.dialect import Writer, WriterSpec
from fermata.frontend.http.errors import error_body, error_headers
from fermata.frontend.output import Content, Output, PlainText
from fermata.frontend.prompt import StopStrings
from fermata.wire.messages import Usage

USAGE = Usage(10, 4, 8)


class Letters:
    """A detokeniser whose tokens are code points."""

    def push(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))

    def flush(self) -> str:
        return ""


def written(pieces: list[str], stops: list[str]) -> tuple[str, Output]:
    output = Output(
        detokenizer=Letters(), stops=StopStrings(stops) if stops else None, parser=PlainText()
    )
    deltas: list[Content] = []
    for piece in pieces:
        deltas += output.push(array("I", map(ord, piece)))
    deltas += output.flush()
    return "".join(delta.text for delta in deltas), output


@given(
    st.lists(st.text(alphabet="ab\u20ac", max_size=5), max_size=8),
    st.sampled_from([[], ["ab"], ["b\u20ac", "aaa"]]),
)
def test_the_pieces_do_not_change_the_answer(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    got, output = written(pieces, stops)
    assert (got, output.stop) == (written([whole], stops)[0], written([whole], stops)[1].stop)
    if not output.has_stopped:
        assert got == whole


def test_a_stop_string_ends_the_answer_before_itself() -> None:
    got, output = written(["one t", "wo thr", "ee"], ["two"])
    assert got == "one "
    assert output.has_stopped
    assert output.stop == "two"


def spec(**changes: Any) -> WriterSpec:
    return WriterSpec(
        **{"request": "r1", "model": "m", "created": 5, "token_bytes": lambda t: chr(t).encode()}
        | changes
    )


def parsed(stream: bytes) -> list[Any]:
    parts = stream.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part[6:]) if part != "data: [DONE]" else "[DONE]" for part in parts]


@given(st.text())
def test_any_text_is_valid_json_in_a_chunk(text: str) -> None:
    chat, completion = ChatWriter(spec()), CompletionWriter(spec())
    (said,) = parsed(chat.deltas([Content(text)], ()))
    assert said["choices"][0]["delta"]["content"] == text
    if text:
        (said,) = parsed(completion.deltas([Content(text)], ()))
        assert said["choices"][0]["text"] == text


@pytest.mark.parametrize("make", [ChatWriter, CompletionWriter])
def test_a_stream_opens_lives_and_closes(make: Callable[[WriterSpec], Writer]) -> None:
    writer = make(spec(include_usage=True))
    stream = writer.opening() + writer.keep_alive() + writer.deltas([Content("x")], ()) + writer.closing(
        reason="stop", usage=USAGE
    )  # fmt: skip
    opening, alive, text, last, usage, done = parsed(stream)
    assert done == "[DONE]"
    for chunk in (opening, alive, text):
        assert chunk["choices"][0]["finish_reason"] is None
        assert chunk["usage"] is None
        assert (chunk["model"], chunk["created"]) == ("m", 5)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
    }  # fmt: skip


@pytest.mark.parametrize("make", [ChatWriter, CompletionWriter])
def test_a_stream_without_usage_never_speaks_of_it(make: Callable[[WriterSpec], Writer]) -> None:
    writer = make(spec())
    assert b"usage" not in writer.opening() + writer.closing(reason="length", usage=USAGE)


@pytest.mark.parametrize("make", [ChatWriter, CompletionWriter])
def test_a_stream_that_fails_says_so_and_ends(make: Callable[[WriterSpec], Writer]) -> None:
    error, done = parsed(make(spec()).failure(TurnFailed("broken")))
    assert error["error"] == {
        "message": "broken",
        "type": "server_error",
        "code": "turn_failed",
        "param": None,
    }
    assert done == "[DONE]"


def test_logprobs_are_told_in_each_dialects_words() -> None:
    rows = [[(104, -0.5), (105, -1.0)], [(106, -0.25)]]
    (chat,) = parsed(ChatWriter(spec()).deltas([Content("hj")], rows))
    assert chat["choices"][0]["delta"] == {"content": "hj"}
    first = chat["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("h", -0.5, [104])
    assert first["top_logprobs"] == [{"token": "i", "logprob": -1.0, "bytes": [105]}]
    halves = spec(token_bytes=lambda token: bytes([token]))
    (chat,) = parsed(ChatWriter(halves).deltas([], [[(0xC3, 0.0)], [(0xA9, 0.0)]]))
    parts = [row["bytes"] for row in chat["choices"][0]["logprobs"]["content"]]
    assert b"".join(map(bytes, parts)).decode() == "\u00e9", "a text is its tokens, joined"
    writer = CompletionWriter(spec(echo="abc"))
    writer.opening()
    (said,) = parsed(writer.deltas([Content("hj")], rows))
    assert said["choices"][0]["logprobs"] == {
        "tokens": ["h", "j"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"h": -0.5, "i": -1.0}, {"j": -0.25}],
        "text_offset": [3, 4],
    }


def test_whole_answers_have_the_shape_clients_expect() -> None:
    chat = json.loads(
        ChatWriter(spec()).whole([Content("a"), Content("b")], (), reason="stop", usage=USAGE)
    )
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert chat["choices"][0]["logprobs"] is None
    rows = [[(104, -0.5)]]
    said = json.loads(
        CompletionWriter(spec(echo="e")).whole([Content("h")], rows, reason="length", usage=USAGE)
    )
    assert said["choices"][0]["text"] == "eh"
    assert said["choices"][0]["logprobs"]["text_offset"] == [1]


def test_errors_have_the_openai_shape_and_say_when_to_come_back() -> None:
    error = Overloaded("busy", retry_after_s=1.2)
    assert json.loads(error_body(error))["error"]["type"] == "overloaded_error"
    assert (b"retry-after", b"2") in error_headers(error)

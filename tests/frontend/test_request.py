from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fermata.core.errors import ContextTooLong, InvalidTurn
from fermata.frontend.request import ChatBody, CompletionBody, decode_body, message_inputs
from fermata.frontend.sampling import check_supported, is_resumable, sampling_of
from fermata.wire.messages import Sampling

CHAT = msgspec.json.Decoder(ChatBody)
COMPLETION = msgspec.json.Decoder(CompletionBody)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatBody:
    return decode_body(json.dumps({"messages": HELLO, **fields}).encode(), CHAT)


def completion(**fields: Any) -> CompletionBody:
    return decode_body(json.dumps({"prompt": "hello", **fields}).encode(), COMPLETION)


def sampling(
    body: ChatBody | CompletionBody, *, input_tokens: int = 10, window: int = 100
) -> Sampling:
    return sampling_of(body, input_tokens=input_tokens, context_length=window, eos_token_ids=(7,))


def test_unknown_fields_and_nulls_are_ignored() -> None:
    nulls = dict.fromkeys(
        [
            "stream",
            "stop",
            "max_tokens",
            "tools",
            "tool_choice",
            "logprobs",
            "seed",
            "nvext",
            "stream_options",
        ]
    )
    body = chat(store=False, prompt_cache_key="x", anything={"deep": [1]}, **nulls)
    assert body.stops == []
    assert not body.include_usage
    assert sampling(body).max_tokens == 90


@pytest.mark.parametrize(
    ("said", "got"),
    [(65536, 90), (128000, 90), (10**30, 90), (5, 5), (5.0, 5), (0, 1), (-4, 1), (None, 90)],
)
def test_max_tokens_is_clamped_to_the_window_and_never_refused(said: Any, got: int) -> None:
    assert sampling(chat(max_tokens=said)).max_tokens == got
    assert sampling(chat(max_completion_tokens=said)).max_tokens == got


def test_max_completion_tokens_wins_over_the_older_name() -> None:
    assert sampling(chat(max_tokens=50, max_completion_tokens=3)).max_tokens == 3


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextTooLong, match=r"length is 100 tokens.*has 100 tokens") as e:
        sampling(chat(), input_tokens=100)
    assert e.value.status == 400
    assert e.value.param == "messages"


def test_every_way_to_pick_tokens_reaches_the_engine() -> None:
    said = {
        "temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "presence_penalty": -1,
        "frequency_penalty": 1.5, "repetition_penalty": 1.1, "seed": 42, "stop_token_ids": [9],
        "min_tokens": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 8,
    }  # fmt: skip
    assert sampling(chat(**said)) == Sampling(
        max_tokens=8, min_tokens=2, temperature=0.0, top_p=0.5, top_k=4, min_p=0.1, presence_penalty=-1.0,
        frequency_penalty=1.5, repetition_penalty=1.1, seed=42, stop_token_ids=[7, 9], logprobs=3,
    )  # fmt: skip


BEYOND_FLOATS = 10**400
CLAMPED = ["max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed"]
RANGED = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
          "repetition_penalty"]  # fmt: skip


@pytest.mark.parametrize("name", CLAMPED + RANGED)
@pytest.mark.parametrize("said", [BEYOND_FLOATS, -BEYOND_FLOATS, 2**64, -(2**64)])
def test_an_integer_of_any_size_is_clamped_or_refused_and_always_travels(
    name: str, said: int
) -> None:
    body = chat(**{name: said})
    if name not in CLAMPED:
        with pytest.raises(InvalidTurn) as error:
            sampling(body)
        assert error.value.param == name
        return
    got = sampling(body)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(got), type=Sampling) == got


@pytest.mark.parametrize("name", ["n", "best_of", "logprobs"])
def test_an_integer_beyond_all_floats_is_no_accident_of_ours(name: str) -> None:
    body = completion(**{name: BEYOND_FLOATS})
    if name == "logprobs":
        assert sampling(body).logprobs == 20
        return
    with pytest.raises(InvalidTurn) as error:
        check_supported(body)
    assert error.value.param == name


def test_ignoring_the_end_takes_its_ids_away() -> None:
    got = sampling(completion(ignore_eos=True, stop_token_ids=[3]))
    assert got.ignore_eos
    assert got.stop_token_ids == [3]


@pytest.mark.parametrize(
    "said", [{"temperature": -1}, {"top_p": 1.5}, {"presence_penalty": 3}, {"stop_token_ids": [-1]}]
)
def test_a_value_that_can_not_be_meant_is_refused_by_name(said: dict[str, Any]) -> None:
    with pytest.raises(InvalidTurn) as error:
        sampling(chat(**said))
    assert error.value.param == next(iter(said))


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"stop": [str(i) for i in range(65)]}, {"stop": "a" * 4097}]
)
def test_what_is_not_served_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidTurn):
        check_supported(chat(**body))


@pytest.mark.parametrize("body", [{"best_of": 3}, {"suffix": "end"}, {"n": 4}])
def test_what_completions_do_not_serve_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidTurn):
        check_supported(completion(**body))


def test_n_of_one_and_an_empty_suffix_are_fine() -> None:
    check_supported(chat(n=1))
    check_supported(completion(n=1, best_of=1, suffix=""))


@pytest.mark.parametrize(
    ("said", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"json": {"a": 1}},
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "g"}}, {"grammar": "g"}),
    ],
)  # fmt: skip
def test_grammars_reach_the_engine_and_end_resumability(said: dict[str, Any], grammar: Any) -> None:
    body = chat(**said)
    got = sampling(body)
    assert got.structured == grammar
    assert is_resumable(body, got) == (grammar is None)


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"guided_json": {"maximum": 2**64}}, "guided_json"),
        ({"structured_outputs": {"json": {"a": "b" * (1 << 20)}}}, "structured_outputs"),
        ({"guided_choice": ["a" * 100_000] * 11}, "guided_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [-(2**70)]}}},
            "response_format",
        ),
        ({"stop_token_ids": [1] * 4097}, "stop_token_ids"),
    ],
)
def test_what_no_message_can_carry_is_refused_before_a_worker_is_blamed(
    said: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidTurn) as error:
        sampling(chat(**said))
    assert error.value.param == param


def test_a_grammar_leaves_the_worker_some_of_the_stack() -> None:
    grammar: Any = 1
    for depth in range(1, 1000):
        grammar = {"a": grammar}
        try:
            sampling(ChatBody(messages=HELLO, guided_json=grammar))
        except InvalidTurn as error:
            refused, why = depth, error.param
            break
    else:
        pytest.fail("no depth is too deep")
    assert why == "guided_json"
    deepest = grammar
    for _ in range(30):
        deepest = {"a": deepest}
    assert msgspec.msgpack.encode(deepest), f"refused at {refused}, well before it could not travel"


def test_a_required_tool_call_can_not_be_resumed_and_none_drops_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"type": "function", "function": {"name": "f"}}
    for choice, resumable in (("required", False), (named, False), ("auto", True), ("none", True)):
        body = chat(tools=tools, tool_choice=choice)
        assert is_resumable(body, sampling(body)) is resumable
    assert chat(tools=tools, tool_choice="none").shown_tools is None
    assert chat(tools=tools, tool_choice="auto").shown_tools == tools


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [], "temperature": "hot"}', "temperature"),
        (
            b'{"messages": [], "stream_options": {"include_usage": 3}}',
            "stream_options.include_usage",
        ),
        (b"[1]", None),
        (b"{", None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        (b'{"messages": NaN}', None),
    ],
)
def test_a_wrong_body_is_refused_with_the_field_it_is_wrong_in(
    raw: bytes, param: str | None
) -> None:
    with pytest.raises(InvalidTurn) as error:
        decode_body(raw, CHAT)
    assert error.value.param == param


def test_text_that_a_client_cut_inside_a_character_is_mended() -> None:
    raw = b'{"messages": [{"role": "user", "content": "ok \\ud83d\\ude00 cut \\ud83d"}]}'
    assert decode_body(raw, CHAT).messages[0]["content"] == "ok \U0001f600 cut \ufffd"


def test_a_completion_takes_text_ids_or_a_list_of_one() -> None:
    assert completion().single_prompt() == "hello"
    assert completion(prompt=["hello"]).single_prompt() == "hello"
    assert completion(prompt=[1, 2]).single_prompt() == [1, 2]
    assert completion(prompt=[[1, 2]]).single_prompt() == [1, 2]
    for several in (["a", "b"], [[1], [2]], [1, "a"], [True]):
        with pytest.raises(InvalidTurn) as error:
            completion(prompt=several).single_prompt()
        assert error.value.param == "prompt"


def test_inputs_of_a_history_are_what_was_said_before_each_answer() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "more"}],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "three"},
    ]
    assert message_inputs(messages) == ["one\nmore", "two", "three"]
    assert message_inputs([{"role": "user", "content": "only"}]) == ["only"]
    assert message_inputs([]) == [""]


def test_a_mended_body_is_judged_like_any_other() -> None:
    cut = b'"content": "cut \\ud83d", "\\ud83d": 1'
    raw = b'{"messages": [{"role": "user", ' + cut + b"}]}"
    (message,) = decode_body(raw, CHAT).messages
    assert message == {"role": "user", "content": "cut \ufffd", "\ufffd": 1}
    with pytest.raises(InvalidTurn) as error:
        decode_body(b'{"messages": "\\ud83d"}', CHAT)
    assert error.value.param == "messages"
    with pytest.raises(InvalidTurn):
        decode_body(b'{"messages": "\\ud83d"', CHAT)


def test_effort_and_template_arguments_reach_the_template() -> None:
    body = chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert body.template_variables == {"reasoning_effort": "high", "enable_thinking": False}
    assert chat().template_variables == {}


def test_inputs_are_read_from_whatever_shape_content_has() -> None:
    messages = [
        "nonsense",
        {
            "role": "user",
            "content": ["plain", {"type": "image_url"}, {"text": 3}, {"text": "part"}],
        },
        {"role": "assistant"},
        {"role": "tool", "content": None},
    ]
    assert message_inputs(messages) == ["plain\npart", ""]


@pytest.mark.parametrize(
    "said",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "xml"},
        {"type": 3},
    ],
)
def test_a_response_format_that_says_nothing_is_refused(said: Any) -> None:
    with pytest.raises(InvalidTurn, match=r"schema|response_format"):
        sampling(chat(response_format=said))

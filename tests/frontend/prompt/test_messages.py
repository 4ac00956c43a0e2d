from __future__ import annotations

from typing import Any

import pytest

from fermata.core.errors import InvalidTurn
from fermata.frontend.prompt.messages import MessageForm, function_tools

OBJECTS = MessageForm("{{ call.arguments | tojson }}")
TEXT = MessageForm("{% if call.arguments is string %}")


def call(arguments: object) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ],
    }


def arguments_of(form: MessageForm, arguments: object) -> object:
    return form.normalise([call(arguments)])[0]["tool_calls"][0]["function"]["arguments"]


def test_a_message_that_needs_nothing_is_passed_on_as_it_is() -> None:
    plain = {"role": "user", "content": "x", "name": "n"}
    called = {**call('{"a": 1}'), "content": ""}
    assert TEXT.normalise([plain])[0] is plain
    assert TEXT.normalise([called])[0] is called
    assert OBJECTS.normalise([plain])[0] is plain


def test_messages_of_the_client_are_never_changed() -> None:
    message = call('{"a": 1}')
    before = str(message)
    OBJECTS.normalise([message])
    assert str(message) == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("x", "x"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "a\nb\nc"),
        ([{"type": "output_text", "text": "a"}, {"text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content_becomes_text(content: object, text: str) -> None:
    assert TEXT.normalise([{"role": "user", "content": content}])[0]["content"] == text


def test_content_that_is_not_given_is_empty() -> None:
    assert TEXT.normalise([{"role": "assistant"}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "messages[1]"),
        ([{"role": 3, "content": "x"}], "messages[0]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["a", 3]}], "messages[0].content[1]"),
        ([{"role": "assistant", "content": "", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "", "tool_calls": ["a"]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0]",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}],
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_a_message_that_can_not_be_read_is_refused_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidTurn) as error:
        TEXT.normalise(messages)
    assert error.value.param == param
    assert error.value.status == 400


def test_a_template_that_wants_objects_gets_arguments_parsed() -> None:
    assert arguments_of(OBJECTS, '{"a": [1, "\u00e9"]}') == {"a": [1, "\u00e9"]}
    assert arguments_of(OBJECTS, {"a": 1}) == {"a": 1}
    assert arguments_of(OBJECTS, "") == {}
    assert arguments_of(OBJECTS, None) == {}


@pytest.mark.parametrize("broken", ['{"a": ', "[1]", '"text"', "ls -la"])
def test_arguments_that_are_no_object_are_shown_instead_of_ending_the_session(broken: str) -> None:
    assert arguments_of(OBJECTS, broken) == {"arguments": broken}


def test_a_template_that_prints_text_gets_the_arguments_to_the_byte() -> None:
    assert arguments_of(TEXT, '{"a":  1}') == '{"a":  1}'
    assert arguments_of(TEXT, '{"a": ') == '{"a": '
    assert arguments_of(TEXT, "") == "{}"
    assert arguments_of(TEXT, None) == "{}"
    assert arguments_of(TEXT, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("source", "takes_text"),
    [
        ("{% if tool_call.arguments is string %}", True),
        ("{% if tool['function']['arguments'] is not string %}", True),
        ('{% if tool["arguments"]  is  string %}', True),
        ("{{ tool_call.arguments | tojson }}", False),
        ("{% if content is string %}{{ arguments }}", False),
    ],
)
def test_what_a_template_wants_is_read_off_its_source(source: str, takes_text: bool) -> None:
    assert MessageForm(source).takes_argument_text == takes_text


def test_an_empty_list_of_calls_is_no_calls() -> None:
    for calls in (list[object](), None):
        assert (
            "tool_calls"
            not in TEXT.normalise([{"role": "assistant", "content": "x", "tool_calls": calls}])[0]
        )


def test_developers_are_system_where_the_template_knows_none() -> None:
    message = {"role": "developer", "content": "x"}
    assert TEXT.normalise([message])[0]["role"] == "system"
    assert (
        MessageForm("{% if m.role == 'developer' %}").normalise([message])[0]["role"] == "developer"
    )


def test_reasoning_is_known_under_both_names() -> None:
    both = [
        {"role": "assistant", "content": "x", "reasoning": "r"},
        {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "kept"},
        {"role": "assistant", "content": "x", "reasoning": {"effort": "low"}},
    ]
    found = [message.get("reasoning_content") for message in TEXT.normalise(both)]
    assert found == ["r", "kept", None]


def test_tools_that_no_template_can_show_are_left_out() -> None:
    function = {"type": "function", "function": {"name": "f"}}
    bare = {"name": "g"}
    assert function_tools([function, {"type": "web_search"}, bare]) == [function, bare]
    assert function_tools([{"type": "web_search"}]) is None
    assert function_tools([]) is None
    assert function_tools(None) is None


@pytest.mark.parametrize("tools", ["x", [3], {"a": 1}])
def test_tools_of_another_shape_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidTurn) as error:
        function_tools(tools)
    assert error.value.param == "tools"

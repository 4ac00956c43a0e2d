from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2.sandbox
import pytest

from fermata.core.errors import ConfigError, InvalidTurn
from fermata.frontend.prompt.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **values: Any) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(messages, **values)


def test_the_reference_semantics_hold() -> None:
    source = (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\n"
        "{{ m['content'] }}\n    {% endif %}\n{% endfor %}\nend"
    )
    assert render(source) == "<s>\nhi\nend"


def test_loops_can_be_left_early() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(source) == "02"


def test_json_is_plain() -> None:
    value = {"b": "<é>'&", "a": [1, None, True, 2.5]}
    assert render("{{ v | tojson }}", variables={"v": value}) == json.dumps(
        value, ensure_ascii=False
    )
    assert render("{{ v | tojson(indent=2) }}", variables={"v": value}) == json.dumps(
        value, ensure_ascii=False, indent=2
    )
    assert render(
        "{{ v | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}",
        variables={"v": value},
    ) == (json.dumps(value, sort_keys=True, separators=(",", ":")))


def test_tools_documents_and_variables_reach_the_template() -> None:
    source = (
        "{{ tools | length }} {{ documents[0].title }} {{ add_generation_prompt }} "
        "{{ enable_thinking }} {{ x is defined }}"
    )
    tool = {"type": "function", "function": {"name": "f"}}
    out = render(
        source,
        tools=[tool],
        documents=[{"title": "t"}],
        add_generation_prompt=False,
        variables={"enable_thinking": False},
    )
    assert out == "1 t False False False"


def test_a_template_without_tools_sees_none() -> None:
    assert (
        render("{{ tools is none }} {{ documents is none }}", tools=[{"type": "web_search"}])
        == "True True"
    )


def test_the_generation_mark_renders_its_body_in_a_scope_of_its_own() -> None:
    source = (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}"
        "[{{ messages[0].content }}{{ x }}]{% endgeneration %}{{ x }}"
    )
    assert render(source) == "[hi2]1"


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%Y-%m-%d') }}", special_tokens={}, now=lambda: datetime(2031, 2, 3)
    )
    assert template.render(USER) == "2031-02-03"


def test_what_the_template_refuses_is_the_turns_error_in_its_words() -> None:
    with pytest.raises(InvalidTurn, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 3 }}",
        "{{ nothing.at.all }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content | round }}",
        "{{ messages[0].content.encode('no such codec') }}",
        "{{ nothing | tojson }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.x }}",
        "{{ range(10**9) | list }}",
        "{% include 'x' %}",
    ],
)
def test_whatever_fails_inside_a_template_is_the_turns_error(source: str) -> None:
    with pytest.raises(InvalidTurn, match="the chat template can not render") as error:
        render(source)
    assert error.value.param == "messages"


def test_a_template_that_does_not_compile_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2") as error:
        ChatTemplate("fine\n{% if %}", special_tokens={}, where="folder/chat_template.jinja")
    assert error.value.where == "folder/chat_template.jinja"
    assert error.value.fix


@pytest.mark.parametrize("name", ["messages", "tools", "documents"])
def test_variables_can_not_replace_what_the_request_says(name: str) -> None:
    with pytest.raises(InvalidTurn) as error:
        render("x", variables={name: []})
    assert error.value.param == f"chat_template_kwargs.{name}"


def test_variables_go_before_special_tokens_as_in_the_reference() -> None:
    assert render("{{ bos_token }}", variables={"bos_token": "<t>"}) == "<t>"


ATTRIBUTES = [
    "m.role", "m.missing", "m.items", "m.keys()|list", "m.copy()", "m.get('role')", "m['items']", "m.__class__",
    "m.pop",
    "m.nested.key", "m.nested.none", "m.nested['values']", "loop.index0", "loop.first", "loop.last", "loop.missing",
    "loop.previtem.role", "loop._iterator", "loop.__class__", "ns.count", "ns.missing", "ns._x", "ns.__class__",
    "m.content.upper()", "m.content.missing", "m.number.real", "m.parts.0", "m.parts[1]", "m.parts.append",
]  # fmt: skip


@pytest.mark.parametrize("expression", ATTRIBUTES)
def test_the_short_cut_for_attributes_gives_what_the_sandbox_gives(expression: str) -> None:
    source = (
        "{% set ns = namespace(count=3) %}{% for m in messages %}"
        f"{{{{ {expression} }}}}|{{{{ ({expression}) is defined }}}}"
        "{% endfor %}"
    )
    message = {
        "role": "user",
        "content": "c",
        "items": "shadowed by the method",
        "nested": {"key": 1, "none": None, "values": 2},
        "number": 5,
        "parts": [1, 2],
    }
    oracle = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def outcome(run: Any) -> str:
        try:
            return str(run())
        except (InvalidTurn, jinja2.TemplateError) as error:
            return str(error).removeprefix("the chat template can not render these messages: ")

    def plain(text: str) -> str:
        """Without the addresses of bound methods."""
        return text.split(" at 0x")[0]

    ours = outcome(lambda: render(source, [message, message]))
    theirs = outcome(lambda: oracle.from_string(source).render(messages=[message, message]))
    assert plain(ours) == plain(theirs)

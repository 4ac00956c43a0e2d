"""Chat templates: Jinja in an immutable sandbox, with the semantics of the Hugging Face reference.

A template comes with the model folder and is trusted to end, not to be harmless; what it renders comes from clients, so
every failure inside it is the turn's and names its cause.

Rendering is the one thing on the prompt path that walks the whole history in Python. Two exact short cuts take
attribute look-ups, half of its time, to a third (see `_Sandbox.getattr`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from fermata.core.errors import ConfigError, InvalidTurn
from fermata.frontend.prompt.messages import MessageForm, function_tools

_OWN_NAMES = frozenset({"messages", "tools", "documents"})
_DICT_NAMES = frozenset(dir(dict))
_OWN_TYPES = frozenset({LoopContext, Namespace})
# What running a template can raise: Jinja's own, and what Python raises for operations on the wrong types.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """One compiled template; rendering keeps no state."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        where: str = "chat_template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`now` is what the template's `strftime_now` reads. ConfigError where the template does not compile."""
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson

        def strftime_now(form: str) -> str:
            return now().strftime(form)

        names = {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        try:
            self._template = environment.from_string(source, globals={**special_tokens, **names})
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"line {error.lineno}: {error.message}",
                where=where,
                fix="correct the chat template",
            ) from error
        self._form = MessageForm(source)

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as the OpenAI chat dialect has them (see `messages`). `variables` are `chat_template_kwargs`.

        InvalidTurn names what is wrong: a message that can not be read, or what the template itself refused.
        """
        variables = variables or {}
        if not _OWN_NAMES.isdisjoint(variables):
            name = min(_OWN_NAMES.intersection(variables))
            raise InvalidTurn(
                f"{name} is no template variable", param=f"chat_template_kwargs.{name}"
            )
        values = {"add_generation_prompt": add_generation_prompt, **variables}
        values["messages"] = self._form.normalise(messages)
        values["tools"] = function_tools(tools)
        values["documents"] = documents
        try:
            return self._template.render(values)
        except _FAILURES as error:
            raise InvalidTurn(
                f"the chat template can not render these messages: {error}", param="messages"
            ) from error


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: object, attribute: str) -> object:
        """As the sandbox has it, without its detours for the three types that histories are walked with.

        A dict has an item or nothing under a name that is no method's; the loop and namespaces are Jinja's own and safe
        but for underscores. Both are what the sandbox finds out by way of exceptions and type checks.
        """
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                try:
                    return obj[attribute]  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind in _OWN_TYPES and attribute[0] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model said, for training; here its body renders in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


_plain_json = json.JSONEncoder(ensure_ascii=False).encode


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _plain_json(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

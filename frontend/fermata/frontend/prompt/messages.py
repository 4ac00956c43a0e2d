"""Messages of the OpenAI chat dialect, made into what chat templates expect.

Templates are written for the reference implementation's input: content is text, arguments of a call are an object,
roles are those of the model. Clients send parts, nulls, JSON in strings and `developer`. A message that needs nothing
is passed on as it is, so a long history costs a look at each message and no copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from fermata.core.errors import InvalidTurn

_TEXT_PARTS = ("text", "input_text", "output_text")
_PART_SEPARATOR = "\n"


class MessageForm:
    """What one template wants to be given; read off its source."""

    def __init__(self, template_source: str) -> None:
        # `arguments is string` (or `['arguments'] is string`): the template prints a string as it is. Left alone, the
        # text of a call is what the model wrote, to the byte, and its KV is found again.
        self.takes_argument_text = bool(
            re.search(r"arguments['\"]?\]?\s+is\s+(?:not\s+)?string", template_source)
        )
        self.knows_developer = "developer" in template_source

    def normalise(self, messages: Sequence[Any]) -> list[Mapping[str, Any]]:
        if not _is_list(messages) or not messages:
            raise InvalidTurn("messages must be a list of at least one message", param="messages")
        return [self._message(message, number) for number, message in enumerate(messages)]

    def _message(self, message: object, number: int) -> Mapping[str, Any]:
        if not _is_object(message) or not isinstance(role := message.get("role"), str):
            raise InvalidTurn(
                "a message must be an object with a role", param=f"messages[{number}]"
            )
        if role != "developer" and self._is_ready(message):
            return message
        changed = dict(message)
        changed["content"] = _content(message.get("content"), f"messages[{number}].content")
        if role == "developer" and not self.knows_developer:
            changed["role"] = "system"
        reasoning = changed.pop("reasoning", None)
        if isinstance(reasoning, str):
            changed.setdefault("reasoning_content", reasoning)
        calls = changed.pop("tool_calls", None)
        if calls:
            changed["tool_calls"] = self._calls(calls, f"messages[{number}].tool_calls")
        return changed

    def _is_ready(self, message: dict[str, Any]) -> bool:
        """Whether the message needs no change, as nearly all of a history."""
        if type(message.get("content")) is not str or "reasoning" in message:
            return False
        if "tool_calls" not in message:
            return True
        calls = message["tool_calls"]
        if not _is_list(calls) or not calls or not self.takes_argument_text:
            return False
        return all(_is_ready_call(call) for call in calls)

    def _calls(self, calls: object, where: str) -> list[Mapping[str, Any]]:
        if not _is_list(calls):
            raise InvalidTurn("tool_calls must be a list", param=where)
        return [self._call(call, f"{where}[{i}]") for i, call in enumerate(calls)]

    def _call(self, call: object, where: str) -> Mapping[str, Any]:
        if (
            not _is_object(call)
            or not _is_object(function := call.get("function"))
            or not isinstance(function.get("name"), str)
        ):
            raise InvalidTurn("a tool call must have a function with a name", param=where)
        arguments = self._arguments(function.get("arguments"))
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, arguments: object) -> object:
        if arguments is None or arguments == "":
            return "{}" if self.takes_argument_text else {}
        if not isinstance(arguments, str) or self.takes_argument_text:
            return arguments
        try:
            parsed = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            parsed = None
        # A model that wrote no object must not end the session for good: its text is shown as an argument of that name.
        return parsed if _is_object(parsed) else {"arguments": arguments}


def function_tools(tools: Sequence[Any] | None) -> list[Mapping[str, Any]] | None:
    """The tools a template can show. Other types (hosted search and the like) are ignored; none left is no tools."""
    if not tools:
        return None
    if not _is_list(tools) or not all(_is_object(tool) for tool in tools):
        raise InvalidTurn("tools must be a list of objects", param="tools")
    return [tool for tool in tools if tool.get("type", "function") == "function"] or None


def _is_ready_call(call: object) -> bool:
    function = call.get("function") if _is_object(call) else None
    if not _is_object(function) or type(function.get("name")) is not str:
        return False
    arguments = function.get("arguments")
    return type(arguments) is str and arguments != ""


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise InvalidTurn("content must be text, a list of parts or null", param=where)
    return _PART_SEPARATOR.join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if _is_object(part) else None
    text = None
    if _is_object(part):
        text = part.get("refusal" if kind == "refusal" else "text")
    if isinstance(text, str) and (kind in _TEXT_PARTS or kind in (None, "refusal")):
        return text
    raise InvalidTurn(f"a part of type {kind!r} can not be shown to this model", param=where)


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)

"""Bodies of the two OpenAI dialects, decoded with validation at the border.

Real clients send fields we never heard of, nulls where nothing is meant, and limits far beyond any window. So: unknown
fields are ignored, null is absent, and of what is known only a value that could not be honoured is refused.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar, cast

import msgspec

from fermata.core.errors import InvalidTurn

Number = int | float
_LARGE_BYTES = 1 << 20

_Body = TypeVar("_Body", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both dialects have. Fields after `user` are extensions that other servers made common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Number | None = None
    max_tokens: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: str | list[str] | None = None
    seed: Number | None = None
    user: Any = None
    min_tokens: Number | None = None
    top_k: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Number | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Any = None
    nvext: Any = None
    program_id: Any = None

    @property
    def asked_tokens(self) -> Number | None:
        """How long the answer may be, as far as the client says."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        if not self.stop:
            return []
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return [one for one in stop if one]


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Any] = []
    """Empty is for a client that only ends its session."""
    max_completion_tokens: Number | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None

    @property
    def asked_tokens(self) -> Number | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def must_call_a_tool(self) -> bool:
        """`required`, or one that is named: the engine's grammar makes the call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)

    @property
    def shown_tools(self) -> list[Any] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return effort | (self.chat_template_kwargs or {})


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[Any]
    best_of: Number | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Number | None = None

    def single_prompt(self) -> str | list[int]:
        """Text or token ids. A list of one prompt is that prompt; several would be several turns."""
        prompt: Any = self.prompt
        if _is_list(prompt) and len(prompt) == 1 and type(prompt[0]) is not int:
            (prompt,) = prompt
        if isinstance(prompt, str):
            return prompt
        if not _is_list(prompt):
            raise InvalidTurn("prompt must be text or a list of token ids", param="prompt")
        if all(type(token) is int for token in prompt):
            return prompt
        if all(isinstance(one, str | list) for one in prompt):
            raise InvalidTurn("one prompt a request; send the others on their own", param="prompt")
        raise InvalidTurn("prompt must be text or a list of token ids", param="prompt")


def decode_body(raw: bytes, decoder: msgspec.json.Decoder[_Body]) -> _Body:
    """InvalidTurn names the field. A lone surrogate (text that a client cut in two) becomes U+FFFD."""
    if len(raw) < _LARGE_BYTES:
        return _decoded(raw, decoder)
    # Millions of small values make the collector walk all of them again and again: five times the time.
    gc.disable()
    try:
        return _decoded(raw, decoder)
    finally:
        gc.enable()


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[_Body]) -> _Body:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if b"\\u" not in raw:
            raise InvalidTurn(f"the body is not JSON: {error}") from error
    try:
        return cast(
            "_Body", msgspec.convert(_mended(json.loads(raw)), decoder.type)
        )  # the stubs say Any
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (ValueError, RecursionError) as error:
        raise InvalidTurn(f"the body is not JSON: {error}") from error


def message_inputs(messages: Sequence[Any]) -> list[str]:
    """Text of the last user or tool message before each assistant message, oldest first, then of the last of all."""
    inputs: list[str] = []
    last = ""
    for message in messages:
        if not _is_object(message):
            continue
        role = message.get("role")
        if role in ("user", "tool", "function"):
            last = _text(message.get("content"))
        elif role == "assistant":
            inputs.append(last)
    inputs.append(last)
    return inputs


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not _is_list(content):
        return ""
    texts = [part if isinstance(part, str) else _part_text(part) for part in content]
    return "\n".join(text for text in texts if text)


def _part_text(part: object) -> str:
    text = part.get("text") if _is_object(part) else None
    return text if isinstance(text, str) else ""


def _invalid(error: msgspec.ValidationError) -> InvalidTurn:
    """`Expected ..., got ... - at `$.field`` to a message and the field's name."""
    what, _, where = str(error).partition(" - at `$")
    missing = what.partition("missing required field `")[2].rstrip("`")
    param = where.rstrip("`").removeprefix(".") or missing
    return InvalidTurn(f"{what} at {param}" if where else what, param=param or None)


def _mended(value: Any) -> Any:  # noqa: ANN401  # any JSON
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if _is_list(value):
        return [_mended(one) for one in value]
    if _is_object(value):
        return {_mended(key): _mended(one) for key, one in value.items()}
    return value


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)

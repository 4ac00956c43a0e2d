"""Chat templates: Jinja in an immutable sandbox, with the semantics of the Hugging Face reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ChatTemplate:
    """One compiled template; rendering keeps no state."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], name: str = "chat_template"
    ) -> None:
        """ConfigError where the template does not compile."""
        raise NotImplementedError

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as the OpenAI dialect has them (see `messages`). `variables` are `chat_template_kwargs`.

        InvalidTurn names what is wrong: a message that can not be read, or what the template itself refused.
        """
        raise NotImplementedError

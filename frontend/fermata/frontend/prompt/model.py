"""All that the prompt path knows of one model folder, in one object for the service to hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fermata.core.model_folder import ModelFolder
from fermata.frontend.prompt.detokenizer import Detokenizer, Vocabulary
from fermata.frontend.prompt.path import Prompt, PromptPath
from fermata.frontend.prompt.template import ChatTemplate
from fermata.frontend.prompt.tokenizer import Tokenizer, TokenizerChoice


@dataclass(frozen=True, slots=True)
class PromptModel:
    folder: ModelFolder
    tokenizer: Tokenizer
    choice: TokenizerChoice
    template: ChatTemplate | None
    """None: the folder has none; chat then is InvalidTurn, completions work."""
    path: PromptPath
    vocabulary: Vocabulary

    @classmethod
    def load(cls, folder: ModelFolder, *, block_size: int, cache_bytes: int) -> PromptModel:
        """Reads the tokenizer, probes it, compiles the template. ConfigError names file and fix."""
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
        """The text that `path.prepare` takes. InvalidTurn as ChatTemplate.render."""
        raise NotImplementedError

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        raise NotImplementedError

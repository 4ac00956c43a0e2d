"""The prompt path: from messages to token and hash frames, and from output tokens back to text.

Everything here is pure and synchronous. A turn costs what is new in it: see `path` for what is O(new), and for the
few things that may be O(history).
"""

from __future__ import annotations

from fermata.frontend.prompt.detokenizer import Detokenizer, Vocabulary
from fermata.frontend.prompt.model import PromptModel
from fermata.frontend.prompt.path import PendingPrompt, Prompt, PromptCounters, PromptPath
from fermata.frontend.prompt.stop import StopStrings
from fermata.frontend.prompt.template import ChatTemplate
from fermata.frontend.prompt.tokenizer import Tokenizer, TokenizerChoice, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "PendingPrompt",
    "Prompt",
    "PromptCounters",
    "PromptModel",
    "PromptPath",
    "StopStrings",
    "Tokenizer",
    "TokenizerChoice",
    "Vocabulary",
    "load_tokenizer",
]

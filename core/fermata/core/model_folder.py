"""A model folder in the Hugging Face layout, read without its heavy libraries.

Reads what must be known before a tokenizer is loaded: the added tokens, which ids end a turn, which special
tokens a template may name, how long the context is, and the chat template. Folders in the wild disagree on where things
stand (four places for the template, three for the end of a turn), and this is the one place that knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from fermata.core.errors import ConfigError

_T = TypeVar("_T")
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
# tokenizer_config.json says 1e30 where nobody set a length.
_LONGEST_CONTEXT = 1 << 40


class AddedToken(msgspec.Struct, frozen=True):
    """An entry of tokenizer.json's `added_tokens`: matched in the text before the model sees it."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; the vocabulary is skipped at the decoder's speed."""

    added_tokens: list[AddedToken] = []


def default_model_folder() -> Path:
    """The small model that ships with Fermata: for simulated engines and tests."""
    return Path(__file__).parent / "model"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    tokenizer_file: Path
    added_tokens: tuple[AddedToken, ...]
    eos_token_ids: tuple[int, ...]
    """Ids that end a turn: generation_config.json, then config.json, then tokenizer_config.json; no repeats."""
    special_tokens: dict[str, str]
    """Text of `bos_token`, `eos_token`... that the folder names, as templates see them."""
    context_length: int | None
    """None: the folder does not say."""
    chat_template: str
    """Jinja source. Empty: the folder has none, so only plain prompts can be served."""
    template_source: str
    """Where the template came from, for messages and logs."""
    named_templates: dict[str, str]
    """Other templates of the folder by name (`tool_use`, `rag`)."""

    @classmethod
    def load(cls, path: Path, *, chat_template: Path | None = None) -> ModelFolder:
        """`chat_template` replaces the folder's own. ConfigError names the file and the fix."""
        if not path.is_dir():
            raise ConfigError(
                "no such folder",
                where=str(path),
                fix="set model.path to a folder with tokenizer.json",
            )
        tokenizer_file = path / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ConfigError(
                "tokenizer.json is missing",
                where=str(path),
                fix="a folder with another tokenizer format must be converted to tokenizer.json first",
            )
        added = tuple(_decode(tokenizer_file, _TokenizerFile).added_tokens)
        settings = _object(path / "tokenizer_config.json")
        config = _object(path / "config.json")
        specials = _special_tokens(settings, _object(path / "special_tokens_map.json"))
        templates, source = _templates(path, settings, chat_template)
        default = templates.pop("default", "")
        return cls(
            path=path,
            tokenizer_file=tokenizer_file,
            added_tokens=added,
            eos_token_ids=_eos_ids(path, config, specials.get("eos_token"), added),
            special_tokens=specials,
            context_length=_context_length(config, settings),
            chat_template=default,
            template_source=source,
            named_templates=templates,
        )


def _decode(file: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(
            f"can not be read: {error}", where=str(file), fix="replace the file by a whole one"
        ) from error


def _object(file: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    return _decode(file, dict[str, Any]) if file.is_file() else {}


def _text(value: object) -> str | None:
    """A special token is a string, or an object with `content`."""
    match value:
        case str():
            return value
        case {"content": str(content)}:
            return content
        case _:
            return None


def _items(value: object) -> list[object]:
    """Many fields hold one value or a list of them."""
    # JSON lists hold objects; isinstance alone can not say so.
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _special_tokens(*places: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for place in places:
        for name in _SPECIAL_NAMES:
            text = _text(place.get(name))
            if text is not None:
                found.setdefault(name, text)
    return found


def _eos_ids(
    path: Path, config: Mapping[str, Any], eos_token: str | None, added: tuple[AddedToken, ...]
) -> tuple[int, ...]:
    ids: list[int] = []
    for place in (_object(path / "generation_config.json"), *_with_text_config(config)):
        ids.extend(i for i in _items(place.get("eos_token_id")) if isinstance(i, int))
    named = [token.id for token in added if token.content == eos_token]
    if eos_token is not None and not named and not ids:
        raise ConfigError(
            f"eos_token {eos_token!r} is no added token of tokenizer.json",
            where=str(path / "tokenizer_config.json"),
            fix="name an added token, or set eos_token_id in generation_config.json",
        )
    return tuple(dict.fromkeys(ids + named))


def _with_text_config(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Multi-modal folders keep the language model's settings one level down."""
    yield config
    inner = config.get("text_config")
    if isinstance(inner, dict):
        yield inner


def _context_length(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    lengths = [place.get(name) for place in _with_text_config(config) for name in _CONTEXT_NAMES]
    for length in (*lengths, settings.get("model_max_length")):
        if isinstance(length, int) and 0 < length < _LONGEST_CONTEXT:
            return length
    return None


def _templates(
    path: Path, settings: Mapping[str, Any], override: Path | None
) -> tuple[dict[str, str], str]:
    """Templates by name, and where `default` came from. Files go before tokenizer_config.json, as in the reference."""
    if override is not None:
        return {"default": _read(override)}, str(override)
    config_file = path / "tokenizer_config.json"
    found = _configured_templates(settings.get("chat_template"), config_file)
    source = str(config_file) if "default" in found else ""
    in_json = path / "chat_template.json"
    if in_json.is_file():
        found.update(_configured_templates(_object(in_json).get("chat_template"), in_json))
        source = str(in_json)
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _read(file)
    own = path / "chat_template.jinja"
    if own.is_file():
        found["default"] = _read(own)
        source = str(own)
    return found, source


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"can not be read: {error}", where=str(file), fix="give a Jinja file in UTF-8"
        ) from error


def _configured_templates(value: object, file: Path) -> dict[str, str]:
    """One template, or a list of `{name, template}`."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    found: dict[str, str] = {}
    for entry in _items(value):
        match entry:
            case {"name": str(name), "template": str(template)}:
                found[name] = template
            case _:
                raise ConfigError(
                    "chat_template is neither text nor a list of {name, template}",
                    where=str(file),
                    fix="give the template as text, or put it into chat_template.jinja",
                )
    return found

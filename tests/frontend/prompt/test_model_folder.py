from __future__ import annotations

import json
from pathlib import Path

import pytest

from fermata.core.errors import ConfigError
from fermata.core.model_folder import ModelFolder, default_model_folder


def make_folder(folder: Path, **files: object) -> Path:
    """`tokenizer_config={...}` writes tokenizer_config.json, and so on."""
    tokens = [
        {"id": 7, "content": "</s>", "special": True, "normalized": False},
        {"id": 8, "content": "<x>"},
    ]
    files.setdefault(
        "tokenizer", {"version": "1.0", "added_tokens": tokens, "model": {"vocab": {"a": 0}}}
    )
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_the_folder_that_ships_has_all_that_a_chat_needs() -> None:
    folder = ModelFolder.load(default_model_folder())
    by_content = {token.content: token for token in folder.added_tokens}
    assert folder.eos_token_ids == (by_content["<|im_end|>"].id, by_content["<|endoftext|>"].id)
    assert folder.context_length == 131_072
    assert "add_generation_prompt" in folder.chat_template
    assert folder.template_source.endswith("chat_template.jinja")
    assert by_content["<|im_start|>"].special
    assert not by_content["<think>"].special
    assert not any(token.normalized for token in folder.added_tokens)
    assert set(by_content) >= {
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    }


def test_a_missing_folder_or_tokenizer_is_named_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder") as missing:
        ModelFolder.load(tmp_path / "nowhere")
    assert missing.value.where == str(tmp_path / "nowhere")
    assert missing.value.fix
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        ModelFolder.load(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"added_tokens": 3}', '{"added_tokens": [{"id": "x"}]}'])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="can not be read") as error:
        ModelFolder.load(tmp_path)
    assert error.value.where == str(tmp_path / "tokenizer.json")


def test_a_bare_folder_says_nothing_and_is_enough_for_completions(tmp_path: Path) -> None:
    folder = ModelFolder.load(make_folder(tmp_path))
    assert folder.eos_token_ids == ()
    assert folder.context_length is None
    assert folder.chat_template == ""
    assert folder.special_tokens == {}
    # The reference takes an added token for normalised unless told otherwise.
    assert [token.normalized for token in folder.added_tokens] == [False, True]


def test_ids_that_end_a_turn_come_from_all_files_without_repeats(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path,
        generation_config={"eos_token_id": [3, 7]},
        config={"eos_token_id": 4, "text_config": {"eos_token_id": 3}},
        tokenizer_config={"eos_token": {"content": "</s>", "lstrip": False}},
    )
    assert ModelFolder.load(folder).eos_token_ids == (3, 7, 4)
    (tmp_path / "generation_config.json").unlink()
    assert ModelFolder.load(folder).eos_token_ids == (4, 3, 7)


def test_an_end_of_turn_that_no_file_can_name_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, tokenizer_config={"eos_token": "<nothing>"})
    with pytest.raises(ConfigError, match="no added token") as error:
        ModelFolder.load(folder)
    assert error.value.where.endswith("tokenizer_config.json")
    make_folder(tmp_path, config={"eos_token_id": 5})
    assert ModelFolder.load(folder).eos_token_ids == (5,)


def test_special_tokens_are_read_as_text_or_object_and_from_the_old_file_too(
    tmp_path: Path,
) -> None:
    folder = make_folder(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "unk_token": None,
            "pad_token": 3,
        },
        special_tokens_map={"eos_token": "ignored", "cls_token": "[CLS]"},
    )
    assert ModelFolder.load(folder).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "[CLS]",
    }


@pytest.mark.parametrize(
    ("config", "settings", "length"),
    [
        ({"max_position_embeddings": 4096}, {"model_max_length": 99}, 4096),
        ({"text_config": {"max_position_embeddings": 8192}}, {}, 8192),
        ({"n_positions": 1024}, {}, 1024),
        ({}, {"model_max_length": 2048}, 2048),
        ({}, {"model_max_length": 1e30}, None),
        ({}, {"model_max_length": 10**18}, None),
    ],
)
def test_the_context_length_is_found_where_folders_put_it(
    tmp_path: Path, config: dict[str, object], settings: dict[str, object], length: int | None
) -> None:
    assert (
        ModelFolder.load(
            make_folder(tmp_path, config=config, tokenizer_config=settings)
        ).context_length
        == length
    )


def test_template_files_go_before_the_tokenizers_settings(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, tokenizer_config={"chat_template": "from settings"})
    loaded = ModelFolder.load(folder)
    assert (loaded.chat_template, loaded.template_source) == (
        "from settings",
        str(folder / "tokenizer_config.json"),
    )
    make_folder(folder, chat_template={"chat_template": "from json"})
    assert ModelFolder.load(folder).chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    loaded = ModelFolder.load(folder)
    assert (loaded.chat_template, loaded.template_source) == (
        "from jinja",
        str(folder / "chat_template.jinja"),
    )


def test_named_templates_are_kept_beside_the_default_one(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    folder = make_folder(tmp_path, tokenizer_config={"chat_template": entries})
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("t")
    loaded = ModelFolder.load(folder)
    assert loaded.chat_template == "d"
    assert loaded.named_templates == {"rag": "r", "tool_use": "t"}


@pytest.mark.parametrize("value", [3, [{"name": "x"}], {"default": "x"}])
def test_a_template_of_another_shape_is_refused(tmp_path: Path, value: object) -> None:
    folder = make_folder(tmp_path, tokenizer_config={"chat_template": value})
    with pytest.raises(ConfigError, match="chat_template is neither") as error:
        ModelFolder.load(folder)
    assert error.value.where.endswith("tokenizer_config.json")


def test_a_template_from_elsewhere_replaces_the_folders_own(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, tokenizer_config={"chat_template": "own"})
    other = tmp_path / "mine.jinja"
    other.write_text("mine")
    loaded = ModelFolder.load(folder, chat_template=other)
    assert (loaded.chat_template, loaded.template_source) == ("mine", str(other))
    with pytest.raises(ConfigError, match="can not be read") as error:
        ModelFolder.load(folder, chat_template=tmp_path / "none.jinja")
    assert error.value.where.endswith("none.jinja")

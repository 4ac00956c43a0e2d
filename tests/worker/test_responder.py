from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fermata.core import spec
from fermata.core.errors import ConfigError
from fermata.core.hashing import token_frame
from fermata.core.ids import make_lease_id
from fermata.core.model_folder import default_model_folder
from fermata.wire.messages import Sampling
from fermata.worker.engine.base import EngineRequest
from fermata.worker.engine.responder import Responder, make_responder
from fermata.worker.engine.script import Rule, choose, load_rules
from fermata.worker.engine.speech import Speech
from fermata.worker.engine.vocabulary import Vocabulary

WINDOW = 100_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(default_model_folder() / "tokenizer.json"))


def request(
    inputs: list[str] | None = None,
    *,
    tokens: list[int] | None = None,
    resumed: int = 0,
    max_tokens: int = WINDOW,
) -> EngineRequest:
    return EngineRequest(
        lease=make_lease_id(router=0, incarnation=1, serial=1),
        tokens=token_frame(tokens or [1, 2, 3]),
        sampling=Sampling(max_tokens=max_tokens),
        resumed=resumed,
        script_inputs=inputs or [],
    )


def ids(speech: Speech) -> list[int]:
    return [speech.token(index) for index in range(speech.length)]


def text(tokenizer: Tokenizer, speech: Speech) -> str:
    return str(tokenizer.decode(ids(speech), skip_special_tokens=False))


def responder(given: spec.Responder) -> Responder:
    return make_responder(given, folder=default_model_folder())


def script(tmp_path: Path, yaml: str) -> Path:
    path = tmp_path / "script.yaml"
    path.write_text(yaml)
    return path


def test_echo_says_the_last_input_and_ends_the_turn(tokenizer: Tokenizer) -> None:
    echo = responder(spec.Echo())
    speech = echo.speak(request(["first", "Größe: 5 µm\n\n  ok 👩‍🚀"]), context_length=WINDOW)
    assert text(tokenizer, speech) == "Größe: 5 µm\n\n  ok 👩‍🚀"
    assert speech.eos == tokenizer.token_to_id("<|im_end|>")
    assert echo.features == ("last_input",)


def test_echo_of_nothing_ends_the_turn_at_once() -> None:
    assert responder(spec.Echo()).speak(request(), context_length=WINDOW).length == 0


def test_markup_comes_out_as_added_tokens(tokenizer: Tokenizer) -> None:
    speech = responder(spec.Echo()).speak(
        request(["a<tool_call>{}</tool_call>"]), context_length=WINDOW
    )
    said = ids(speech)
    assert tokenizer.token_to_id("<tool_call>") in said
    assert tokenizer.token_to_id("</tool_call>") in said


def test_an_end_of_turn_inside_the_text_ends_it_there(tokenizer: Tokenizer) -> None:
    speech = responder(spec.Echo()).speak(request(["yes<|endoftext|>no"]), context_length=WINDOW)
    assert text(tokenizer, speech) == "yes"
    assert speech.eos == tokenizer.token_to_id("<|endoftext|>")


def test_lorem_depends_on_the_prompt_alone(tokenizer: Tokenizer) -> None:
    lorem = responder(spec.Lorem(tokens=40))
    one = ids(lorem.speak(request(tokens=[1, 2, 3]), context_length=WINDOW))
    again = ids(lorem.speak(request(["x"], tokens=[1, 2, 3]), context_length=WINDOW))
    other = ids(lorem.speak(request(tokens=[1, 2, 4]), context_length=WINDOW))
    assert one == again != other
    assert len(one) == 40
    assert lorem.features == ()
    words = tokenizer.decode(one)
    assert words.startswith("Lorem ipsum ")
    assert "." in words


def test_lorem_reads_like_text_that_was_tokenised_whole(tokenizer: Tokenizer) -> None:
    said = ids(responder(spec.Lorem(tokens=300)).speak(request(), context_length=WINDOW))
    assert tokenizer.encode(tokenizer.decode(said), add_special_tokens=False).ids == said


def test_a_resumed_lorem_is_the_same_one(tokenizer: Tokenizer) -> None:
    lorem = responder(spec.Lorem())
    whole = ids(lorem.speak(request(tokens=[5, 6]), context_length=WINDOW))
    resumed = lorem.speak(request(tokens=[5, 6, *whole[:7]], resumed=7), context_length=WINDOW)
    assert ids(resumed) == whole


def test_lorem_is_as_long_as_max_tokens_unless_that_only_fills_the_window() -> None:
    lorem = responder(spec.Lorem(tokens=7))
    named = lorem.speak(request(tokens=[1] * 10, max_tokens=50), context_length=100)
    filled = lorem.speak(request(tokens=[1] * 10, max_tokens=90), context_length=100)
    assert (named.length, filled.length) == (50, 7)


def test_a_long_lorem_costs_only_what_is_said() -> None:
    speech = responder(spec.Lorem()).speak(request(max_tokens=WINDOW - 5), context_length=WINDOW)
    speech.token(10)
    assert len(speech._text) < 50  # pyright: ignore[reportPrivateUsage]  # the point is what was not made


RULES = """
rules:
  - when: 'weather'
    say: '<tool_call>{"name": "get_weather"}</tool_call>'
    delayS: 1.5
    times: 1
  - when: '^\\{"temp'
    say: It is warm.
  - when: weather
    say: I told you.
"""


def test_a_script_speaks_the_first_rule_that_applies_and_echoes_else(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    said = responder(spec.Script(path=str(script(tmp_path, RULES))))
    assert said.features == ("script_inputs",)

    def say(*inputs: str) -> Speech:
        return said.speak(request(list(inputs)), context_length=WINDOW)

    first = say("what is the weather?")
    assert text(tokenizer, first) == '<tool_call>{"name": "get_weather"}</tool_call>'
    assert first.delay_s == 1.5
    assert text(tokenizer, say("weather?", '{"temp": 21}')) == "It is warm."
    assert text(tokenizer, say("weather?", '{"temp": 21}', "weather again")) == "I told you."
    assert text(tokenizer, say("hello")) == "hello"
    assert say("hello").delay_s == 0.0
    assert say().length == 0


def test_a_use_of_a_rule_counts_only_where_it_was_the_one_that_spoke() -> None:
    rules = (
        Rule(re.compile("a"), "first", times=2),
        Rule(re.compile("a|b"), "second", times=1),
        Rule(re.compile("."), "third"),
    )
    assert [choose(rules, list("aaaabb"[: n + 1])) for n in range(6)] == [0, 0, 1, 2, 2, 2]
    assert choose(rules, ["b", "b"]) == 2
    assert choose(rules, []) is None
    assert choose(rules[:1], ["x"]) is None


def test_only_limited_rules_look_at_the_history() -> None:
    rules = (Rule(re.compile("x"), "say"),)
    assert choose(rules, ["never searched, and would match: x"] * 3 + ["y"]) is None


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("rules: []", r"script.yaml:1: rules: needs at least 1 item \(add one\)"),
        ("rules:\n  - when: a\n    say: b\n    time: 1", r"script.yaml:4: rules\[0\].time: unknown .*mean times"),
        ("rules:\n  - say: b", r"script.yaml:2: rules\[0\]: 'when' is missing \(add when\)"),
        ("rules:\n- {when: a, say: b, delayS: -1}", r"script.yaml:2: rules\[0\].delayS: -1 is too low"),
        ("rules:\n- {when: a, say: b, times: 0}", r"script.yaml:2: rules\[0\].times: 0 is too low"),
        ("rules:\n- {when: a, say: 5}", r"rules\[0\].say: expected text, got the number 5 \(put it in quotes\)"),
        ("rules:\n- {when: a, say: b}\n- when: '('\n  say: b", r"yaml:3: rules\[1\].when: no regular exp.*\(escape it"),
        ("- a", "expected a mapping, got a list"),
        ("rules: [", "not valid YAML|YAML"),
        ("", r"holds 0 documents \(write one"),
        ("a: 1\n---\nb: 2", "holds 2 documents"),
    ],
)  # fmt: skip
def test_a_wrong_script_is_told_in_one_line(tmp_path: Path, yaml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as wrong:
        load_rules(script(tmp_path, yaml))
    assert "\n" not in str(wrong.value)


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: can not be read: .*\(give a YAML file\)"):
        load_rules(tmp_path / "none.yaml")


def test_a_model_without_an_end_of_turn_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(
        (default_model_folder() / "tokenizer.json").read_bytes()
    )
    with pytest.raises(ConfigError, match=r"names no token that ends a turn \(set eos_token"):
        Vocabulary(tmp_path)


def test_a_broken_tokenizer_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    with pytest.raises(ConfigError, match=r"tokenizer.json: can not be read: .*\(replace the file"):
        Vocabulary(tmp_path)

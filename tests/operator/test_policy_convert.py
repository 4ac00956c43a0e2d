"""Dynamo's policies and flags as ours: golden files, and what can not be honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fermata.core.errors import ConfigError
from fermata.core.spec import RouterPolicy
from fermata.operator import policy_cli
from fermata.operator.dynamo_settings import DROPPED, MODES, SETTINGS, THUNDER_AGENT
from fermata.operator.policy_convert import convert, parse_flags

GOLDEN = Path(__file__).parent / "golden" / "policy"
CASES = sorted(path.name.removesuffix(".flags") for path in GOLDEN.glob("*.flags"))


@pytest.mark.parametrize("case", CASES)
def test_a_policy_of_dynamo_becomes_ours_and_names_what_it_drops(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = GOLDEN / f"{case}.dynamo.yaml", tmp_path / "policy.yaml"
    flags = (GOLDEN / f"{case}.flags").read_text().split()
    arguments = ["convert", *([str(file)] if file.exists() else []), "--name", case, "-o", str(out)]
    assert policy_cli.policy([*arguments, "--", *flags]) == 0
    expected = (GOLDEN / f"{case}.policy.yaml").read_text()
    assert out.read_text() == expected
    told = capsys.readouterr()
    assert told.out == ""
    lines = [line[2:] for line in expected.splitlines() if line.startswith("# ")]
    assert told.err.splitlines() == lines[1:]


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_a_policy_without_problems(case: str) -> None:
    data = yaml.safe_load((GOLDEN / f"{case}.policy.yaml").read_text())
    assert msgspec.convert(data, RouterPolicy).spec.problems() == []


def test_there_are_golden_files_for_files_flags_and_both() -> None:
    assert len(CASES) >= 6
    assert {path.name.split(".")[0] for path in GOLDEN.glob("*.dynamo.yaml")} < set(CASES)


def spec(policy: object = None, flags: str = "") -> dict[str, Any]:
    return convert(policy, flags.split(), name="p").spec


def test_nothing_that_was_said_is_lost_without_a_word() -> None:
    """Each name that is known is in the policy, or among what is dropped."""
    for key in (*SETTINGS, *DROPPED):
        value = {"boolean": "true", "order": "lcfs", "affinity": "soft", "approximate": "ttl"}.get(
            SETTINGS[key].kind if key in SETTINGS else "", "1"
        )
        flag = f"--router-{key.replace('_', '-')}"
        made = convert(None, [flag, value, "--router-session-affinity-ttl-secs", "60"], name="p")
        is_dropped = [note.what for note in made.dropped] == [flag]
        assert is_dropped != (key in SETTINGS), key
        if key in SETTINGS:
            assert made.get(SETTINGS[key].path) is not None


def test_each_parameter_of_its_thunder_agent_is_carried_over_or_dropped_with_a_reason() -> None:
    values = {"pause_threshold": 0.9, "pause_target": 0.5, "resume_hysteresis": 0.2}
    for key in THUNDER_AGENT:
        value = values.get(key, 7)
        classifier = {"type": "thunderagent", "parameters": {key: value}}
        made = convert({"request_classifier": classifier}, [], name="p")
        assert made.get(THUNDER_AGENT[key].path) == value
        assert made.dropped == []


def test_the_file_wins_over_flags_and_the_classifier_over_the_mode() -> None:
    made = spec(
        {"request_classifier": {"type": "thunderagent"}, "router": {"temperature": 0.5}},
        "--router-mode round-robin --router-temperature 0.1",
    )
    assert made["scheduler"]["type"] == "ThunderAgent"
    assert made["scheduler"]["kvAware"]["temperature"] == 0.5


@pytest.mark.parametrize("mode", [*MODES, "direct", "device-aware-weighted"])
def test_each_mode_is_a_scheduler_or_is_named_as_dropped(mode: str) -> None:
    made = convert(None, ["--router-mode", mode], name="p")
    if mode in MODES:
        assert made.spec["scheduler"]["type"] == MODES[mode].scheduler
        assert made.dropped == []
    else:
        assert made.spec["scheduler"]["type"] == "RoundRobin"
        assert [note.what for note in made.dropped] == ["--router-mode"]


def test_another_classifier_or_selector_is_dropped_by_name() -> None:
    policy = {
        "request_classifier": {"type": "guess"},
        "worker_selection": {"aggregated": "mine", "instances": [{"name": "mine", "type": "x"}]},
    }
    made = convert(policy, [], name="p")
    assert made.spec["scheduler"]["type"] == "KVAware"
    assert [n.what for n in made.dropped] == ["request_classifier", "worker_selection.aggregated"]


def test_flags_are_read_in_every_form_and_a_pasted_command_line_too() -> None:
    said = parse_flags("python -m x --a 1 --b=2 --c --no-d --e -5".split())  # noqa: SIM905
    assert said == {"a": "1", "b": "2", "c": True, "d": False, "e": "-5"}


@pytest.mark.parametrize(
    ("policy", "flags", "where"),
    [
        ([], "", "the file"),
        ({"router": 3}, "", "router"),
        ({"policy_classes": {}}, "", "policy_classes"),
        ({"policy_classes": [3]}, "", "policy_classes[0]"),
        ({"policy_classes": [{"name": "a", "cache_bucket": "no"}]}, "", "[0].cache_bucket"),
        ({"policy_classes": [{"name": "a", "queue_policy": "lifo"}]}, "", "[0].queue_policy"),
        ({"policy_classes": [{"name": "a", "quantum": "lots"}]}, "", "[0].quantum"),
        ({"request_classifier": {"type": "thunderagent", "parameters": 1}}, "", ".parameters"),
        (None, "--router-temperature hot", "--router-temperature"),
        (None, "--router-temperature", "--router-temperature"),
        (None, "--router-kv-events maybe", "--router-kv-events"),
        (None, "--router-session-affinity-mode firm", "--router-session-affinity-mode"),
        (None, "--router-kv-overlap-score-credit 2", "tierWeights.device"),
        (
            {
                "request_classifier": {
                    "type": "thunderagent",
                    "parameters": {"pause_threshold": 0.5, "pause_target": 0.9},
                }
            },
            "",
            "pauseTarget",
        ),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_its_place(
    policy: object, flags: str, where: str
) -> None:
    with pytest.raises(ConfigError) as error:
        spec(policy, flags)
    assert where in str(error.value)
    assert error.value.fix


def test_the_command_says_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    for text in ("a: 1\n---\nb: 2\n", "", "{"):
        file = tmp_path / "p.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError):
            policy_cli.policy(["convert", str(file)])
    with pytest.raises(ConfigError, match="can not be read"):
        policy_cli.policy(["convert", str(tmp_path / "none.yaml")])
    with pytest.raises(ConfigError, match="nothing to convert"):
        policy_cli.policy(["convert"])


def test_without_an_output_file_the_manifest_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert policy_cli.policy(["convert", "--", "--router-mode", "kv"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["spec"]["scheduler"]["type"] == "KVAware"

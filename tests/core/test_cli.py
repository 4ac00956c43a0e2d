"""`fermata` dispatches by entry point, imports only what was asked for, and says what went wrong in one line."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest

from fermata.core import cli
from fermata.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def fermata(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "fermata.core.cli", *argv],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        check=False,
    )


def complain(argv: list[str]) -> int:
    raise ConfigError("is wrong", where="fleet.yaml:3", fix="put it right")


def interrupted(argv: list[str]) -> int:
    raise KeyboardInterrupt


def count(argv: list[str]) -> int:
    return 40 + len(argv)


def stand_ins(*names: str) -> dict[str, EntryPoint]:
    """Commands of this very file, by the mechanism that finds the real ones."""
    return {name: EntryPoint(name, f"{__name__}:{name}", cli.GROUP) for name in names}


COMMANDS = stand_ins("complain", "interrupted", "count")


def test_the_help_teaches_every_command_and_imports_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for entry in entry_points(group=cli.GROUP):
        assert f"  {entry.name} " in text
        assert cli.SUMMARIES[entry.name] in text, "every command has its line"
    assert "fermata up -f examples/01-quickstart.yaml" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_help_stays_light() -> None:
    code = (
        "import sys; from fermata.core.cli import main; main(['--help']);"
        "heavy = {'fastapi', 'uvicorn', 'zmq', 'tokenizers', 'yaml', 'asyncio', 'fermata.operator'};"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_argument_shows_the_help_and_the_version_is_the_package_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("fermata serves whole agent programs")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fermata {version('fermata')}\n"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("pu", "fermata: no command 'pu' (did you mean up?)\n"),
        ("Frontends", "fermata: no command 'Frontends' (did you mean frontend?)\n"),
        ("xyzzy", "fermata: no command 'xyzzy' (see fermata --help)\n"),
        ("-f", "fermata: no command '-f' (options come after the command; see fermata --help)\n"),
    ],
)
def test_an_unknown_command_suggests_the_nearest(
    typed: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([typed]) == 2
    assert capsys.readouterr().err == answer


def test_a_process_exits_with_the_command_s_code() -> None:
    done = fermata("nonsense")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_a_command_gets_the_rest_of_the_line_and_gives_the_exit_code() -> None:
    assert cli.main(["count", "-f", "x", "--watch"], commands=COMMANDS) == 43


def test_a_config_error_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complain"], commands=COMMANDS) == 2
    assert capsys.readouterr().err == "fermata complain: fleet.yaml:3: is wrong (put it right)\n"


def test_ctrl_c_before_a_command_handles_it_is_exit_130() -> None:
    assert cli.main(["interrupted"], commands=COMMANDS) == 130

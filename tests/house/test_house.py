"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fermata.core
import fermata.operator
import fermata.wire
from fermata.core import cli

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("core", "router", "frontend", "worker", "operator", "replay")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_root_folder_and_no_namespace_folder_is_a_package() -> None:
    found = [
        str(path.relative_to(ROOT))
        for root in ROOTS
        for path in (ROOT / root / "__init__.py", ROOT / root / "fermata" / "__init__.py")
        if path.exists()
    ]
    assert found == [], "operator/__init__.py would shadow the standard library's operator"


def test_python_s_own_operator_is_the_one_found_from_the_checkout() -> None:
    code = "import operator; print(operator.add(1, 2), operator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.startswith("3 ")
    assert str(ROOT) not in done.stdout


def test_ci_checks_for_such_a_file_before_anything_else(tmp_path: Path) -> None:
    """In shell, since Python may not start: tried on a copy that has one."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "operator").mkdir()
    (tmp_path / "operator" / "__init__.py").write_text("")
    done = subprocess.run(
        ["sh", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("operator/__init__.py must not exist")
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed"


def test_tests_are_no_packages() -> None:
    assert [str(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def requirements() -> list[tuple[str, str]]:
    """Each declared dependency with the line it stands on."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        declared += extra
    lines = text.splitlines()
    return [(d, next(line for line in lines if f'"{d}"' in line)) for d in declared]


@pytest.mark.parametrize(("requirement", "line"), requirements())
def test_every_dependency_says_why_it_is_there(requirement: str, line: str) -> None:
    _, _, reason = line.partition(f'"{requirement}"')
    assert re.search(r"#\s*\S.{7,}", reason), f"{requirement} has no reason"
    assert line.count('"') == 2 or "sys_platform" in line, "one dependency a line"


def imported_by(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
    return found


def test_every_distribution_we_import_is_declared() -> None:
    names = {"yaml": "pyyaml", "zmq": "pyzmq", "prometheus_client": "prometheus-client"}
    names |= {"typing_extensions": "typing-extensions"}
    declared = {re.split(r"[\[>=; ]", d)[0].lower() for d in PROJECT["project"]["dependencies"]}
    imported: dict[str, str] = {}
    for root in ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            for module in imported_by(path):
                imported[module] = str(path.relative_to(ROOT))
    # Reached through a declared dependency whose interface they are part of.
    through = {"starlette": "fastapi", "pydantic": "fastapi"}
    for module, where in imported.items():
        if module in sys.stdlib_module_names or module == "fermata":
            continue
        name = names.get(module, through.get(module, module)).lower()
        assert name in declared, f"{where} imports {module}, which pyproject.toml does not declare"


def test_every_package_is_type_checked_and_layered() -> None:
    """mypy checks only the first root of a namespace unless each package is named."""
    packages = {
        f"fermata.{path.parent.name}"
        for root in ROOTS
        for path in (ROOT / root / "fermata").glob("*/__init__.py")
    }
    assert packages == set(PROJECT["tool"]["mypy"]["packages"])
    layers = (ROOT / ".importlinter").read_text()
    assert packages == set(layers.partition("root_packages =")[2].partition("include")[0].split())


def test_every_command_has_an_entry_point_and_a_line_in_the_help() -> None:
    assert set(PROJECT["project"]["entry-points"][cli.GROUP]) == set(cli.SUMMARIES)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_documents_name_make_targets_and_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    blocks = "\n".join(re.findall(r"`[^`]+`|^ {4}.*$", text, re.MULTILINE))
    blocks = re.sub(r"#.*", "", blocks)
    for words in re.findall(r"\bmake ((?:[a-z][a-z0-9-]+ ?)+)", blocks):
        assert set(words.split()) <= targets(), f"{document} says make {words}"
    for path in re.findall(r"\b(?:examples|docs|tests|benchmarks|\.ci)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), f"{document} names {path}"


def test_ci_runs_the_targets_a_person_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for line in re.findall(r"^lane \w+ \d+ (.*)$", script, re.MULTILINE):
        assert set(line.split()) <= targets()
    assert "make bench" in script


def test_every_lane_with_a_report_has_a_minimum_and_the_skips_have_reasons() -> None:
    reports = set(re.findall(r"junit/(\w+)\.xml", (ROOT / "Makefile").read_text()))
    minimum = dict(
        line.split()
        for line in (ROOT / ".ci/minimum_tests").read_text().splitlines()
        if line[0] != "#"
    )
    assert set(minimum) == reports
    assert all(int(count) > 0 for count in minimum.values())
    skips = (ROOT / "tests" / "allowed_skips.txt").read_text().splitlines()
    assert all(line.startswith("#") or re.match(r"\S+ -- \S.{9,}", line) for line in skips if line)


def public_modules() -> list[str]:
    found = []
    for package in (fermata.core, fermata.wire, fermata.operator):
        found += [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return found


@pytest.mark.parametrize("name", public_modules())
def test_a_module_says_what_it_is_for_and_what_it_exports_exists(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring"
    exported = getattr(module, "__all__", [])
    assert sorted(exported) == sorted(set(exported))
    assert all(hasattr(module, word) for word in exported)


def test_verdict_counts_failures_missing_tests_and_skips_without_a_reason(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("verdict", ROOT / ".ci" / "verdict.py")
    assert spec is not None
    assert spec.loader is not None
    verdict = importlib.util.module_from_spec(spec)
    sys.modules["verdict"] = verdict
    spec.loader.exec_module(verdict)
    report = tmp_path / "unit.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a" name="fine"/>'
        '<testcase classname="tests.a" name="broken"><failure message="x"/></testcase>'
        '<testcase classname="tests.a" name="skipped"><skipped type="pytest.skip" message="later"/></testcase>'
        "</testsuite></testsuites>"
    )
    suite = verdict.read_suite(report)

    assert (suite.passed, suite.failed) == (1, ["tests/a::broken"])
    assert verdict.problems_of("unit", suite, 2, {}) == [
        "unit: tests/a::broken failed",
        "unit: tests/a::skipped was skipped (later) and is not in allowed_skips.txt",
    ]
    allowed = {"tests/a::skip*": "the reason"}
    assert verdict.problems_of("unit", suite, 3, allowed)[1:] == [
        "unit: ran 2 tests, at least 3 are expected"
    ]
    assert verdict.problems_of("e2e", None, 1, {}) == ["e2e: no report, so its tests did not run"]

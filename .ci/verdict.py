"""The end of a CI run: what ran, what was skipped, and one closing line `N passed, N failed`.

A lane that ran fewer tests than `.ci/minimum_tests` says fails: tests that silently stopped being collected look just
like tests that pass. A skip must be named, with its reason, in `tests/allowed_skips.txt`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ALLOWED_SKIPS = HERE.parent / "tests" / "allowed_skips.txt"
MINIMUM = HERE / "minimum_tests"


@dataclass
class Suite:
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Test -> the reason it gave."""


def read_suite(path: Path) -> Suite:
    suite = Suite()
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            suite.failed.append(name)
        elif skip is not None and skip.get("type") != "pytest.xfail":
            suite.skipped[name] = skip.get("message", "")
        else:
            suite.passed += 1
    return suite


def read_pairs(path: Path, separator: str) -> dict[str, str]:
    """`key<separator>value` lines; `#` starts a comment line."""
    pairs: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            key, _, value = line.partition(separator)
            pairs[key.strip()] = value.strip()
    return pairs


def problems_of(lane: str, suite: Suite | None, minimum: int, allowed: dict[str, str]) -> list[str]:
    if suite is None:
        return [f"{lane}: no report, so its tests did not run"]
    found = [f"{lane}: {name} failed" for name in suite.failed]
    ran = suite.passed + len(suite.failed)
    if ran < minimum:
        found.append(f"{lane}: ran {ran} tests, at least {minimum} are expected")
    found += [
        f"{lane}: {name} was skipped ({reason}) and is not in {ALLOWED_SKIPS.name}"
        for name, reason in suite.skipped.items()
        if not any(fnmatch(name, pattern) and why for pattern, why in allowed.items())
    ]
    return found


def main(folder: Path, failed_lanes: list[str]) -> int:
    allowed = read_pairs(ALLOWED_SKIPS, " -- ")
    passed, problems = 0, [f"lane {name} failed" for name in failed_lanes]
    for lane, minimum in read_pairs(MINIMUM, " ").items():
        report = folder / f"{lane}.xml"
        suite = read_suite(report) if report.exists() else None
        if suite is not None:
            passed += suite.passed
            print(
                f"{lane}: {suite.passed} passed, {len(suite.failed)} failed, {len(suite.skipped)} skipped"
            )
        problems += problems_of(lane, suite, int(minimum), allowed)
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"{passed} passed, {len(problems)} failed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

"""Branch coverage of the pure core, from `coverage json`; below the limit it names what is missing and fails.

`fail_under` of coverage.py mixes lines and branches, and a file with one uncovered line of ten hides well in a
thousand. The limit is on branches alone, over all of the pure modules named in pyproject.toml.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LIMIT = 95.0


def main(path: Path) -> int:
    report = json.loads(path.read_text())
    rows = []
    for name, data in sorted(report["files"].items()):
        summary = data["summary"]
        rows.append(
            (name, summary["covered_branches"], summary["num_branches"], data["missing_branches"])
        )
    covered, total = sum(row[1] for row in rows), sum(row[2] for row in rows)
    if not total:
        print("no branch was measured: the modules of [tool.coverage.run] were not imported")
        return 1
    for name, hit, count, missing in rows:
        where = " ".join(f"{a}->{b}" if b > 0 else f"{a}->exit" for a, b in missing[:12])
        print(f"{name:<60} {hit:>4} / {count:<4} {where}")
    share = 100 * covered / total
    print(f"branch coverage of the pure core: {share:.1f} % of {total} (at least {LIMIT:g} %)")
    return 0 if share >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

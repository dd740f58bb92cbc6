#!/usr/bin/env bash
# Runs the tests that do not fit the time of CI (those marked `long`) and stores their result.
# Usage: bash scripts/long_suite.sh [PYTEST ARGUMENT ...]
#
# Ends with one line of JSON. A whole run, without arguments, also writes docs/long_suite.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/pytest ] || bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" JAX_PLATFORMS=cpu

results=$(mktemp)
trap 'rm -f "$results"' EXIT
code=0
# One after the other: a compilation of a large model takes several GB of memory.
pytest -c pyproject.toml -q -m long --timeout=1800 --junitxml="$results" "$@" || code=$?
python - "$results" "$#" <<'PYTHON'
import datetime
import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from scripts.stamp import commit


(suite,) = ElementTree.parse(sys.argv[1]).getroot().iter("testsuite")
cases = []
for case in suite.iter("testcase"):
    bad = case.find("failure") is not None or case.find("error") is not None
    outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
    cases.append((outcome, float(case.get("time")), f"{case.get('classname')}.{case.get('name')}"))
outcomes = [outcome for outcome, *_ in cases]
summary = {
    "commit": commit(),
    "date": datetime.date.today().isoformat(),
    "machine": f"{len(os.sched_getaffinity(0))} cores",
    "passed": outcomes.count("passed"),
    "failed": outcomes.count("failed"),
    "seconds": round(float(suite.get("time"))),
}
if sys.argv[2] == "0":
    lines = [
        "# Do the tests pass that are too long for CI?",
        "",
        f"The last run of `bash scripts/long_suite.sh`: commit {summary['commit']},"
        f" {summary['date']}, {summary['machine']}, {summary['seconds']} s;"
        f" {summary['passed']} passed, {summary['failed']} failed. A part of each of these tests"
        " runs in CI too.",
        "",
        "| test | outcome | seconds |",
        "|---|---|---|",
        *(f"| {name.removeprefix('tests.')} | {what} | {time:.0f} |" for what, time, name in cases),
    ]
    pathlib.Path("docs/long_suite.md").write_text("\n".join(lines) + "\n")
print(json.dumps(summary))
PYTHON
exit "$code"

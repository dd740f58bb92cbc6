"""The long suite: its last line, and that CI runs a part of each of its tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

EXAMPLES = """
import pytest

@pytest.mark.long
def test_good(): pass

@pytest.mark.long
def test_bad(): raise ValueError

def test_short(): raise ValueError
"""


def test_a_part_of_every_long_test_module_runs_in_ci():
    tests = ROOT / "tests"
    paths = [path for path in tests.rglob("test_*.py") if "mark.long" in path.read_text()]
    modules = {path.name for path in paths}
    assert {"test_preset_programs.py", "test_order.py", "test_training.py"} <= modules
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not long", *paths],
        cwd=tests,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    lines = [line for line in process.stdout.splitlines() if "::" in line]
    assert modules == {line.partition("::")[0].rpartition("/")[2] for line in lines}


def test_the_last_line_is_the_result(tmp_path):
    (tmp_path / "test_examples.py").write_text(EXAMPLES)
    before = [(path, path.stat().st_mtime_ns) for path in ROOT.glob("docs/long_suite.md")]
    process = subprocess.run(
        ["bash", str(ROOT / "scripts" / "long_suite.sh"), str(tmp_path)],
        env={**os.environ, "PYTEST_ADDOPTS": "-p no:cacheprovider"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert process.returncode == 1, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert (result["passed"], result["failed"]) == (1, 1)
    assert set(result) == {"commit", "date", "machine", "passed", "failed", "seconds"}
    assert result["machine"] == f"{len(os.sched_getaffinity(0))} cores"
    # A part of the suite is not its result.
    assert [(path, path.stat().st_mtime_ns) for path in ROOT.glob("docs/long_suite.md")] == before

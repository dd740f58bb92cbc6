"""Restarting for huge pages, in processes of their own."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain import host

TUNABLE = "glibc.malloc.hugetlb=1"
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_huge_pages = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not THP.exists() or "[never]" in THP.read_text(),
    reason="no transparent huge pages for malloc on this machine",
)

# Every start of the interpreter leaves a line in the file named by STARTS.
SCRIPT = """
import json, os, sys
with open(os.environ["STARTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
print("before")
from jaxtrain.host import restart_with_huge_pages
found = restart_with_huge_pages()
print(json.dumps({
    "found": found,
    "argv": sys.argv,
    "tunables": os.environ.get("GLIBC_TUNABLES"),
    "dev_mode": sys.flags.dev_mode,
    "warnings": sys.warnoptions,
    "huge": os.path.exists("/proc/self/smaps") and "hg" in flags_of_heap(),
}))
"""
# Where malloc asks for huge pages, the kernel marks large blocks with "hg".
FLAGS_OF_HEAP = """
def flags_of_heap():
    block = bytearray(64 * 2**20)
    with open("/proc/self/smaps") as file:
        return [word for line in file if line.startswith("VmFlags") for word in line.split()]
"""


def run(tmp_path, command, *, stdin=None, **environment):
    """Runs a command whose script is SCRIPT; returns (what it printed, pids of its starts)."""
    starts = tmp_path / "starts"
    starts.unlink(missing_ok=True)
    (tmp_path / "script.py").write_text(FLAGS_OF_HEAP + SCRIPT)
    inherited = {name: v for name, v in os.environ.items() if name != "GLIBC_TUNABLES"}
    root = Path(host.__file__).parents[1]
    path = os.pathsep.join([str(tmp_path), str(root)])
    inherited |= {"STARTS": str(starts), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, *command],
        env=inherited | environment,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = process.communicate(stdin, timeout=60)
    assert process.returncode == 0, errors
    lines = output.splitlines()
    pids = [int(line) for line in starts.read_text().split()]
    assert set(pids) == {process.pid}  # a batch system or a launcher knows only this one
    assert lines[:-1] == ["before"] * len(pids)  # what was printed before is not lost
    return json.loads(lines[-1]), pids


WORDS = ["--workdir=a b", "--x=", "", "*", "--", "-c", "--x=\"quoted\" 'twice'", "\u00fc\n"]


@needs_huge_pages
def test_restarts_once_with_the_same_words(tmp_path):
    found, pids = run(tmp_path, ["script.py", *WORDS])
    assert len(pids) == 2
    assert found["found"] == "on"
    assert found["argv"] == ["script.py", *WORDS]
    assert found["tunables"] == TUNABLE
    assert found["huge"]


@needs_huge_pages
def test_keeps_the_options_of_the_interpreter(tmp_path):
    found, pids = run(tmp_path, ["-X", "dev", "-W", "error::UserWarning", "script.py", "--x=1"])
    assert len(pids) == 2
    assert found["dev_mode"]
    assert "error::UserWarning" in found["warnings"]
    assert found["argv"] == ["script.py", "--x=1"]


@needs_huge_pages
def test_restarts_a_module(tmp_path):
    found, pids = run(tmp_path, ["-m", "script", *WORDS])
    assert len(pids) == 2
    assert found["argv"] == [str(tmp_path / "script.py"), *WORDS]


@needs_huge_pages
def test_keeps_other_tunables(tmp_path):
    found, pids = run(tmp_path, ["script.py"], GLIBC_TUNABLES="glibc.malloc.arena_max=4")
    assert len(pids) == 2
    assert found["tunables"] == f"glibc.malloc.arena_max=4:{TUNABLE}"


@pytest.mark.parametrize(
    ("tunables", "expected"),
    [(TUNABLE, "on"), ("glibc.malloc.hugetlb=0", "off, by GLIBC_TUNABLES")],
)
def test_obeys_what_the_environment_says(tmp_path, tunables, expected):
    found, pids = run(tmp_path, ["script.py"], GLIBC_TUNABLES=tunables)
    assert len(pids) == 1
    assert (found["found"], found["tunables"]) == (expected, tunables)


def test_not_where_an_accelerator_is_used(tmp_path):
    (tmp_path / "jax_rocm7_plugin.py").write_text("")
    found, pids = run(tmp_path, ["script.py"], JAX_PLATFORMS="")
    assert len(pids) == 1
    assert found["found"] == "off, jax_rocm7_plugin is installed and they help on CPU only"


@needs_huge_pages
@pytest.mark.skipif(bool(host.accelerators()), reason="this machine has an accelerator")
def test_packages_that_only_compile_for_devices_elsewhere_do_not_matter(tmp_path):
    (tmp_path / "libtpu.py").write_text("")
    (tmp_path / "jax_cuda13_plugin.py").write_text("")
    found, pids = run(tmp_path, ["script.py"], JAX_PLATFORMS="")
    assert len(pids) == 2
    assert found["found"] == "on"


@needs_huge_pages
def test_an_accelerator_that_is_not_used_does_not_matter(tmp_path):
    (tmp_path / "jax_rocm7_plugin.py").write_text("")
    found, _ = run(tmp_path, ["script.py"], JAX_PLATFORMS="cpu")
    assert found["found"] == "on"


def test_a_script_from_standard_input_is_used_up(tmp_path):
    found, pids = run(tmp_path, ["-", "--x=1"], stdin=FLAGS_OF_HEAP + SCRIPT)
    assert len(pids) == 1
    assert found["found"] == "off, only a script is restarted, and not in a debugger"


def test_not_in_a_debugger(tmp_path):
    traced = tmp_path / "traced.py"
    traced.write_text("import sys, runpy\nsys.settrace(lambda *_: None)\nimport script\n")
    found, pids = run(tmp_path, ["traced.py"])
    assert len(pids) == 1
    assert found["found"].startswith("off, only a script")


def test_not_in_an_interactive_session(tmp_path):
    # The prompt goes to stderr; `import script` runs it as a notebook's cell would.
    found, pids = run(tmp_path, ["-i", "-q"], stdin="import script\n")
    assert len(pids) == 1
    assert found["found"].startswith("off, only a script")


def test_pytest_is_never_restarted(tmp_path, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("pytest was restarted"))
    assert host.restart_with_huge_pages().startswith("off")


MAIN = """
import os
with open(os.environ["STARTS"], "a") as file:
    file.write("start\\n")
from jaxtrain.config import RunConfig
from jaxtrain.main import main

def build(config):
    raise SystemExit(0)

if __name__ == "__main__":
    main(RunConfig, build)
"""


@needs_huge_pages
@pytest.mark.parametrize(
    ("words", "starts", "lines"), [([], 2, ["on"]), (["--huge_pages=off"], 1, [])]
)
def test_main_restarts_unless_told_not_to(tmp_path, words, starts, lines):
    (tmp_path / "train.py").write_text(MAIN)
    environment = {name: v for name, v in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {"STARTS": str(tmp_path / "starts"), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "train.py", *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "starts").read_text().count("start") == starts
    said = [line for line in process.stderr.splitlines() if "huge pages: " in line]
    assert [line.split("huge pages: ")[1] for line in said] == lines

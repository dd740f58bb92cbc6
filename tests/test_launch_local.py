"""`jaxtrain launch`: its words, which exit code counts, and real processes without JAX."""

import os
import re
import signal
import subprocess
import sys

import pytest
from processes import TESTS, TIMEOUT, assert_gone, environment

from jaxtrain import ExitCode
from jaxtrain.errors import ConfigError
from jaxtrain.launch import local

GUARDED = str(TESTS / "multiprocess" / "guarded_run.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a command after --"),
        (["--processes=2", "--"], "needs a command after --"),
        (["--", "true"], "needs --processes"),
        (
            ["--processes=2", "python", "x.py", "--lr=1"],
            "needs -- before the command: jaxtrain launch --processes=2 -- python x.py --lr=1$",
        ),
        (["--processes", "2", "true"], "jaxtrain launch --processes 2 -- true$"),
        (["--processes", "2"], "needs a command after --"),
        (["--processes=0", "--", "true"], "needs --processes"),
        (["--processes=-1", "--", "true"], "processes=-1"),
        (["--processes=x", "--", "true"], "processes=x"),
        (["--devices=2", "--", "true"], "devices"),
    ],
)
def test_words_that_cannot_work(words, message):
    with pytest.raises(ConfigError, match=message):
        local.parse(words)


def test_words_after_the_dashes_are_the_command_s():
    words = ["--processes", "2", "--restarts=3", "--", "run", "--", "--restarts=9"]
    config, command = local.parse(words)
    assert (config.processes, config.restarts, config.devices_per_process) == (2, 3, 0)
    assert command == ["run", "--", "--restarts=9"]


@pytest.mark.parametrize(
    ("codes", "code", "is_helped"),
    [
        ([0, 0], 0, False),
        ([76, 1], 1, True),
        ([76, 76], 76, True),
        ([124, 124], 124, True),
        ([76, -9], 137, True),
        ([76, -11], 139, True),
        ([5, 5], 5, True),
        ([75, 75], 75, False),
        ([75, 76], 75, False),
        ([2, 1], 2, False),
        ([4, 76], 4, False),
        ([143, 76], 143, False),
    ],
)
def test_which_exit_code_counts_and_where_a_restart_helps(codes, code, is_helped):
    assert local.summarise(codes) == local.summarise(codes[::-1]) == code
    assert local.helps(code) == is_helped


def test_a_launch_inside_a_launch_is_refused():
    inner = [sys.executable, "-m", "jaxtrain", "launch", "--processes=1", "--", "true"]
    code, output, _ = ended([*inner[:-1], *inner])
    assert code == ExitCode.CONFIG
    (line,) = output.splitlines()
    assert re.match(r"\[0\] error: .* JAXTRAIN_NUM_PROCESSES=1 JAXTRAIN_PROCESS_ID=0 says", line)
    assert "leave jaxtrain launch out of the command" in line


@pytest.mark.parametrize(
    ("outgoing", "is_allowed"),
    [
        ([20000, 65000], lambda port: port > 65000),
        ([30000, 65535], lambda port: 20000 <= port < 30000),
        ([1024, 65535], lambda port: port >= 1024),
        ([], lambda port: port >= 20000),
    ],
)
def test_the_coordinator_s_port_is_none_that_connections_get(monkeypatch, outgoing, is_allowed):
    monkeypatch.setattr(local, "outgoing_ports", lambda: outgoing)
    assert is_allowed(local._free_port())


def command(*words, program):
    return [sys.executable, "-m", "jaxtrain", "launch", *words, "--", sys.executable, "-c", program]


def finished(*words, program, **variables):
    """(exit code, output, messages) of the launcher."""
    return ended(command(*words, program=program), **variables)


def ended(words, **variables):
    process = subprocess.run(
        words,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


def test_each_process_is_told_its_place_and_its_lines_carry_its_number():
    program = (
        "import os; e = os.environ\n"
        "print(e['JAXTRAIN_PROCESS_ID'], 'of', e['JAXTRAIN_NUM_PROCESSES'])\n"
        "print(e['JAXTRAIN_COORDINATOR'], e['JAX_NUM_CPU_DEVICES'], end='')\n"
    )
    code, output, _ = finished("--processes=3", "--devices_per_process=2", program=program)
    assert code == 0
    lines = sorted(output.splitlines())
    assert len(lines) == 6
    assert [line for line in lines if " of " in line] == [f"[{i}] {i} of 3" for i in range(3)]
    addresses = {line.partition("] ")[2] for line in lines if " of " not in line}
    assert len(addresses) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+ 2", *addresses)


ONCE = (
    "import os, sys, pathlib\n"
    "mark = pathlib.Path(os.environ['MARK'] + os.environ['JAXTRAIN_PROCESS_ID'])\n"
    "starts = int(mark.read_text()) if mark.exists() else 0\n"
    "mark.write_text(str(starts + 1))\n"
    "sys.exit(0 if starts == 2 else int(os.environ['CODE']))\n"
)


@pytest.mark.parametrize("code", [76, 124, 1])
def test_it_starts_again_where_that_helps(tmp_path, code):
    found, _, said = finished(
        *("--processes=2", "--restarts=3"), program=ONCE, MARK=f"{tmp_path}/m", CODE=str(code)
    )
    assert found == 0, said
    assert f"ended with exit codes {code}, {code}; again in 1 s (restart 1 of 3)" in said
    assert "again in 2 s (restart 2 of 3)" in said
    assert "(restart 3 of 3)" not in said


@pytest.mark.parametrize(("restarts", "starts"), [(0, 1), (1, 2)])
def test_it_starts_again_at_most_so_often(tmp_path, restarts, starts):
    words = ("--processes=1", f"--restarts={restarts}")
    assert finished(*words, program=ONCE, MARK=f"{tmp_path}/m", CODE="76")[0] == 76
    assert (tmp_path / "m0").read_text() == str(starts)


@pytest.mark.parametrize("code", [2, 3, 4, 75])
def test_it_does_not_start_again_where_that_does_not_help(tmp_path, code):
    words = ("--processes=1", "--restarts=3")
    assert finished(*words, program=ONCE, MARK=f"{tmp_path}/m", CODE=str(code))[0] == code
    assert (tmp_path / "m0").read_text() == "1"


def test_a_command_that_does_not_exist():
    process = subprocess.run(
        [sys.executable, "-m", "jaxtrain", "launch", "--processes=2", "--", "no-such-command"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert process.returncode == ExitCode.CONFIG
    assert process.stderr == "error: no-such-command cannot be started: No such file or directory\n"


# A launcher with less patience.
HASTY = (
    "import sys; from jaxtrain.launch import local; local.REST_SECONDS = 0.2;"
    " local.SAME_SIGNAL_SECONDS = 0.0; sys.exit(local.launch(sys.argv[1:]))"
)


def test_processes_that_print_elsewhere_are_waited_for(tmp_path):
    os.mkfifo(tmp_path / "go")
    shell = "echo ready; exec >$LOG$JAXTRAIN_PROCESS_ID 2>&1; read x <$GO; echo finished"
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", "launch", "--processes=1", "--", "bash", "-c", shell],
        env=environment() | {"LOG": f"{tmp_path}/log", "GO": f"{tmp_path}/go"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process, open(tmp_path / "go", "r+b", buffering=0) as go:
        assert process.stdout.readline() == "[0] ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        go.write(b"go\n")
        assert process.wait(TIMEOUT) == 0
    assert (tmp_path / "log0").read_text() == "finished\n"


# Says its pid; told to end it waits for its parent to end if that is asked for, and marks that.
UNDER_A_SHELL = (
    "import os, signal, sys, pathlib, time\n"
    "parent = os.getppid()\n"
    "def end(number, frame):\n"
    "    print('told', flush=True)\n"
    "    while number == signal.SIGTERM and os.getppid() == parent:\n"
    "        time.sleep(0.01)\n"
    "    pathlib.Path(os.environ['MARK'] + os.environ['JAXTRAIN_PROCESS_ID']).write_text('saved')\n"
    "    if 'STAY' not in os.environ:\n"
    "        sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "signal.signal(signal.SIGINT, end)\n"
    "print('ready', os.getpid(), True, flush=True)\n"
    "while True:\n"
    "    time.sleep(1000)\n"
)


def launched_under_a_shell(*launcher, shell='"$0" -c "$1"; echo after', **variables):
    return subprocess.Popen(
        [*launcher, "--processes=2", "--", "bash", "-c", shell, sys.executable, UNDER_A_SHELL],
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_signals_reach_what_a_shell_has_started_and_that_is_waited_for(tmp_path, number, code):
    launcher = (sys.executable, "-m", "jaxtrain", "launch")
    with launched_under_a_shell(*launcher, MARK=f"{tmp_path}/m") as process:
        pids = pids_of(process, 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=TIMEOUT)
        # SIGTERM ends a shell; one that is interrupted goes on if what it waits for did not mind.
        assert process.returncode == code, output
        assert output.count("after") == (0 if code else 2)
    assert [(tmp_path / f"m{i}").read_text() for i in range(2)] == ["saved"] * 2
    assert_gone(*pids)


def test_a_second_signal_bounds_the_wait(tmp_path):
    launcher = (sys.executable, "-c", HASTY)
    with launched_under_a_shell(*launcher, MARK=f"{tmp_path}/m", STAY="1") as process:
        pids = pids_of(process, 2)
        process.send_signal(signal.SIGINT)
        while "told" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 137
    assert_gone(*pids)


def test_the_exit_code_is_not_that_of_what_the_launcher_has_killed(tmp_path):
    os.mkfifo(tmp_path / "go")
    shell = '[ $JAXTRAIN_PROCESS_ID = 1 ] && read x <$MARK/go && exit 5; "$0" -c "$1"; echo after'
    launcher = (sys.executable, "-c", HASTY)
    process = launched_under_a_shell(*launcher, shell=shell, MARK=str(tmp_path))
    with process:
        pids = pids_of(process, 1)
        (tmp_path / "go").write_text("go\n")
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 5, output
        assert "ended with exit codes -9, 5" in output
    assert_gone(*pids)


@pytest.mark.parametrize(
    ("target", "reason"), [("pipe", "Broken pipe"), ("full", "No space"), ("closed", "")]
)
def test_an_output_that_nobody_takes_does_not_end_the_run(tmp_path, target, reason):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "jaxtrain", "launch", "--processes=1", "--", "bash", "-c"]
    words.append("echo one; echo two; echo done >$MARK; exit 3")
    with open("/dev/full", "wb") as full, open(writer, "wb") as pipe:
        process = subprocess.run(
            ["bash", "-c", 'exec "$@" >&-', "bash", *words] if target == "closed" else words,
            env=environment() | {"MARK": str(tmp_path / "mark")},
            stdout=full if target == "full" else pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    assert process.returncode == 3, process.stderr
    assert (tmp_path / "mark").read_text() == "done\n"
    assert process.stderr.count("standard output is gone") == bool(reason)
    assert reason in process.stderr
    assert "Traceback" not in process.stderr


def launched(*words):
    return subprocess.Popen(
        [*(sys.executable, "-m", "jaxtrain", "launch", *words, "--"), sys.executable, GUARDED],
        env=environment() | {"GUARDED_SECONDS": "99"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pids_of(process, count):
    """The pids of the processes under the guardians, when they are ready."""
    found = {}
    while len(found) < count:
        line = process.stdout.readline()
        assert line, "ended too soon"
        if match := re.match(r"\[(\d+)\] ready (\d+) True", line):
            found[int(match[1])] = int(match[2])
    return [found[i] for i in range(count)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_forwarded_and_end_the_launcher(number):
    with launched("--processes=2", "--restarts=3") as process:
        pids = pids_of(process, 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == ExitCode.PREEMPTED, output
    assert_gone(*pids)


def test_a_closed_terminal_does_not_end_what_nohup_has_started():
    words = command("--processes=1", program="import os; os.kill(int(os.environ['PARENT']), 1)")
    script = 'trap "" HUP; PARENT=$$ exec "$@"'
    assert ended(["bash", "-c", script, "bash", *words])[0] == 0


def test_a_killed_process_is_started_again_with_the_others():
    with launched("--processes=2", "--restarts=1") as process:
        first = pids_of(process, 2)
        os.kill(first[1], signal.SIGKILL)
        second = pids_of(process, 2)
        assert not set(first) & set(second)
        os.kill(second[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == ExitCode.PEER_LOST
        assert "was killed by signal 9 at step 0 in start; the others are stopped" in output


def test_a_killed_launcher_takes_all_along():
    with launched("--processes=2") as process:
        pids = pids_of(process, 2)
        process.kill()
        assert_gone(*pids)

"""The profiler's window: exactly its steps, never left running."""

import collections
import gzip
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.profiling import ProfileWindow, parse_profile_window


@jax.jit
def train_step(x):
    with jax.named_scope("attention"):
        return jnp.tanh(x @ x)


def trace_events(workdir: Path) -> list[dict]:
    """Events of the one trace below the workdir."""
    (path,) = workdir.glob("profile/plugins/profile/*/*.trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def traced_steps(workdir: Path) -> list[int]:
    events = trace_events(workdir)
    return sorted(
        int(event["args"]["step_num"]) for event in events if event.get("name") == "train"
    )


def run(window: ProfileWindow, steps: Iterable[int], size: int = 8) -> None:
    x = jnp.ones((size, size))
    try:
        for index in steps:
            window.step(index, x)
            with window.annotate(index):
                x = train_step(x)
    finally:
        window.close()


def is_tracing() -> bool:
    try:
        jax.profiler.stop_trace()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "window"), [("10:15", (10, 15)), ("0:1", (0, 1)), (" 3:4 ", (3, 4))]
)
def test_a_window(text, window):
    assert parse_profile_window(text) == window


@pytest.mark.parametrize(
    "text", ["", "10", "10:", ":15", "15:10", "5:5", "-1:5", "a:b", "1:2:3", "1.5:2"]
)
def test_what_is_not_a_window(text):
    with pytest.raises(ConfigError, match=r"is not START:STOP.*--profile=10:15"):
        parse_profile_window(text)


def test_the_trace_holds_exactly_the_steps_of_the_window(tmp_path, caplog):
    with caplog.at_level("INFO", "jaxtrain"):
        # So large that the device is still computing when the next step is dispatched.
        run(ProfileWindow("3:6", tmp_path), range(10), size=1000)
    assert traced_steps(tmp_path) == [3, 4, 5]
    on_device = collections.Counter(
        event["args"]["hlo_op"]
        for event in trace_events(tmp_path)
        if event.get("args", {}).get("hlo_module") == "jit_train_step"
    )
    assert set(on_device.values()) == {3}, on_device
    assert not is_tracing()
    (message,) = caplog.messages
    (folder,) = (tmp_path / "profile" / "plugins" / "profile").iterdir()
    assert message.startswith(f"profile of step 3 to 5 is in {folder};")
    assert f"xprof --logdir {tmp_path / 'profile'}`" in message
    assert list(folder.glob("*.xplane.pb"))


def test_the_run_ends_inside_the_window(tmp_path, caplog):
    with caplog.at_level("INFO", "jaxtrain"):
        run(ProfileWindow("3:6", tmp_path), range(4))
    assert traced_steps(tmp_path) == [3]
    assert not is_tracing()
    assert caplog.messages[0].startswith("profile of step 3 is in ")


def test_a_run_resumed_inside_the_window_records_the_rest(tmp_path):
    run(ProfileWindow("3:6", tmp_path), range(5, 8))
    assert traced_steps(tmp_path) == [5]


@pytest.mark.parametrize("steps", [range(3), range(6, 9), range(0)])
def test_a_window_that_is_never_reached_is_said(tmp_path, caplog, steps):
    run(ProfileWindow("3:6", tmp_path), steps)
    assert caplog.messages == ["profile=3:6 recorded nothing: this process ran none of these steps"]
    assert not (tmp_path / "profile").exists()


def test_an_error_inside_the_window_ends_the_trace(tmp_path):
    class FailingError(Exception):
        pass

    def steps():
        yield 0
        raise FailingError

    with pytest.raises(FailingError):
        run(ProfileWindow("0:5", tmp_path), steps())
    assert traced_steps(tmp_path) == [0]
    assert not is_tracing()


def test_no_window_does_nothing(tmp_path, caplog):
    window = ProfileWindow("", tmp_path)
    run(window, range(3))
    assert not window.is_recording
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []


def test_a_trace_of_the_users_own_is_left_alone(tmp_path, caplog):
    with jax.profiler.trace(str(tmp_path / "own")):
        run(ProfileWindow("1:3", tmp_path / "run"), range(5))
    assert list((tmp_path / "own").rglob("*.xplane.pb"))
    assert not (tmp_path / "run" / "profile" / "plugins").exists()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("profile=1:3 is skipped: ")


def test_leaving_past_the_loop_ends_the_trace(tmp_path):
    code = (
        "import sys, jax, jax.numpy as jnp\n"
        "from jaxtrain.profiling import ProfileWindow\n"
        "window = ProfileWindow('0:5', sys.argv[1])\n"
        "window.step(0)\n"
        "with window.annotate(0):\n"
        "    jnp.ones(3).block_until_ready()\n"
        "sys.exit(7)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True)
    assert result.returncode == 7, result.stderr
    assert traced_steps(tmp_path) == [0]
